"""dispatch: the plan is a stable sort, gather copies, combine adds in slot order whatever the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.errors import InputError
from minitransformer.ops import nvfp4
from minitransformer.ops.dispatch import (
    combine,
    combine_weighted,
    combine_weighted_backward,
    gather,
    gather_amax,
    plan,
    slots,
)


def routed(seed: int, T: int, K: int, E: int) -> torch.Tensor:
    """K different experts a token."""
    return inputs.integers(seed, 1 << 40, T, E).argsort(1)[:, :K].contiguous()


@given(T=st.integers(1, 40), K=st.integers(1, 8), E=st.integers(1, 12), seed=st.integers(0, 2**20))
def test_the_plan_sorts_by_expert_then_token_then_slot(T, K, E, seed):
    ids = inputs.integers(seed, E, T, K)
    p = plan(ids, E)
    want = sorted((int(ids[t, k]), t, k) for t in range(T) for k in range(K))
    assert p.order_R.tolist() == [t * K + k for _, t, k in want]
    assert torch.equal(p.order_R[p.rows_TK.view(-1)], torch.arange(T * K))
    counts = [sum(e == i for e, _, _ in want) for i in range(E)]
    assert p.offsets == tuple(np.cumsum([0, *counts]).tolist())


@given(T=st.integers(1, 20), K=st.integers(1, 8), D=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_gather_copies_and_combine_adds_in_slot_order(T, K, D, seed):
    p = plan(routed(seed, T, K, 8), 8)
    x, y = inputs.bf16(seed + 1, T, D), inputs.bf16(seed + 2, T * K, D)
    assert_bits_equal(gather(x, p), x[p.order_R // K], "gather")
    assert_bits_equal(slots(gather(x, p), p), x[:, None].expand(T, K, D), "slots")
    want = plain.bf16(plain.slot_sum(plain.wide(slots(y, p)), 1))
    assert_bits_equal(combine(y, p), want, "combine")


def test_the_order_of_the_slots_shows_in_the_sum():
    y = torch.tensor([[1.0], [2.0**-24], [-1.0]], dtype=torch.bfloat16)
    first, second = (combine(y, plan(torch.tensor([ids]), 3)).item() for ids in ([0, 1, 2], [0, 2, 1]))
    assert first == 0 and second == 2.0**-24


@given(T=st.integers(1, 12), K=st.integers(1, 8), D=st.integers(1, 140), seed=st.integers(0, 2**20))
def test_combine_weighted_and_its_gradients_as_written(T, K, D, seed):
    """One FMA a slot in slot order; backward one product an element, and dw by lanes."""
    p = plan(routed(seed, T, K, 8), 8)
    y, dy = inputs.bf16(seed + 1, T * K, D), inputs.bf16(seed + 2, T, D)
    w_TK = inputs.normal(seed + 3, T, K)
    y_TKD, w, acc = plain.wide(slots(y, p)), w_TK.numpy(), np.zeros((T, D), np.float32)
    for k in range(K):
        acc = plain.fma(w[:, k, None], y_TKD[:, k], acc)
    assert_bits_equal(combine_weighted(y, p, w_TK), plain.bf16(acc), "combine_weighted")
    dy_RD, dw_TK = combine_weighted_backward(dy, y, p, w_TK)
    dy_TKD = np.broadcast_to(plain.wide(dy)[:, None], y_TKD.shape)
    assert_bits_equal(slots(dy_RD, p), plain.bf16(dy_TKD * w[..., None]), "dy")
    assert_bits_equal(dw_TK, torch.from_numpy(plain.lane_sum(dy_TKD * y_TKD)), "dw")


def test_a_weighted_sum_rounds_once_a_slot():
    """(1 + 2^-7)(1 + 2^-23) - (1 + 2^-7): rounded before it is added, the product loses what is left here."""
    y = torch.tensor([[-(1 + 2.0**-7)], [1 + 2.0**-7]], dtype=torch.bfloat16)
    got = combine_weighted(y, plan(torch.tensor([[0, 1]]), 2), torch.tensor([[1.0, 1 + 2.0**-23]]))
    assert got.item() == torch.tensor(2.0**-23 + 2.0**-30).bfloat16().item()


@pytest.mark.parametrize("T", [1, 32, 33, 512])
def test_a_row_has_the_same_bits_in_any_batch(T):
    """Reported: a combine kernel that changed its order at 32 tokens."""
    K, E, D = 8, 16, 24
    ids = routed(1, 512, K, E)
    y_slots = inputs.bf16(2, 512, K, D)
    alone = plan(ids[:1], E)
    want = combine(y_slots[0][alone.order_R], alone)
    p = plan(ids[:T], E)
    got = combine(y_slots[:T].reshape(T * K, D)[p.order_R], p)
    assert_bits_equal(got[:1], want, f"{T} tokens")


def test_a_large_row_changes_no_other_row():
    K, E = 4, 8
    p = plan(routed(3, 40, K, E), E)
    y = inputs.bf16(4, 40 * K, 16)
    before = combine(y, p)
    y[p.rows_TK[17]] = 1e4
    others = torch.arange(40) != 17
    assert_bits_equal(combine(y, p)[others], before[others], "other rows")


def test_threads_do_not_move_bits():
    p = plan(routed(5, 200, 4, 8), 8)
    y = inputs.bf16(6, 800, 16)
    once = combine(y, p)
    torch.set_num_threads(2)
    try:
        assert_bits_equal(combine(y, p), once, "two threads")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("R", [1, 15, 16, 17, 129])
def test_the_amax_taken_while_gathering_is_that_of_a_separate_pass(R):
    """Of the copied rows, the last column and -0 included."""
    x = inputs.bf16(6, R, 48)
    x[:, 47] *= 1e4
    x[: R - 1 : 7] = -0.0
    p = plan(routed(7, R, 4, 8), 8)
    rows, amax = gather_amax(x, p)
    assert_bits_equal(rows, gather(x, p), "rows")
    assert_bits_equal(amax, nvfp4.row_amax(rows), "amax")
    assert_bits_equal(amax, x.float().abs().amax(1)[p.order_R // 4], "amax of each row's token")
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[R - 1, 5] = bad
        assert_bits_equal(gather_amax(x, p)[1][p.rows_TK[R - 1]], torch.full((4,), abs(bad)), f"amax with {bad}")


def test_bad_ids_and_shapes_are_refused():
    with pytest.raises(InputError, match="expert id 4 of token 1, slot 0"):
        plan(torch.tensor([[0, 1], [4, 2]]), 4)
    p = plan(torch.tensor([[0, 1], [3, 2]]), 4)
    with pytest.raises(ValueError, match="2 tokens"):
        gather(inputs.bf16(1, 3, 4), p)
    with pytest.raises(ValueError, match="4 rows"):
        combine(inputs.bf16(1, 3, 4), p)
    with pytest.raises(TypeError, match="BF16"):
        combine(torch.zeros(4, 4), p)
    with pytest.raises(TypeError, match="BF16"):
        gather(torch.zeros(2, 4), p)
    with pytest.raises(ValueError, match="4 rows of"):
        combine_weighted(inputs.bf16(1, 4, 4), p, torch.zeros(2, 3))
    with pytest.raises(TypeError, match="FP32"):
        combine_weighted(inputs.bf16(1, 4, 4), p, torch.zeros(2, 2).bfloat16())


def test_differentiates():
    T, K, D = 5, 3, 4
    p = plan(routed(7, T, K, 6), 6)
    tokens = p.order_R.numpy() // K
    x, dx = inputs.bf16(8, T, D).requires_grad_(), inputs.bf16(9, T * K, D)
    gather(x, p).backward(dx)
    want = finite_differences(lambda v: float((v[tokens] * plain.wide(dx)).sum()), plain.wide(x))
    assert_gradient(x.grad, want, "gather")
    y, dy = inputs.bf16(10, T * K, D).requires_grad_(), inputs.bf16(11, T, D)
    combine(y, p).backward(dy)
    rows = p.rows_TK.numpy()
    want = finite_differences(lambda v: float((v[rows].sum(1) * plain.wide(dy)).sum()), plain.wide(y))
    assert_gradient(y.grad, want, "combine")
    assert_bits_equal(y.grad, dy[p.order_R // K], "combine's backward is a copy")
    assert_bits_equal(x.grad, combine(dx, p), "gather's backward is combine's sum")
    y, w = inputs.bf16(12, T * K, D).requires_grad_(), inputs.normal(13, T, K).requires_grad_()
    combine_weighted(y, p, w).backward(dy)
    w_TK1, y_TKD, dy_TD = w.detach().numpy()[..., None], plain.wide(y)[rows], plain.wide(dy)
    want = finite_differences(lambda v: float(((v[rows] * w_TK1).sum(1) * dy_TD).sum()), plain.wide(y))
    assert_gradient(y.grad, want, "combine_weighted, y")
    want = finite_differences(lambda v: float(((v[..., None] * y_TKD).sum(1) * dy_TD).sum()), w.detach().numpy())
    assert_gradient(w.grad, want, "combine_weighted, weights")
