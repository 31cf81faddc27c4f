"""rms_norm: bits against plain NumPy with and without a residual, batch invariance, gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.ops.rms_norm import rms_norm, rms_norm_residual

F32 = np.float32
EPS = 1e-6


def inverse(v: np.ndarray) -> np.ndarray:
    return F32(1) / np.sqrt(plain.lane_sum(v * v) / F32(v.shape[-1]) + F32(EPS))


def oracle(v: np.ndarray, weight: torch.Tensor) -> torch.Tensor:
    return plain.bf16((v * inverse(v)[:, None]) * plain.wide(weight))


@given(T=st.integers(1, 7), D=st.integers(1, 300), seed=st.integers(0, 2**20), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_agrees_with_plain_numpy(T, D, seed, scale):
    x, w = inputs.bf16(seed, T, D, scale=scale), inputs.bf16(seed + 1, D)
    assert_bits_equal(rms_norm(x, w, EPS), oracle(plain.wide(x), w), "rms_norm")


@given(T=st.integers(1, 7), D=st.integers(1, 300), seed=st.integers(0, 2**20))
def test_with_a_residual_agrees_with_plain_numpy(T, D, seed):
    x, r, w = inputs.bf16(seed, T, D), inputs.bf16(seed + 1, T, D, scale=8.0), inputs.bf16(seed + 2, D)
    s = plain.wide(x) + plain.wide(r)
    y, new = rms_norm_residual(x, r, w, EPS)
    assert_bits_equal(new, plain.bf16(s), "new residual")
    assert_bits_equal(y, oracle(s, w), "norm of the sum")


def test_the_norm_sees_the_unrounded_sum():
    x, r, w = inputs.bf16(1, 50, 64), inputs.bf16(2, 50, 64, scale=8.0), inputs.bf16(3, 64)
    y, new = rms_norm_residual(x, r, w, EPS)
    assert (y != rms_norm(new, w, EPS)).any()


def test_leading_dimensions_are_rows():
    q, w = inputs.bf16(4, 5, 3, 64), inputs.bf16(5, 64)
    assert_bits_equal(rms_norm(q, w, EPS), rms_norm(q.view(15, 64), w, EPS).view(5, 3, 64), "heads")


def test_a_row_has_the_same_bits_in_any_batch():
    x, r, w = inputs.bf16(6, 200, 96), inputs.bf16(7, 200, 96), inputs.bf16(8, 96)
    y, new = rms_norm_residual(x, r, w, EPS)
    for t in (0, 31, 32, 199):
        one = rms_norm_residual(x[t : t + 1], r[t : t + 1], w, EPS)
        assert_bits_equal(one[0], y[t : t + 1], "alone")
        assert_bits_equal(one[1], new[t : t + 1], "alone")
    torch.set_num_threads(2)
    try:
        assert_bits_equal(rms_norm_residual(x, r, w, EPS)[0], y, "two threads")
    finally:
        torch.set_num_threads(1)


def test_a_row_of_zeros_and_a_row_without_numbers():
    w = torch.ones(8, dtype=torch.bfloat16)
    assert (rms_norm(torch.zeros(1, 8, dtype=torch.bfloat16), w, EPS) == 0).all()
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    x[0, 3] = float("nan")
    y = rms_norm(x, w, EPS)
    assert y[0].isnan().all() and (y[1] == 1).all()


def test_shapes_and_dtypes_are_refused():
    x, w = inputs.bf16(1, 2, 8), inputs.bf16(2, 7)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        rms_norm(x, w, EPS)
    with pytest.raises(ValueError, match="residual"):
        rms_norm_residual(x, inputs.bf16(1, 3, 8), inputs.bf16(2, 8), EPS)
    with pytest.raises(TypeError, match="BF16"):
        rms_norm(x.float(), inputs.bf16(2, 8), EPS)


def formula(v: np.ndarray, w: np.ndarray) -> np.ndarray:
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPS) * w


def test_differentiates():
    x, w = inputs.bf16(9, 6, 10).requires_grad_(), inputs.bf16(10, 10).requires_grad_()
    dy = inputs.bf16(11, 6, 10)
    rms_norm(x, w, EPS).backward(dy)
    xs, ws, d = (plain.wide(t).astype(np.float64) for t in (x, w, dy))
    assert_gradient(x.grad, finite_differences(lambda v: float((formula(v, ws) * d).sum()), xs), "dx")
    assert_gradient(w.grad, finite_differences(lambda v: float((formula(xs, v) * d).sum()), ws), "dw")


def test_with_a_residual_differentiates():
    x, r, w = (inputs.bf16(12 + i, *shape).requires_grad_() for i, shape in enumerate([(6, 10), (6, 10), (10,)]))
    dy, dr = inputs.bf16(15, 6, 10), inputs.bf16(16, 6, 10)
    torch.autograd.backward(rms_norm_residual(x, r, w, EPS), (dy, dr))
    s, ws, d, e = (v.astype(np.float64) for v in (plain.wide(x) + plain.wide(r), *map(plain.wide, (w, dy, dr))))
    want = finite_differences(lambda v: float((formula(v, ws) * d + v * e).sum()), s)
    assert_gradient(x.grad, want, "dx")
    assert_bits_equal(r.grad, x.grad, "x and the residual share a gradient")
    assert_gradient(w.grad, finite_differences(lambda v: float((formula(s, v) * d).sum()), ws), "dw")


@pytest.mark.parametrize("residual", [False, True])
def test_the_gradients_bits_are_the_specs(residual):
    T, D = 300, 70
    x, r, w = (inputs.bf16(17 + i, *shape).requires_grad_() for i, shape in enumerate([(T, D), (T, D), (D,)]))
    dy, dr = inputs.bf16(20, T, D), inputs.bf16(21, T, D)
    if residual:
        torch.autograd.backward(rms_norm_residual(x, r, w, EPS), (dy, dr))
    else:
        rms_norm(x, w, EPS).backward(dy)
    v = plain.wide(x) + plain.wide(r) if residual else plain.wide(x)
    inv = inverse(v)[:, None]
    n, d = v * inv, plain.wide(dy)
    g = d * plain.wide(w)
    c = (plain.lane_sum(g * n) / F32(D))[:, None]
    dv = inv * (g - n * c)
    assert_bits_equal(x.grad, plain.bf16(dv + plain.wide(dr) if residual else dv), "dx")
    assert_bits_equal(w.grad, plain.bf16(plain.lane_sum((d * n).T)), "dw: lane sum over the rows")
