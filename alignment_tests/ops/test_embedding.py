"""embedding: row copies forward, token-ordered FP32 sums backward."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient
from minitransformer.errors import InputError
from minitransformer.ops.embedding import embedding


@given(T=st.integers(1, 40), V=st.integers(1, 30), D=st.integers(1, 20), seed=st.integers(0, 2**20))
def test_copies_rows_and_sums_their_gradients_in_token_order(T, V, D, seed):
    ids, weight, dx = inputs.integers(seed, V, T), inputs.bf16(seed + 1, V, D), inputs.bf16(seed + 2, T, D)
    weight.requires_grad_()
    x = embedding(ids, weight)
    assert_bits_equal(x, weight.detach()[ids], "rows")
    x.backward(dx)
    want = np.zeros((V, D), np.float32)
    for t in range(T):
        want[ids[t]] = want[ids[t]] + plain.wide(dx)[t]
    assert_bits_equal(weight.grad, plain.bf16(want), "dweight")


def test_any_bits_are_copied():
    bits = torch.arange(2**16).to(torch.int16).view(256, 256)
    weight = bits.view(torch.bfloat16)
    ids = inputs.integers(1, 256, 100)
    assert torch.equal(embedding(ids, weight).view(torch.int16), bits[ids])


def test_differentiates():
    """The formula is linear: its FP64 gradient is a plain sum."""
    ids, weight, dx = inputs.integers(2, 5, 60), inputs.bf16(3, 5, 8).requires_grad_(), inputs.bf16(4, 60, 8)
    embedding(ids, weight).backward(dx)
    want = np.zeros((5, 8))
    np.add.at(want, ids.numpy(), plain.wide(dx).astype(np.float64))
    assert_gradient(weight.grad, want, "dweight")


def test_token_order_shows_in_the_sum_and_threads_do_not():
    dx = torch.tensor([[1.0], [2.0**-24], [-1.0]], dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.zeros(3, dtype=torch.int64), weight).backward(dx)
    assert weight.grad.tolist() == [[0.0], [0.0]]
    ids, dx = inputs.integers(5, 100, 500), inputs.bf16(6, 500, 16)
    grads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        weight = torch.zeros(100, 16, dtype=torch.bfloat16, requires_grad=True)
        embedding(ids, weight).backward(dx)
        grads.append(weight.grad)
    torch.set_num_threads(1)
    assert_bits_equal(grads[1], grads[0], "two threads")


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(InputError, match=f"id {bad} of token 2"):
        embedding(torch.tensor([0, 9, bad]), inputs.bf16(1, 10, 4))


def test_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"expected \[T\]"):
        embedding(torch.zeros(2, 2, dtype=torch.int64), inputs.bf16(1, 10, 4))
    with pytest.raises(TypeError, match="int64"):
        embedding(torch.zeros(2, dtype=torch.int32), inputs.bf16(1, 10, 4))
    with pytest.raises(TypeError, match="BF16"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(10, 4))
