"""adamw: the spec in exact rationals and in plain NumPy, edge values, what is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from minitransformer.errors import UnsupportedDevice
from minitransformer.ops import adamw

SETTINGS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
NAN = np.uint32(0x7FC00000).view(np.float32)
KINDS = {
    "normal": lambda seed, n: inputs.normal(seed, n),
    "small": lambda seed, n: inputs.normal(seed, n, scale=2.0**-140),  # squares that vanish, subnormal moments
    "any bits": inputs.f32_of_any_bits,
}


def state(seed: int, *shape: int, kind: str = "normal") -> list[torch.Tensor]:
    """weight, grad, master, exp_avg, exp_avg_sq: arguments of adamw, the last not negative unless of any bits."""
    grad, master, m, v = (KINDS[kind](seed + i, math.prod(shape)).view(shape) for i in range(4))
    return [torch.zeros(shape, dtype=torch.bfloat16), grad, master, m * 0.1, v if kind == "any bits" else v * v * 0.01]


def numbers(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), NAN, x)


def by_numpy(state: list[torch.Tensor], s: adamw.Scalars, fused: str = "") -> list[torch.Tensor]:
    """The spec, one NumPy operation a rounding. fused: which of m, v, p has a product that an FMA swallows: wrong."""
    clip, b1, w1, b2, w2, root, eps, size, decay = (np.float32(x) for x in s)

    def plus(kind, a, b, c):
        """a * b + c"""
        wide = (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)
        return wide if kind == fused else a * b + c

    g, p, m, v = (None if x is None else x.numpy() for x in state[1:])
    with np.errstate(all="ignore"):
        g = np.zeros_like(p) if g is None else g * clip
        m = plus("m", b1, m, w1 * g)
        v = plus("v", b2, v, w2 * (g * g))
        u = size * (m / (np.sqrt(v) * root + eps))
        p = numbers(p - plus("p", decay, p, u))
        return [plain.bf16(p), *(torch.from_numpy(numbers(x)) for x in (p, m, v))]


def updated(state: list[torch.Tensor], s: adamw.Scalars) -> list[torch.Tensor]:
    """weight, master and moments of copies."""
    state = [None if x is None else x.clone() for x in state]
    adamw.adamw(*state, s)
    return [state[0], *state[2:]]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str = "") -> None:
    for name, a, b in zip(("weight", "master", "exp_avg", "exp_avg_sq"), got, want, strict=True):
        assert_bits_equal(a, b, f"{what} {name}")


@given(
    n=st.integers(1, 2100), seed=st.integers(0, 2**20), kind=st.sampled_from(sorted(KINDS)),
    t=st.integers(1, 10**6), beta=st.sampled_from([0.0, 0.3, 0.9, 0.95]), decay=st.sampled_from([0.0, 0.01, 0.1]),
    clip=st.sampled_from([1.0, 0.3, 1e-6]), reached=st.booleans(),
)  # fmt: skip
def test_agrees_with_plain_numpy(n, seed, kind, t, beta, decay, clip, reached):
    s = adamw.scalars(t, 3e-4, (beta, 0.999), 1e-8, decay, clip)
    operands = state(seed, n, kind=kind)
    operands[1] = operands[1] if reached else None
    assert_same(updated(operands, s), by_numpy(operands, s), kind)


def rounded(x: Fraction) -> Fraction:
    """To FP32, nearest even, subnormals kept."""
    if x == 0:
        return x
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    e -= abs(x) < Fraction(2) ** e
    unit = Fraction(2) ** (max(e, -126) - 23)
    return round(x / unit) * unit  # of a tie the even one


def root_of(x: Fraction) -> Fraction:
    """The square root rounded to FP32, by integers."""
    scaled = x * 4**200
    assert scaled.denominator == 1
    low = math.isqrt(scaled.numerator)
    # Inexact, the root is no FP32 and no tie: what lies between low and low + 1 rounds as it does.
    return rounded(Fraction(2 * low + (low * low != scaled.numerator), 2**201))


@pytest.mark.parametrize("kind", ["normal", "small"])
def test_agrees_with_exact_rationals(kind):
    n, s = 200, adamw.scalars(7, clip=0.3, **SETTINGS)
    operands = state(3, n, kind=kind)
    clip, b1, w1, b2, w2, root, eps, size, decay = map(Fraction, s)
    got = updated(operands, s)
    for i in range(n):
        g, p, m, v = (Fraction(x[i].item()) for x in operands[1:])
        g = rounded(g * clip)
        m = rounded(rounded(b1 * m) + rounded(w1 * g))
        v = rounded(rounded(b2 * v) + rounded(w2 * rounded(g * g)))
        d = rounded(rounded(root_of(v) * root) + eps)
        u = rounded(size * rounded(m / d))
        p = rounded(p - rounded(u + rounded(decay * p)))
        assert [x[i].item() for x in got[1:]] == [float(p), float(m), float(v)], i


@pytest.mark.parametrize("fused", ["m", "v", "p"])
def test_no_product_and_sum_are_fused(fused):
    operands, s = state(5, 4096), adamw.scalars(7, 0.3, (0.9, 0.999), 1e-8, 0.7)
    place = "pmv".index(fused) + 1
    wrong, right = by_numpy(operands, s, fused)[place], by_numpy(operands, s)[place]
    assert not torch.equal(wrong, right)
    assert_bits_equal(updated(operands, s)[place], right, fused)


def test_eps_stands_beside_the_root():
    """As in torch's AdamW: with v = 0 the step is size * m / eps, and not / sqrt(eps)."""
    s = adamw.scalars(1, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    operands = [torch.zeros(1, dtype=torch.bfloat16), None, *(torch.tensor([x]) for x in (0.0, 1e-9, 0.0))]
    assert updated(operands, s)[1].item() == pytest.approx(-1e-3 / 0.1 * 0.9e-9 / 1e-8, rel=1e-6)


def test_the_edges():
    """g, p, m, v -> p', m', v' as IEEE has them; a NaN is the one NaN; zeros keep their signs."""
    inf, nan, s = math.inf, math.nan, adamw.scalars(3, 1e-3, (0.5, 0.5), 1e-8, 0.0)
    cases = [
        ((0.0, -0.0, 0.0, 0.0), (-0.0, 0.0, 0.0)),
        ((-0.0, 1.0, -0.0, 0.0), (1.0, -0.0, 0.0)),
        ((1e30, 2.0, 0.0, 0.0), (2.0, 5e29, inf)),  # a square that overflows moves nothing
        ((0.0, 2.0, 1.0, inf), (2.0, 0.5, inf)),
        ((inf, 2.0, 0.0, 0.0), (nan, inf, inf)),
        ((nan, 2.0, 0.0, 0.0), (nan, nan, nan)),
        ((0.0, inf, 0.0, 0.0), (nan, 0.0, 0.0)),  # infinity times a decay of 0
        ((0.0, nan, 0.0, 0.0), (nan, 0.0, 0.0)),
        ((0.0, 1.0, 0.0, -1.0), (nan, 0.0, -0.5)),
        ((2.0**-149, 1.0, 2.0**-149, 2.0**-148), (1.0, 0.0, 2.0**-149)),  # ties to even among subnormals
    ]
    columns = [torch.tensor(x, dtype=torch.float32) for x in zip(*(given for given, _ in cases), strict=True)]
    columns[0][5] = torch.tensor(-4194303, dtype=torch.int32).view(torch.float32)  # a NaN with a sign and a payload
    want = [torch.from_numpy(numbers(np.array(x, np.float32))) for x in zip(*(w for _, w in cases), strict=True)]
    got = updated([torch.zeros(len(cases), dtype=torch.bfloat16), *columns], s)
    assert_same(got, [plain.bf16(want[0].numpy()), *want])
    assert got[0].view(torch.int16)[5].item() == 0x7FC0


@pytest.mark.parametrize("t", [1, 2, 3, 7, 1000, 123456])
@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_powers_and_scalars(t, b):
    b = float(np.float32(b))
    exact = Fraction(b) ** min(t, 1000)
    assert adamw.power(b, min(t, 1000)) == pytest.approx(float(exact), rel=1e-12, abs=0)
    s = adamw.scalars(t, 1e-3, (b, b), 1e-8, 0.01, 1 / 3)
    assert all(x == float(np.float32(x)) for x in s)
    assert s.w1 == 1 - s.b1 and s.clip == np.float32(1 / 3) and s.decay == np.float32(1e-3 * 0.01)
    correction = 1 - (float(exact) if t <= 1000 else b**t)
    assert s.size == pytest.approx(1e-3 / correction, rel=1e-6)
    assert s.root == pytest.approx(correction**-0.5, rel=1e-6)


def test_the_order_of_the_squarings():
    """r r b for the bits of 13, 1101, from the highest: three roundings of FP64 beside those of another order."""
    b = 0.9
    r = b * b * b
    r = r * r
    r = r * r * b
    assert adamw.power(b, 13) == r and adamw.power(b, 0) == 1.0
    assert adamw.power(0.999, 123457).hex() == "0x1.bdbf68d140206p-179"


def test_every_length_cut_and_shape_has_the_same_bits():
    s, whole = adamw.scalars(4, **SETTINGS), state(9, 70000)
    want = updated(whole, s)
    for n in (1, 2, 3, 1023, 1024, 1025, 4097):
        assert_same(updated([x[:n].clone() for x in whole], s), [x[:n] for x in want], f"{n}")
        assert_same(updated([x[-n:].clone() for x in whole], s), [x[-n:] for x in want], f"last {n}")
    assert_same([x.flatten() for x in updated([x.view(7, 100, 100) for x in whole], s)], want, "another shape")
    torch.set_num_threads(2)
    try:
        assert_same(updated(whole, s), want, "two threads")
    finally:
        torch.set_num_threads(1)


def test_writes_are_counted():
    operands = state(1, 8)
    views = [x.detach() for x in operands]
    adamw.adamw(*views, adamw.scalars(1, **SETTINGS))
    assert [x._version for x in operands] == [1, 0, 1, 1, 1]


def test_bad_settings_and_tensors_are_refused():
    good = dict(t=1, **SETTINGS)
    for change, message in [
        ({"t": 0}, "update 0"), ({"lr": -1e-3}, "lr"), ({"lr": 1e39}, "lr"), ({"lr": math.nan}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"), ({"betas": (0.9, 1 - 1e-9)}, "betas"), ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"), ({"eps": 0.0}, "eps"), ({"eps": 1e-50}, "eps"), ({"weight_decay": -1}, "weight"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            adamw.scalars(**(good | change))
    s, whole = adamw.scalars(**good), state(2, 4, 6)
    with pytest.raises(ValueError, match="one shape"):
        adamw.adamw(*whole[:4], whole[4][:3], s)
    for i in (0, 2, 3, 4):
        turned = [x.t().contiguous().t() if k == i else x for k, x in enumerate(whole)]
        with pytest.raises(ValueError, match="contiguous"):
            adamw.adamw(*turned, s)
    with pytest.raises(TypeError, match="FP32"):
        adamw.adamw(whole[0], whole[1].bfloat16(), *whole[2:], s)
    with pytest.raises(TypeError, match="BF16"):
        adamw.adamw(whole[1], *whole[1:], s)
    with pytest.raises(UnsupportedDevice):
        adamw.adamw(whole[0], whole[1].to("meta"), *whole[2:], s)
    assert_same([whole[0], *whole[2:]], [state(2, 4, 6)[i] for i in (0, 2, 3, 4)], "untouched")


def test_a_grad_in_another_layout_and_nothing_at_all():
    s, operands = adamw.scalars(2, **SETTINGS), state(6, 5, 7)
    want = updated(operands, s)
    operands[1] = operands[1].t().contiguous().t()
    assert_same(updated(operands, s), want)
    assert_same(updated(state(1, 0), s), [x for i, x in enumerate(state(1, 0)) if i != 1])
