"""rope: the table against math's FP64, the rotation's bits, the reported faults, gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gradients import assert_gradient, finite_differences
from minitransformer.errors import InputError
from minitransformer.ops.rope import rope, rope_frequencies, rope_table

THETA = 1e6


def exact_row(p: int, H: int, theta: float = THETA) -> np.ndarray:
    angles = [p * theta ** (-2 * i / H) for i in range(H // 2)]
    return np.array([math.cos(a) for a in angles] + [math.sin(a) for a in angles])


def oracle(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, sign: int = 1) -> torch.Tensor:
    low, high = np.split(plain.wide(x), 2, axis=-1)
    c, s = np.split(table.numpy()[positions.numpy()][:, None], 2, axis=-1)
    s = s * np.float32(sign)
    return plain.bf16(np.concatenate([low * c - high * s, high * c + low * s], -1))


@pytest.mark.parametrize("H", [64, 128])
def test_the_table_is_fp64_rounded_once(H):
    table = rope_table(H, THETA, 4096)
    assert table.dtype == torch.float32 and table.shape == (4096, H)
    for p in (0, 1, 2, 100, 1023, 4095):
        # libm's last FP64 bit may put a value on the other side of a midpoint of FP32, once in millions.
        assert np.abs(table[p].double().numpy() - exact_row(p, H)).max() <= 2.0**-25 * (1 + 1e-6)
    assert (table[0] == torch.tensor([1.0] * (H // 2) + [0.0] * (H // 2))).all()


def test_the_table_far_out_and_at_small_theta():
    table = rope_table(64, 10000.0, 131072)
    for p in (65535, 131071):
        assert np.abs(table[p].double().numpy() - exact_row(p, 64, 10000.0)).max() <= 2.0**-25 * (1 + 1e-6) + 1e-10


def test_frequencies_are_nearest_fp64():
    got = rope_frequencies(128, THETA)
    assert np.abs(got / THETA ** (-np.arange(64) / 64) - 1).max() < 4e-16 and got[0] == 1.0 and got[32] == 1e-3


def test_given_frequencies_and_magnitude_are_used():
    frequencies = rope_frequencies(8, THETA) / 4
    table = rope_table(8, THETA, 16, frequencies, 1.25)
    want = 1.25 * np.concatenate([np.cos(7 * frequencies), np.sin(7 * frequencies)])
    assert np.abs(table[7].double().numpy() - want).max() < 1e-7


def test_bf16_frequencies_would_be_wrong():
    """Reported: position 4095, head size 128: 72 of 128 values wrong, by up to 0.83."""
    rounded = torch.from_numpy(rope_frequencies(128, THETA)).bfloat16().double().numpy()
    faulty, table = rope_table(128, THETA, 4096, rounded)[4095], rope_table(128, THETA, 4096)[4095]
    error = (faulty - table).abs()
    assert (error > 1e-3).sum() == 72 and error.max() > 0.83
    assert np.abs(table.numpy() - exact_row(4095, 128)).max() < 1e-7


def test_a_table_cast_to_bf16_is_refused():
    q = inputs.bf16(1, 3, 2, 8)
    with pytest.raises(TypeError, match="FP32"):
        rope(q, q, torch.arange(3), rope_table(8, THETA, 16).bfloat16())


@given(T=st.integers(1, 9), N=st.integers(1, 4), half=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_agrees_with_plain_numpy(T, N, half, seed):
    table, positions = rope_table(2 * half, THETA, 300), inputs.integers(seed, 300, T)
    q, k = inputs.bf16(seed + 1, T, N, 2 * half), inputs.bf16(seed + 2, T, 1, 2 * half)
    got_q, got_k = rope(q, k, positions, table)
    assert_bits_equal(got_q, oracle(q, positions, table), "q")
    assert_bits_equal(got_k, oracle(k, positions, table), "k")


def test_pairs_are_half_split_and_both_turn():
    table = rope_table(8, THETA, 8)
    x = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    x[..., 1] = 1.0
    for turned in rope(x, x, torch.tensor([7]), table):
        assert turned.flatten().nonzero().flatten().tolist() == [1, 5]
        assert turned[0, 0, 5].item() == pytest.approx(math.sin(7 * THETA**-0.25), rel=1e-2)


def test_position_zero_is_the_identity():
    q = inputs.bf16(3, 4, 2, 16)
    assert_bits_equal(rope(q, q, torch.zeros(4, dtype=torch.int64), rope_table(16, THETA, 4))[0], q, "position 0")


def test_a_token_turns_by_its_position_alone():
    q, table = inputs.bf16(4, 50, 3, 16), rope_table(16, THETA, 64)
    positions = torch.arange(50)
    whole = rope(q, q, positions, table)[0]
    order = inputs.integers(5, 1 << 30, 50).argsort()
    assert_bits_equal(rope(q[order], q[order], positions[order], table)[0], whole[order], "shuffled")
    torch.set_num_threads(2)
    try:
        assert_bits_equal(rope(q, q, positions, table)[0], whole, "two threads")
        assert_bits_equal(rope_table(16, THETA, 64), table, "table on two threads")
    finally:
        torch.set_num_threads(1)


def test_bad_positions_and_shapes_are_refused():
    q, table = inputs.bf16(6, 2, 2, 8), rope_table(8, THETA, 16)
    for bad in (16, -1):
        with pytest.raises(InputError, match=f"position {bad} "):
            rope(q, q, torch.tensor([0, bad]), table)
    with pytest.raises(ValueError, match="head size 10"):
        rope(q, q, torch.arange(2), rope_table(10, THETA, 16))
    with pytest.raises(ValueError, match="even"):
        rope_table(7, THETA, 4)


def test_differentiates():
    table, positions = rope_table(8, THETA, 64), torch.tensor([3, 0, 60])
    q, k = inputs.bf16(7, 3, 2, 8).requires_grad_(), inputs.bf16(8, 3, 1, 8).requires_grad_()
    dq, dk = inputs.bf16(9, 3, 2, 8), inputs.bf16(10, 3, 1, 8)
    torch.autograd.backward(rope(q, k, positions, table), (dq, dk))
    c, s = np.split(table.double().numpy()[positions.numpy()][:, None], 2, axis=-1)

    def turned(v):
        low, high = np.split(v, 2, axis=-1)
        return np.concatenate([low * c - high * s, high * c + low * s], -1)

    for x, d, name in ((q, dq, "dq"), (k, dk, "dk")):
        want = finite_differences(lambda v, d=d: float((turned(v) * plain.wide(d)).sum()), plain.wide(x))
        assert_gradient(x.grad, want, name)
        assert_bits_equal(x.grad, oracle(d, positions, table, sign=-1), f"{name}: the same roundings")
