"""router: selection and weights against plain NumPy, the reported faults, gradients by finite differences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.errors import InputError
from minitransformer.ops import rounding
from minitransformer.ops.router import router

BF16 = torch.bfloat16


def softmax(x: np.ndarray) -> np.ndarray:
    p = plain.exp2((x - x.max(1, keepdims=True)) * plain.LOG2E, rounding.EXP2)
    return p / plain.lane_sum(p)[:, None]


def oracle(logits: torch.Tensor, k: int, norm: bool):
    x = plain.wide(logits)
    # Python's sort is stable: equal logits stay in the order of their ids.
    ids = np.array([sorted(range(x.shape[1]), key=lambda e, row=row: -row[e])[:k] for row in x])
    weights = np.take_along_axis(softmax(x), ids, 1)
    if norm:
        weights = weights / plain.slot_sum(weights, 1)[:, None]
    return torch.from_numpy(weights), torch.from_numpy(ids)


@given(
    T=st.integers(1, 12), E=st.integers(1, 200), k=st.integers(1, 9), norm=st.booleans(),
    coarse=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_agrees_with_plain_numpy(T, E, k, norm, coarse, seed):
    logits = inputs.bf16(seed, T, E)
    if coarse:  # many ties
        logits = (logits * 2).round() / 2
    k = min(k, E)
    weights, ids = router(logits, k, norm)
    want_weights, want_ids = oracle(logits, k, norm)
    assert torch.equal(ids, want_ids)
    assert_bits_equal(weights, want_weights, "weights")


def test_equal_logits_give_the_first_ids_and_equal_weights():
    weights, ids = router(torch.full((3, 128), 0.7, dtype=BF16), 8, True)
    assert (ids == torch.arange(8)).all() and (weights == 0.125).all()


def test_a_tie_at_the_boundary_takes_the_lower_id():
    logits = torch.zeros(1, 128, dtype=BF16)
    logits[0, [100, 101, 102, 103, 104, 105, 106]] = 2.0
    logits[0, [90, 30]] = 1.0
    assert router(logits, 8, True)[1].tolist() == [[100, 101, 102, 103, 104, 105, 106, 30]]


def test_minus_zero_ties_with_zero():
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]], dtype=BF16)
    assert router(logits, 3, True)[1].tolist() == [[0, 1, 2]]


def test_a_few_percent_of_bf16_rows_tie_at_the_boundary():
    logits = inputs.bf16(5, 4000, 128)
    _, ids = router(logits, 9, True)
    values = logits.gather(1, ids)
    ties = (values[:, 7] == values[:, 8]).float().mean()
    assert 0.03 < ties < 0.12  # so torch.topk cannot be the oracle
    assert (ids[:, 7] < ids[:, 8])[values[:, 7] == values[:, 8]].all()


def test_reported_scores_pick_the_set():
    scores = torch.tensor([[0.1, 0.5, 0.5, 0.2, 0.5, 0.05, 0.5, 0.0]], dtype=BF16)
    assert set(router(scores, 3, True)[1][0].tolist()) == {1, 2, 4}


def test_a_tie_break_must_not_reorder_what_does_not_tie():
    scores = torch.full((1, 128), 1e-9, dtype=BF16)
    scores[0, 1:8] = 0.14
    scores[0, 0], scores[0, 127] = 1.00e-6, 1.05e-6
    assert set(router(scores, 8, True)[1][0].tolist()) == {*range(1, 8), 127}


def test_selection_is_by_logit_where_probabilities_tie():
    """Logits far below the maximum share the probability 0, and still have an order."""
    logits = torch.tensor([[0.0, -300.0, -200.0, -250.0]], dtype=BF16)
    weights, ids = router(logits, 3, False)
    assert ids.tolist() == [[0, 2, 3]] and weights.tolist() == [[1, 0, 0]]


def test_without_renormalising_the_weights_sum_to_less_than_one():
    logits = inputs.bf16(6, 50, 64)
    plain_sum = router(logits, 4, False)[0].sum(1)
    assert (plain_sum < 0.9).all()
    assert (router(logits, 4, True)[0].sum(1) - 1).abs().max() < 1e-6


def test_a_row_has_the_same_bits_in_any_batch_and_shape():
    logits = inputs.bf16(7, 6, 5, 128)
    weights, ids = router(logits, 8, True)
    assert weights.shape == ids.shape == (6, 5, 8)
    for got, want in zip(router(logits.view(30, 128), 8, True), (weights, ids), strict=True):
        assert_bits_equal(got, want.view(30, 8), "2-D and 3-D")
    for t in range(30):
        assert_bits_equal(router(logits.view(30, 128)[t : t + 1], 8, True)[0], weights.view(30, 8)[t : t + 1], "alone")


def test_threads_do_not_move_bits():
    logits = inputs.bf16(8, 300, 64)
    once = router(logits, 4, False)[0]
    torch.set_num_threads(2)
    try:
        assert_bits_equal(router(logits, 4, False)[0], once, "two threads")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_is_refused_with_its_row(bad):
    logits = torch.zeros(9, 16, dtype=BF16)
    logits[6, 11] = bad
    with pytest.raises(InputError, match="row 6"):
        router(logits, 2, True)


def test_top_k_and_dtype_are_checked():
    with pytest.raises(ValueError, match="top_k = 9"):
        router(torch.zeros(1, 8, dtype=BF16), 9, True)
    with pytest.raises(TypeError, match="BF16"):
        router(torch.zeros(1, 8), 2, True)


def formula(x: np.ndarray, ids: np.ndarray, norm: bool) -> np.ndarray:
    p = np.exp(x - x.max(1, keepdims=True))
    w = np.take_along_axis(p / p.sum(1, keepdims=True), ids, 1)
    return w / w.sum(1, keepdims=True) if norm else w


@pytest.mark.parametrize("norm", [True, False])
def test_differentiates(norm):
    logits = inputs.bf16(9, 6, 16).requires_grad_()
    weights, ids = router(logits, 4, norm)
    dw = inputs.normal(10, 6, 4)
    weights.backward(dw)
    chosen = ids.numpy()
    # The selection is piecewise constant, so the formula keeps it fixed.
    want = finite_differences(lambda x: float((formula(x, chosen, norm) * dw.numpy()).sum()), plain.wide(logits))
    assert_gradient(logits.grad, want, "dlogits")
    unselected = torch.ones(6, 16, dtype=torch.bool).scatter_(1, ids, False)
    if norm:
        assert (logits.grad[unselected] == 0).all() and np.abs(want[unselected.numpy()]).max() < 1e-9
    else:
        assert (logits.grad[unselected] != 0).all()


@pytest.mark.parametrize("norm", [True, False])
def test_the_gradients_bits_are_the_specs(norm):
    logits = inputs.bf16(11, 20, 64).requires_grad_()
    weights, ids = router(logits, 8, norm)
    dw = inputs.normal(12, 20, 8)
    weights.backward(dw)
    w, d = weights.detach().numpy(), dw.numpy()
    c = plain.slot_sum(w * d, 1)[:, None]
    want = np.zeros((20, 64), np.float32) if norm else -(softmax(plain.wide(logits)) * c)
    np.put_along_axis(want, ids.numpy(), w * (d - c), 1)
    assert_bits_equal(logits.grad, plain.bf16(want), "dlogits")
