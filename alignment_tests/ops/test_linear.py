"""linear: the chain with one rounding, any rows, both outputs, and its gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment_tests.bits import assert_bits_equal
from alignment_tests.mutations import Mutation, assert_caught, patched
from minitransformer.ops import linear as op
from minitransformer.ops.linear import linear
from minitransformer.ops.mma import chain
from minitransformer.tuning import proof


def random_operands(t, k, n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(t, k, generator=gen).bfloat16(), torch.randn(n, k, generator=gen).bfloat16()


@settings(max_examples=30, deadline=None)
@given(t=st.integers(1, 40), k=st.integers(1, 70), n=st.integers(1, 70), seed=st.integers(0, 999))
def test_agrees_with_the_chain_and_one_rounding(t, k, n, seed):
    x, w = random_operands(t, k, n, seed)
    acc = chain(x, w.t().contiguous())
    assert_bits_equal(linear(x, w, torch.float32), acc, "the accumulator")
    assert_bits_equal(linear(x, w), acc.bfloat16(), "rounded to nearest even")


@pytest.mark.parametrize("k, n", [(576, 960), (768, 64), (64, 257)])
def test_every_number_of_rows_agrees_with_one_row(k, n):
    x, w = random_operands(257, k, n)
    alone = torch.cat([linear(x[i : i + 1], w) for i in range(257)])
    for t in (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 128, 129, 257):
        assert_bits_equal(linear(x[:t], w), alone[:t], f"{t} rows")


def test_a_row_of_1e4_moves_no_other_row():
    x, w = random_operands(33, 576, 96)
    loud = x.clone()
    loud[7] = 1e4
    rest = [i for i in range(33) if i != 7]
    assert_bits_equal(linear(loud, w)[rest], linear(x, w)[rest])


def test_gradients_are_the_chains_of_the_spec():
    x, w = random_operands(37, 48, 40)
    dy = torch.randn(37, 40, generator=torch.Generator().manual_seed(5)).bfloat16()
    dx, dw = op.backward(dy, x, w)
    assert_bits_equal(dx, chain(dy, w).bfloat16(), "dX")
    assert_bits_equal(dw, chain(dy.t().contiguous(), x).bfloat16(), "dW: over the tokens in packed order")


def in_parts(dy, w, *cuts: int):
    acc = None
    for begin, end in pairwise((0, *cuts, len(w))):
        acc = op.continue_dx(dy[:, begin:end], w[begin:end], acc, last=end == len(w))
    return acc


@pytest.mark.parametrize("kind", ["normal", "absorbing", "special"])
def test_a_chain_may_be_continued_at_any_step(kind, monkeypatch):
    dy, w = proof.operands(kind, 37, 48, 200, 3, "cpu")
    w = w.t().contiguous()
    want = op.backward(dy, None, w, need_dw=False)[0]
    for cuts in ((), (16,), (64, 80, 192), range(16, 200, 16)):
        assert_bits_equal(in_parts(dy, w, *cuts), want, f"cut at {cuts}")
    with pytest.raises(ValueError, match="a part of 24 rows; all but the last must be multiples of 16"):
        in_parts(dy, w, 24)
    if kind == "absorbing":  # within a step its terms are cut to the largest of all of them
        monkeypatch.setattr(op, "STEP", 8)
        assert (in_parts(dy, w, 24) != want).any()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_differentiates(out_dtype):
    """Against FP64 of the same formula: BF16 rounds each of dY and the result by at most 2^-9."""
    x, w = random_operands(37, 64, 40)
    x.requires_grad_(), w.requires_grad_()
    dy = torch.randn(37, 40, generator=torch.Generator().manual_seed(5)).to(out_dtype)
    linear(x, w, out_dtype).backward(dy)
    for got, want in ((x.grad, dy.double() @ w.double()), (w.grad, dy.double().t() @ x.double())):
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).norm() / want.norm()).item() < 2**-8


def test_repeats():
    x, w = random_operands(50, 96, 70)
    dy = torch.ones(50, 70).bfloat16()
    for first, again in zip(op.backward(dy, x, w), op.backward(dy, x, w), strict=True):
        assert_bits_equal(again, first)


def test_refuses_what_does_not_fit():
    x, w = random_operands(2, 16, 3)
    with pytest.raises(ValueError, match="K must be the same"):
        linear(x, w[:, :8])
    with pytest.raises(ValueError, match="out_dtype"):
        linear(x, w, torch.float16)
    with pytest.raises(TypeError, match="BF16"):
        linear(x.float(), w)


def nan_is_the_hardwares():
    x, w = random_operands(3, 32, 5)
    x[1, 4], w[2, 0] = torch.nan, torch.inf
    x[2, 0] = 0.0  # times infinity
    y, acc = op.forward(x, w), op.forward(x, w, torch.float32)
    nan = acc != acc
    assert nan[1].all() and nan[2, 2] and int(nan.sum()) == 6
    assert set(y[nan].view(torch.int16).tolist()) == {0x7FFF}
    assert set(acc[nan].view(torch.int32).tolist()) == {0x7FFFFFFF}


def test_a_nan_is_what_the_hardware_stores():
    nan_is_the_hardwares()


def test_another_nan_is_caught():
    fault = patched(op, "PRODUCT_NAN", 0x7FC0)
    assert_caught(Mutation("a quiet NaN as torch rounds it", "a NaN is 0x7fff", fault, nan_is_the_hardwares))
