"""On CI no law is skipped because a tool to check it with is missing: a skip looks like a law that held."""

import importlib.util
import os
import shutil

import pytest

from alignment_tests.ops.conftest import cuda_headers
from minitransformer.errors import UnsupportedDevice


def cuda_compiler() -> bool:
    from minitransformer.ops.gpu import cuda

    try:
        return bool(cuda._nvrtc())
    except UnsupportedDevice:
        return shutil.which("nvcc") is not None


TOOLS = {
    "g++": lambda: shutil.which("g++"),  # CUDA C++ on a CPU, the oracle of NVFP4
    "cuda_fp4.h": cuda_headers,
    "NVRTC or nvcc": cuda_compiler,  # every .cu file for sm_90a
}
PACKAGES = "triton", "transformers", "compressed_tensors", "matplotlib"
TOOLS |= {name: lambda name=name: importlib.util.find_spec(name) for name in PACKAGES}


@pytest.mark.skipif("CI" not in os.environ, reason="no CI: tests that lack a tool say so one by one")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_tests_need_is_there(tool):
    assert TOOLS[tool](), f"{tool} is missing, so tests are skipped that CI is for"
