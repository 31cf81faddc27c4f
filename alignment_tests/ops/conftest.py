"""A shared C++ oracle, compiled once a run where a compiler and CUDA's headers (no GPU, no library) are at hand."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from minitransformer.ops.nvfp4 import Nvfp4

_SOURCE = Path(__file__).parents[1] / "nvfp4_oracle.cpp"


@pytest.fixture(scope="session")
def cuda_quantize(tmp_path_factory):
    """x FP32 [M, K] -> Nvfp4 with an outer scale a row, by the host conversions of cuda_fp4.h and cuda_fp8.h."""
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (include / "cuda_fp4.h").exists() or not shutil.which("g++"):
        pytest.skip(f"needs g++ and cuda_fp4.h (CUDA 12.8 or newer) in {include}; CUDA_HOME names another place")
    library = tmp_path_factory.mktemp("oracle") / "oracle.so"
    # FP32 operations one by one, as in the spec: no contraction, no fast-math.
    flags = "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{include}"
    subprocess.run(["g++", *flags, str(_SOURCE), "-o", str(library)], check=True)
    call = ctypes.CDLL(str(library)).quantize

    def quantize(x: torch.Tensor) -> Nvfp4:
        M, K = x.shape
        x, codes = x.contiguous(), torch.empty(M, K // 2, dtype=torch.uint8)
        scales, outer = torch.empty(M, K // 16, dtype=torch.uint8), torch.empty(M)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, codes, scales, outer)]
        call(pointers[0], ctypes.c_long(M), ctypes.c_long(K), *pointers[1:])
        return Nvfp4(codes, scales, outer)

    return quantize
