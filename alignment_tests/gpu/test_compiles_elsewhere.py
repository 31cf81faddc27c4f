"""What compiles for other GPUs, sm_80 and sm_100a, where nothing was ever run: a break is seen, bits are not claimed.

Left out is what is written for Hopper's tensor core (wgmma): Gluon's two kernels and three files of CUDA C++; for sm_80
also what reads by the copy engine, ends before the next kernel begins, or converts to E4M3.
"""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from triton.backends.compiler import GPUTarget

from alignment_tests.gpu.compile_all import Case, cases
from alignment_tests.gpu.test_compiles import cubin
from minitransformer.ops.gpu import (
    attention_cluster,
    attention_fold,
    attention_prefill,
    attention_warp,
    few_experts,
    few_rows,
    linear,
    many_rows,
    mxfp8,
    nvfp4,
    pair_product,
    quantised_linear,
    quantised_rows,
    rms_norm,
    sha256,
)
from minitransformer.plugins.sglang import checksums

# One case a kernel, its first.
TRITON = list({case.kernel: case for case in reversed(cases()) if not case.kernel.is_gluon()}.values())
WGMMA = {attention_prefill.SOURCE, many_rows.SOURCE, pair_product.SOURCE}
CUDA = {
    attention_cluster.SOURCE: attention_cluster.defines(1, 8, 128, 4),
    attention_warp.SOURCE: attention_warp.defines(1, 8, 128, 7),
    attention_fold.SOURCE: attention_fold.defines(128),
    quantised_linear.SOURCE: quantised_linear.PACKED_CANDIDATES[0].defines(False, fp32=True),
    few_experts.SOURCE: few_experts.defines(1, 8, 2048, 768, 128),
    nvfp4.SOURCE: quantised_rows.defines(2048, quantised_rows.GATHER),
    few_rows.SOURCE: few_rows.defines(next(t for t in linear.CANDIDATES if t.whole), False),
    sha256.SOURCE: sha256.defines(checksums.PIECE),
    rms_norm.SHORT_SOURCE: (("D", 128),),
    rms_norm.LANES_SOURCE: rms_norm.lanes_defines(2048, True),
}
ON_SM_80 = (sha256.SOURCE, rms_norm.SHORT_SOURCE, rms_norm.LANES_SOURCE)


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("case", TRITON, ids=lambda case: case.name.replace(" ", "-"))
def test_triton_kernel_compiles_elsewhere(case: Case, capability: int):
    """PTX, with the flush to zero of ex2 and of nothing else."""
    if case.kernel is mxfp8.quantize_kernel and capability < 89:
        pytest.skip("the conversion to E4M3 is an instruction from sm_89 on")
    ptx = case.compile(GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert ".ftz" not in ptx.replace("ex2.approx.ftz", "")


@pytest.mark.parametrize(
    ("file", "architecture"), [*((file, "sm_80") for file in ON_SM_80), *((file, "sm_100a") for file in CUDA)]
)
def test_cuda_file_compiles_elsewhere(file: str, architecture: str, tmp_path):
    assert cubin(file, CUDA[file], tmp_path, architecture)


def test_no_other_file_is_left_out():
    assert CUDA.keys() | WGMMA == {path.name for path in Path(linear.__file__).parent.glob("*.cu")}
