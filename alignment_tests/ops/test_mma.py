"""The chain against the H200's known answers, against exact rationals, and against itself on other instruction sets."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment_tests.bits import assert_bits_equal
from minitransformer.ops import mma

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = ("normal", "wide", "subnormal_out", "special")


def known_answers(name):
    with np.load(GOLDENS / "hopper_bf16_mma.npz") as z:
        a, b, d = (np.ascontiguousarray(z[f"{name}_{x}"]) for x in "abd")
    return a.view(np.uint16), b.view(np.uint16), d.view(np.float32)


def same_or_nan(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))


def value(bits: int) -> Fraction:
    return Fraction(float(np.uint32(bits << 16).view(np.float32)))


def exponent(x: Fraction) -> int:
    """floor(log2|x|), a subnormal counts as -126."""
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    return max(e if Fraction(2) ** e <= abs(x) else e - 1, -126)


def toward_zero(x: Fraction, unit: int) -> Fraction:
    q = x / Fraction(2) ** unit
    return (abs(q.numerator) // q.denominator) * (1 if q > 0 else -1) * Fraction(2) ** unit


def chain_of_rationals(a, b, c: float = 0.0) -> float:
    """The spec, word for word, for finite operands."""
    acc = Fraction(c)
    for k in range(0, len(a), 16):
        pairs = [(value(int(x)), value(int(y))) for x, y in zip(a[k : k + 16], b[k : k + 16], strict=True)]
        terms = [(x * y, exponent(x) + exponent(y)) for x, y in pairs if x * y != 0]
        terms += [(acc, exponent(acc))] if acc != 0 else []
        if not terms:
            continue
        top = max(-133, *(e for _, e in terms))
        acc = sum(toward_zero(t, top - 25) for t, _ in terms)
        acc = toward_zero(acc, max(exponent(acc) - 23, -149)) if acc else acc
        if abs(acc) >= Fraction(2) ** 128:
            return float("inf") if acc > 0 else float("-inf")
    return float(acc)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k_major", [True, False])
def test_known_answers_of_an_h200(name, k_major):
    a, b, want = known_answers(name)
    got = mma.chain_bits(a, b if k_major else np.ascontiguousarray(b.T), k_major)
    wrong = ~same_or_nan(got, want)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}"


@pytest.mark.parametrize("name", CASES)
def test_the_definition_gives_the_known_answers(name):
    a, b, want = known_answers(name)
    got = np.array([[mma.chain_scalar(a[i], b[:, j].copy(), np.uint32(0)) for j in range(16)] for i in range(16)])
    assert same_or_nan(got.astype(np.uint32).view(np.float32), want[:16, :16].copy()).all()


@pytest.mark.parametrize("name", list("abcdef"))
def test_known_answers_far_below_normal_numbers(name):
    """Operands of 2^-63 and less, 16, 32 and 64 deep: the smallest E is -133, or one output in 300 is an ulp off."""
    with np.load(GOLDENS / "hopper_tiny_mma.npz") as z:
        a, b, want = (np.ascontiguousarray(z[f"{name}_{x}"]) for x in "abd")
    got = mma.chain_bits(a.view(np.uint16), b.view(np.uint16), True)
    wrong = got.view(np.uint32) != want.view(np.uint32)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}"


def operands(rng, shape, kind):
    if kind == "any bits":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    x = rng.standard_normal(shape)
    if kind == "wide":
        x = x * 2.0 ** rng.integers(-60, 60, shape)
    if kind == "tiny":
        x = x * 2.0 ** rng.integers(-136, -58, shape)
    x[rng.random(shape) < 0.1] = 0
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 100),
    n=st.integers(1, 70),
    kind=st.sampled_from(["normal", "wide", "tiny", "any bits"]),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_blocks_agree_with_the_definition(m, k, n, kind, accumulate, seed):
    rng = np.random.default_rng(seed)
    a, b = operands(rng, (m, k), kind), operands(rng, (k, n), kind)
    c = mma.NO_ACCUMULATOR
    if accumulate:
        c = (rng.standard_normal((m, n)) * 2.0 ** rng.integers(-140, 100, (m, n))).astype(np.float32)
    got = mma.chain_bits(a, b, True, c)
    transposed = mma.chain_bits(a, np.ascontiguousarray(b.T), False, c)
    assert (got.view(np.uint32) == transposed.view(np.uint32)).all()
    for i, j in zip(rng.integers(0, m, 12), rng.integers(0, n, 12), strict=True):
        start = c[i, j].view(np.uint32) if accumulate else np.uint32(0)
        assert got[i, j].view(np.uint32) == mma.chain_scalar(a[i], b[:, j].copy(), start), (i, j)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(["normal", "wide", "tiny"]), steps=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_the_definition_agrees_with_exact_rationals(kind, steps, seed):
    rng = np.random.default_rng(seed)
    a, b = operands(rng, 16 * steps, kind), operands(rng, 16 * steps, kind)
    c = np.float32(rng.standard_normal() * 2.0 ** rng.integers(-140, 100))
    got = mma.chain_scalar(a, b, c.view(np.uint32))
    assert np.uint32(got).view(np.float32) == np.float32(chain_of_rationals(a, b, float(c)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_beyond_int32(sign):
    """Sixteen products of the largest significand, and an accumulator: the sum in units of 2^(E - 25) exceeds 2^31."""
    a = np.full((1, 16), 0x3FFF, np.uint16)  # 1.9921875
    b = np.full((16, 32), 0x3FFF if sign > 0 else 0xBFFF, np.uint16)
    c = np.full((1, 32), np.float32(sign * 1.9999999), np.float32)
    want = np.float32(chain_of_rationals(a[0], b[:, 0], float(c[0, 0])))
    assert abs(want) * 2**25 > 2**31
    assert (mma.chain_bits(a, b, True, c) == want).all()


def test_signed_zeros_absorption_and_cancellation():
    one, minus_one, tiny = 0x3F80, 0xBF80, 0x0001
    row = np.zeros((1, 16), np.uint16)
    column = np.full((16, 1), one, np.uint16)
    row[0, :2] = one, minus_one
    assert mma.chain_bits(row, column, True).view(np.uint32) == 0  # a zero sum is +0
    row[0, :] = 0x8000
    assert mma.chain_bits(row, column, True).view(np.uint32) == 0  # so is a sum without terms
    row[0, :2] = one, tiny
    assert mma.chain_bits(row, column, True) == 1.0  # below 2^(E - 25): cut off, whatever the rounding mode


@pytest.mark.parametrize("exponent_field", [0, 1, 8, 16, 24, 30, 40])
def test_steps_far_below_fp32(exponent_field):
    """Steps whose every product lies below 2^-149 leave zero; a shift by more than 63 bits once did not."""
    rng = np.random.default_rng(exponent_field)
    fields = rng.integers(0, exponent_field + 1, (2, 40, 64))
    a, b = ((rng.integers(0, 128, f.shape) | (f << 7) | (rng.integers(0, 2, f.shape) << 15)).astype(np.uint16)
            for f in fields)  # fmt: skip
    a[:, 48:] |= 60 << 7  # the last step is large enough to be seen
    got = mma.chain_bits(a, b, False)
    for i in range(40):
        want = np.float32(chain_of_rationals(a[i], b[i]))
        assert got[i, i].view(np.uint32) == want.view(np.uint32), (i, got[i, i], want)


def test_rows_and_threads_do_not_matter():
    gen = torch.Generator().manual_seed(1)
    a = torch.randn(257, 80, generator=gen).bfloat16()
    b = torch.randn(80, 70, generator=gen).bfloat16()
    whole = mma.chain(a, b)
    assert_bits_equal(torch.cat([mma.chain(a[i : i + 1], b) for i in range(257)]), whole, "row by row")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert_bits_equal(mma.chain(a, b), whole, "two threads")
    finally:
        torch.set_num_threads(threads)


def test_k_split_by_the_caller_at_a_step_is_the_same_chain():
    gen = torch.Generator().manual_seed(2)
    a, b = torch.randn(9, 96, generator=gen).bfloat16(), torch.randn(96, 33, generator=gen).bfloat16()
    part = mma.chain(a[:, :48].contiguous(), b[:48].contiguous())
    assert_bits_equal(mma.chain(a[:, 48:].contiguous(), b[48:].contiguous(), part), mma.chain(a, b), "two calls")
    halves = part + mma.chain(a[:, 48:].contiguous(), b[48:].contiguous())
    assert not torch.equal(halves, mma.chain(a, b)), "a split of K must be visible, or this test shows nothing"


def test_groups_use_their_own_matrix():
    rng = np.random.default_rng(3)
    a, b = operands(rng, (40, 48), "normal"), operands(rng, (4, 35, 48), "normal")
    offsets = np.array([0, 0, 17, 18, 40])
    got = mma.grouped_chain_bits(a, b, False, offsets)
    for e in range(4):
        rows = slice(offsets[e], offsets[e + 1])
        assert (got[rows].view(np.uint32) == mma.chain_bits(a[rows], b[e], False).view(np.uint32)).all()


def test_shapes_and_dtypes_are_refused():
    a, b = torch.zeros(2, 16).bfloat16(), torch.zeros(32, 3).bfloat16()
    with pytest.raises(ValueError, match="K = 32"):
        mma.chain(a, b)
    with pytest.raises(TypeError, match="BF16"):
        mma.chain(a.float(), b)
    with pytest.raises(ValueError, match="accumulator"):
        mma.chain(torch.zeros(2, 32).bfloat16(), b, torch.zeros(3, 2))


PRINT_HASH = """
import hashlib, numpy as np, torch
torch.set_num_threads(1)
from alignment_tests.ops.test_mma import CASES, bits_hash
print(bits_hash())
"""


def bits_hash() -> str:
    """One hash over the chain's bits on all known operands, in both layouts, with and without an accumulator."""
    digest = hashlib.sha256()
    for name in CASES:
        a, b, d = known_answers(name)
        for k_major in (True, False):
            layout = b if k_major else np.ascontiguousarray(b.T)
            first = mma.chain_bits(a, layout, k_major)
            for out in (first, mma.chain_bits(a, layout, k_major, first)):
                digest.update(out.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("cpu", ["haswell", "generic"])
def test_the_same_bits_without_avx512(cpu, tmp_path):
    """Compiled for a CPU with AVX2, and for one without any of it: the same bits as natively."""
    env = dict(os.environ, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path))
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", PRINT_HASH], env=env, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == bits_hash()
