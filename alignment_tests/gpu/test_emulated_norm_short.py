"""The CUDA C++ of short norms' input gradient on a CPU: the bits of rms_norm/1, and faults in its text seen."""

import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the modules of the kernels do not import")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu.values import VALUES
from minitransformer.ops import rms_norm as op
from minitransformer.ops.gpu import rms_norm

SOURCE = cuda_host.source(rms_norm.SHORT_SOURCE)


def gradient(kind: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy with zeros of both signs, and a row whose products are all -0: their sum is +0."""
    T, D = x.shape
    dy = torch.where(inputs.integers(4, 9, T, D) == 0, -0.0, VALUES[kind](1, T, D).float())
    dy[T // 2] = torch.copysign(torch.tensor(0.0), -(x[T // 2].float() * w.float()))
    return dy.bfloat16()


def inverse_of(x: torch.Tensor) -> torch.Tensor:
    """1 / rms, the tree over 128 lanes spelt out."""
    lanes = torch.nn.functional.pad(x.float() * x.float(), (0, 128 - x.shape[1]))
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    mean = lanes[:, 0].numpy() / np.float32(x.shape[1])
    return torch.from_numpy(np.float32(1) / np.sqrt(mean + np.float32(1e-6)))


def check(T: int, D: int, text: str = SOURCE) -> None:
    for kind in VALUES:
        x, w = VALUES[kind](2, T, D), inputs.bf16(3, D)
        dy = gradient(kind, x, w)
        got, inverse = torch.full_like(x, torch.nan), torch.full((T,), torch.nan)
        arguments = dy, x, w, got, inverse, T, rms_norm.float_bits(1e-6)
        cuda_host.run(text, "norm_short", (("D", D),), -(-T // rms_norm.SHORT_ROWS), 128, *arguments)
        assert_bits_equal(got, op.backward(dy, None, x, None, w, 1e-6)[0], f"{kind} {T} {D}")
        known = ~inverse.isnan()
        assert_bits_equal(inverse[known], inverse_of(x)[known], f"inverse {kind} {T} {D}")


@pytest.mark.parametrize(("T", "D"), [(70, 16), (3, 32), (65, 64), (130, 128)])
def test_has_the_bits_of_the_spec(T, D):
    check(T, D)


FAULTS = {
    "halves that meet in another order": ("exchange<4>(a), exchange<2>(a)", "exchange<2>(a), exchange<4>(a)"),
    "a sum that stays -0": ("__fadd_rn(__fadd_rn(a[0], a[1]), 0.0f)", "__fadd_rn(a[0], a[1])"),
    "the gradient without its weight's neighbour": ("high(weight[k]))", "low(weight[k]))"),
    "the mean of the gradients left out": ("__fmul_rn(v[2 * k], c)", "__fmul_rn(v[2 * k], 0.0f)"),
    "a NaN of the hardware": ("(pair & 0xFFFF0000) | 0x7FC0", "(pair & 0xFFFF0000) | 0x7FFF"),
}


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(66, 64, text)
