"""The CUDA C++ of a norm's weight gradient on a CPU: the bits of rms_norm/1, and faults in its text that are seen."""

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the modules of the kernels do not import")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from minitransformer.ops.gpu import rms_norm

SOURCE = cuda_host.source(rms_norm.LANES_SOURCE)


def lanes_of(dy, x, residual, inverse) -> torch.Tensor:
    """The lanes [128, D], row after row."""
    v = x.float() if residual is None else x.float() + residual.float()
    terms, lanes = dy.float() * (v * inverse[:, None]), torch.zeros(128, x.shape[1])
    for t0 in range(0, len(x), 128):
        rows = terms[t0 : t0 + 128]
        lanes[: len(rows)] += rows
    return lanes


def check(T: int, D: int, with_residual: bool, aligned: bool = True, text: str = SOURCE) -> None:
    dy, x, residual = (inputs.bf16(seed, T, D) for seed in (1, 2, 3))
    residual, inverse = residual if with_residual else None, inputs.normal(4, T).abs() + 0.1
    got, defines = torch.full((128, D), torch.nan), rms_norm.lanes_defines(D, with_residual, aligned)
    cuda_host.run(text, "norm_lanes", defines, 128 * -(-D // 64), 32, dy, x, residual, inverse, got, T)
    assert_bits_equal(got, lanes_of(dy, x, residual, inverse), f"{T} {D}")


# Copies are done at once here, so what waits for them is not tested.
# Fewer rows than lanes, one group and a part of one, the ring turned over; columns that end within a block.
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("T", "D"), [(1, 64), (200, 72), (128 * 17 + 5, 64), (128 * 70, 8), (300, 15)])
def test_has_the_bits_of_the_spec(T, D, with_residual):
    check(T, D, with_residual)
    check(T, D, with_residual, aligned=False)


FAULTS = {
    "a group left out": ("g + GROUPS - 1, lane", "g + GROUPS, lane"),
    "rows of the neighbour": ("(first + i + i0) * LANES + lane", "(first + i + i0) * LANES + (lane ^ 1)"),
    "the last rows left out": ("T - lane + LANES - 1", "T - lane"),
    "another order of the product": ("__fmul_rn(dy, __fmul_rn(v, inverse))", "__fmul_rn(__fmul_rn(dy, v), inverse)"),
}


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(128 * 70 + 3, 64, True, text=text)
