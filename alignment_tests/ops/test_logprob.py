"""logprob: bits against plain NumPy, accuracy against FP64, the reported faults, gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.errors import InputError
from minitransformer.ops import logprob as op
from minitransformer.ops import rounding
from minitransformer.ops.logprob import logprob

F32 = np.float32


def parts(logits: torch.Tensor, temperature: float):
    x = logits.detach().numpy() / F32(temperature)
    m = x.max(1, keepdims=True)
    p = plain.exp2((x - m) * plain.LOG2E, rounding.EXP2)
    return x, m, p, plain.lane_sum(p)[:, None]


def oracle(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    x, m, _, S = parts(logits, temperature)
    chosen = np.take_along_axis(x - m, ids.numpy()[:, None], 1)
    return torch.from_numpy((chosen - plain.log(S, rounding.LOG))[:, 0])


def exact(x: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    x = x / temperature
    m = x.max(1, keepdims=True)
    return (x - m - np.log(np.exp(x - m).sum(1, keepdims=True)))[np.arange(len(ids)), ids]


@given(
    T=st.integers(1, 5), V=st.integers(1, 700), temperature=st.sampled_from([0.1, 0.6, 1.0, 1.7]),
    scale=st.sampled_from([0.5, 4.0, 30.0]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_agrees_with_plain_numpy(T, V, temperature, scale, seed):
    logits, ids = inputs.normal(seed, T, V, scale=scale), inputs.integers(seed + 1, V, T)
    got = logprob(logits, ids, temperature)
    assert_bits_equal(got, oracle(logits, ids, temperature), "logprob")


def test_is_close_to_fp64_over_a_real_vocabulary():
    logits, ids = inputs.normal(1, 4, 151_936, scale=4.0), inputs.integers(2, 151_936, 4)
    got = logprob(logits, ids, 1.0).double().numpy()
    # Lane sums of 1,187 terms and a handful of roundings of numbers near 16.
    assert np.abs(got - exact(logits.double().numpy(), ids.numpy(), 1.0)).max() < 4e-6


def test_the_temperature_divides_the_logits():
    """Reported: at temperature 0.6 one side scored at 1, so the first importance ratio was 2 instead of 1."""
    logits, ids = inputs.normal(3, 8, 100, scale=2.0), inputs.integers(4, 100, 8)
    got = logprob(logits, ids, 0.6)
    assert_bits_equal(got, logprob(logits / torch.tensor(0.6), ids, 1.0), "divided beforehand")
    assert (got - logprob(logits, ids, 1.0)).abs().max() > 0.1


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(InputError, match="temperature"):
        logprob(inputs.normal(1, 1, 4), torch.tensor([0]), temperature)


def test_logits_rounded_to_bf16_are_refused_and_would_differ():
    logits, ids = inputs.normal(5, 8, 1000, scale=3.0), inputs.integers(6, 1000, 8)
    with pytest.raises(TypeError, match="FP32"):
        logprob(logits.bfloat16(), ids)
    assert (logprob(logits.bfloat16().float(), ids) != logprob(logits, ids)).all()


def test_a_row_has_the_same_bits_in_any_batch():
    logits, ids = inputs.normal(7, 70, 333), inputs.integers(8, 333, 70)
    whole = logprob(logits, ids, 0.8)
    for t in (0, 33, 69):
        assert_bits_equal(logprob(logits[t : t + 1], ids[t : t + 1], 0.8), whole[t : t + 1], "alone")
    torch.set_num_threads(2)
    try:
        assert_bits_equal(logprob(logits, ids, 0.8), whole, "two threads")
    finally:
        torch.set_num_threads(1)


def test_minus_infinity_is_a_token_that_cannot_occur():
    logits = torch.tensor([[0.0, float("-inf"), 0.0], [5.0, float("-inf"), float("-inf")]])
    got = logprob(logits, torch.tensor([1, 0]))
    assert got.tolist() == [float("-inf"), 0.0]
    assert logprob(logits[:1], torch.tensor([0])).item() == pytest.approx(-np.log(2), rel=1e-7)


@pytest.mark.parametrize("values", [[0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2])
def test_a_row_without_a_distribution_is_refused_by_name(values):
    logits = torch.zeros(5, 2)
    logits[3] = torch.tensor(values)
    with pytest.raises(InputError, match="row 3"):
        logprob(logits, torch.zeros(5, dtype=torch.int64))


def test_ids_and_shapes_are_checked():
    with pytest.raises(InputError, match="id 4 of token 1"):
        logprob(inputs.normal(1, 2, 4), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"\[T, V\]"):
        logprob(inputs.normal(1, 2, 4), torch.tensor([0]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_differentiates(temperature):
    logits, ids, d = inputs.normal(9, 4, 20, scale=2.0), inputs.integers(10, 20, 4), inputs.normal(11, 4)
    logits.requires_grad_()
    logprob(logits, ids, temperature).backward(d)
    assert logits.grad.dtype == torch.float32
    want = finite_differences(
        lambda v: float((exact(v, ids.numpy(), temperature) * d.numpy()).sum()), logits.detach().numpy()
    )
    assert_gradient(logits.grad, want, "dlogits")


def test_the_gradients_bits_are_the_specs():
    logits, ids, d = inputs.normal(12, 6, 500, scale=3.0), inputs.integers(13, 500, 6), inputs.normal(14, 6)
    logits.requires_grad_()
    logprob(logits, ids, 0.7).backward(d)
    _, _, p, S = parts(logits, 0.7)
    one = np.zeros((6, 500), F32)
    np.put_along_axis(one, ids.numpy()[:, None], F32(1), 1)
    want = (d.numpy()[:, None] * (one - p / S)) / F32(0.7)
    assert_bits_equal(logits.grad, torch.from_numpy(want), "dlogits")


def test_rows_of_other_temperatures_and_some_columns():
    logits, ids, d = inputs.normal(15, 6, 500, scale=3.0), inputs.integers(16, 500, 6), inputs.normal(17, 6)
    temperatures = torch.tensor([0.5, 1.0, 0.7, 2.0, 0.9, 1.3])
    out, kept = op.forward(logits, ids, temperatures)
    every = op.backward(d, logits, ids, temperatures, kept)
    for t in range(6):
        row, one = slice(t, t + 1), temperatures[t].item()
        assert_bits_equal(logprob(logits[row], ids[row], one), out[row], "alone")
        assert_bits_equal(op.backward(d[row], logits[row], ids[row], one, kept[row]), every[row], "dlogits alone")
    for first, end in ((0, 500), (0, 16), (16, 400), (400, 500)):
        some = logits[:, first:end].contiguous()
        got = op.backward(d, some, ids, temperatures, kept, first, torch.bfloat16)
        assert_bits_equal(got, every[:, first:end].bfloat16(), f"columns {first} to {end}")
