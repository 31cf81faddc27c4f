"""swiglu: one rounding, gate first, gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.ops import nvfp4, rounding
from minitransformer.ops.swiglu import swiglu, swiglu_amax


def halves(x: torch.Tensor):
    return np.split(plain.wide(x), 2, axis=1)


@given(R=st.integers(1, 9), F=st.integers(1, 70), seed=st.integers(0, 2**20), scale=st.sampled_from([0.1, 2.0, 60.0]))
def test_agrees_with_plain_numpy(R, F, seed, scale):
    x = inputs.bf16(seed, R, 2 * F, scale=scale)
    g, u = halves(x)
    assert_bits_equal(swiglu(x), plain.bf16(plain.silu(g, rounding.EXP2) * u), "swiglu")


def test_silu_is_not_rounded_before_the_product():
    """Reported: bf16(bf16(silu(g)) * u) in place of bf16(silu(g) * u)."""
    x = inputs.bf16(1, 64, 64)
    g, u = halves(x)
    silu = plain.silu(g, rounding.EXP2)
    twice = plain.bf16(plain.wide(plain.bf16(silu)) * u)
    once = plain.bf16(silu * u)
    assert (once != twice).any()
    assert_bits_equal(swiglu(x), once, "one rounding")


def test_gate_comes_first():
    x = torch.tensor([[-30.0, 2.0]], dtype=torch.bfloat16)
    assert abs(swiglu(x).item()) < 1e-9 and swiglu(x.flip(1)).item() == pytest.approx(-30 * 1.7616, rel=1e-2)


def test_a_row_has_the_same_bits_in_any_batch_and_beside_a_large_one():
    x = inputs.bf16(2, 512, 48)
    whole = swiglu(x)
    for R in (1, 32, 33):
        assert_bits_equal(swiglu(x[:R].contiguous()), whole[:R], f"{R} rows")
    x[100] = 1e4
    others = torch.arange(512) != 100
    assert_bits_equal(swiglu(x)[others], whole[others], "other rows")
    torch.set_num_threads(2)
    try:
        assert_bits_equal(swiglu(x)[others], whole[others], "two threads")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("R", [1, 15, 16, 17, 129])
def test_the_amax_taken_while_writing_is_that_of_a_separate_pass(R):
    """Of h as it is rounded, not of the FP32 value before."""
    x = inputs.normal(7, R, 96) * 2
    x[:, [47, 95]] *= 30  # the last column of h is the largest
    h, amax = swiglu_amax(x)
    assert_bits_equal(h, plain.bf16(plain.silu(x[:, :48].numpy(), rounding.EXP2) * x[:, 48:].numpy()), "h")
    assert_bits_equal(amax, nvfp4.row_amax(h), "amax")
    assert_bits_equal(amax, h.float().abs().amax(1), "amax, by torch")
    x[0, 3] = float("nan")
    assert torch.isnan(swiglu_amax(x)[1][0])


def test_infinities_follow_the_formula():
    x = torch.tensor([[float("inf"), 1.0], [float("-inf"), 1.0], [-200.0, 1.0], [200.0, 1.0]], dtype=torch.bfloat16)
    got = swiglu(x).flatten().tolist()
    assert got[0] == float("inf") and np.isnan(got[1]) and got[2] == 0 and got[3] == 200


def test_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="2F"):
        swiglu(inputs.bf16(1, 2, 5))
    with pytest.raises(TypeError, match="BF16"):
        swiglu(torch.zeros(2, 4))


def test_differentiates():
    x, dh = inputs.bf16(3, 6, 20, scale=2.0).requires_grad_(), inputs.bf16(4, 6, 10)
    swiglu(x).backward(dh)

    def loss(v):
        g, u = np.split(v, 2, axis=1)
        return float((g / (1 + np.exp(-g)) * u * plain.wide(dh)).sum())

    assert_gradient(x.grad, finite_differences(loss, plain.wide(x)), "dgate, dup")


def test_the_gradients_bits_are_the_specs():
    x, dh = inputs.bf16(5, 30, 128, scale=4.0).requires_grad_(), inputs.bf16(6, 30, 64)
    swiglu(x).backward(dh)
    (g, u), d = halves(x), plain.wide(dh)
    s, y = plain.sigmoid(g, rounding.EXP2), plain.silu(g, rounding.EXP2)
    slope = s + y * (np.float32(1) - s)
    assert_bits_equal(x.grad, plain.bf16(np.concatenate([(d * u) * slope, d * y], 1)), "dgate, dup")
