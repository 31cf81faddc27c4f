"""docs/nvfp4.md says what is so: the block by hand, in exact fractions and with the quantiser; names and recipes."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
from minitransformer.ops import nvfp4
from minitransformer.recipe import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "nvfp4.md"
E2M1 = [Fraction(v) / 2 for v in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


@pytest.fixture(scope="module")
def page():
    if not PAGE.exists():
        pytest.skip("the documentation is not beside the tests")
    return PAGE.read_text()


def fl(x: Fraction) -> Fraction:
    """The nearest FP32 number with 24 significant bits, ties to even (normal range)."""
    sign, x = (-1, -x) if x < 0 else (1, x)
    if x == 0:
        return x
    exponent = 0
    while x * Fraction(2) ** -exponent >= 2**24:
        exponent += 1
    while x * Fraction(2) ** -exponent < 2**23:
        exponent -= 1
    return sign * round(x * Fraction(2) ** -exponent) * Fraction(2) ** exponent  # Python rounds halves to even


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """The place of the nearest value, ties to the even place; beyond the last value the last one."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - min(x, values[-1])), i % 2))


def agrees(printed: str, exact: Fraction) -> bool:
    """Whether a number with so many digits is the exact one rounded for print."""
    digits = len(printed.replace("-", "").replace(".", "").lstrip("0")) or 1
    return float(f"{float(exact):.{digits}g}") == float(printed)


def test_the_block_by_hand(page):
    said = dict(re.findall(r"^\| (g|s_enc|s_dec|amax_block|before E4M3|d|enc) \|.*\| ([\d.]+) \|$", page, re.MULTILINE))
    rows = re.findall(
        r"^\| (\d+) \| ([-\d.]+) \| ([-\d.]+) \| (\d+) \| ([-\d.]+) \| ([-\d.]+) \| ([-\d.]+) \|$", page, re.M
    )
    assert len(said) == 7 and [int(row[0]) for row in rows] == list(range(16))
    x = [Fraction(row[1]) for row in rows]
    g, amax = Fraction(said["g"]), max(map(abs, x))
    s_enc = fl(2688 / g)
    s_dec = fl(1 / s_enc)
    before = fl(amax * fl(s_enc * fl(Fraction(1, 6))))
    d_bits = nearest(before, E4M3)
    d = E4M3[d_bits]
    enc = fl(1 / fl(d * s_dec))
    exact = {"s_enc": s_enc, "s_dec": s_dec, "amax_block": amax, "before E4M3": before, "d": d, "enc": enc}
    for name, number in exact.items():
        assert agrees(said[name], number), (name, said[name], float(number))
    codes = []
    for value, (_, _, scaled, code, e2m1, product, result) in zip(x, rows, strict=True):
        y = fl(value * enc)
        place = nearest(abs(y), E2M1)
        codes.append(place + 8 * (value < 0))
        assert int(code) == codes[-1] and agrees(scaled, y)
        decoded = E2M1[place] * (-1 if value < 0 else 1)
        assert Fraction(e2m1) == decoded and Fraction(product) == decoded * d
        assert agrees(result, fl(decoded * d * s_dec))
    packed = [codes[i] + 16 * codes[i + 1] for i in range(0, 16, 2)]
    stored = re.search(r"codes `([0-9a-f ]+)`", page).group(1)
    assert bytes.fromhex(stored) == bytes(packed)
    assert int(re.search(r"block scale `([0-9a-f]{2})`", page).group(1), 16) == d_bits

    q = nvfp4.quantize(torch.tensor([[float(v) for v in x]]).bfloat16(), torch.tensor([float(g)]))
    assert q.codes[0].tolist() == packed and q.scales.item() == d_bits
    assert Fraction(q.outer.item()) == s_dec
    want = [fl(E2M1[c & 7] * (-1 if c & 8 else 1) * d * s_dec) for c in codes]
    assert [Fraction(v) for v in nvfp4.dequantize(q)[0].tolist()] == want
    lost = np.array([float(a - b) for a, b in zip(want, x, strict=True)])
    share = float(np.linalg.norm(lost) / np.linalg.norm([float(v) for v in x]))
    assert f"lost {100 * share:.1f} %" in page.replace("\n", " ")


def test_names_and_recipes_are_those_of_the_code(page):
    for form in FORMATS.values():
        for suffix in form.suffixes:
            assert f"`{suffix}` " in page
    for name in RECIPES:
        assert f"| `{name}` |" in page
