"""A shared C++ oracle, compiled once a run where a compiler and CUDA's headers (no GPU, no library) are at hand."""

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from minitransformer.ops.nvfp4 import Nvfp4

_SOURCE = Path(__file__).parents[1] / "nvfp4_oracle.cpp"


def cuda_headers() -> Path | None:
    """Where cuda_fp4.h is: under CUDA_HOME, in the packages of `dev`, or where CUDA is installed."""
    named = os.environ.get("CUDA_HOME")
    homes = [Path(named)] if named else [Path(sysconfig.get_path("purelib")) / "nvidia/cu13", Path("/usr/local/cuda")]
    found = (home / "include" for home in homes)
    return next((path for path in found if (path / "cuda_fp4.h").exists() and (path / "nv").exists()), None)


@pytest.fixture(scope="session")
def cuda_quantize(tmp_path_factory):
    """x FP32 [M, K] -> Nvfp4 with an outer scale a row, by the host conversions of cuda_fp4.h and cuda_fp8.h."""
    include = cuda_headers()
    if include is None or not shutil.which("g++"):
        pytest.skip("needs g++ and cuda_fp4.h (CUDA 12.8 or newer), from nvidia-cuda-runtime or where CUDA_HOME says")
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
