"""CUDA C++ of ops/gpu on a CPU (warp.h, arithmetic.h): PTX becomes calls, the rest is compiled as it stands by g++."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from minitransformer.ops.gpu import cuda

HERE = Path(__file__).parent
# The start of an instruction's text -> the call that stands for it. Copies are done where they begin.
CALLS = {
    "fma.rn.sat.f32": "r = saturated_fma(y, 0.5f, c);",
    "cvt.rn.satfinite.e4m3x2.f32": "d = e4m3_code(v);",
    "and.b32": "d = a & 0x7FFF7FFF;",
    "mul.bf16x2": "d = mul_bf16x2(a, b);",
    "cvt.rn.bf16x2.f32": "pair = nearest_bf16(even) | (u32)nearest_bf16(odd) << 16;",
    "cp.async.cg.shared.global": "memcpy(to, from, 16);",
    "cp.async.ca.shared.global": "memcpy(to, from, 4);",
    "cp.async.commit_group": ";",
    "cp.async.wait_group": ";",
    "griddepcontrol": ";",
    **dict.fromkeys(("lop3.b32", "{.reg .b16", "ld.global.f32", "ldmatrix"), ";"),  # of weights: not used here
}


def source(file: str) -> str:
    return cuda.source_of(file)


def faulty(text: str, before: str, after: str) -> str:
    """The text with a fault put in."""
    assert before in text, "the text has changed: name the fault again"
    return text.replace(before, after)


def _host_text(text: str, name: str, more: str) -> str:
    """The file without PTX (an instruction without a call here is an error), and run_<name> that launches a kernel."""
    def call(match: re.Match) -> str:
        return next(call for start, call in CALLS.items() if match.group(1).startswith(start))

    parameters = re.search(rf'extern "C" __global__ void __launch_bounds__\(\w+\) {name}\(\s*([^)]*)\)', text).group(1)
    names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
    entry = f'extern "C" void run_{name}(int blocks, int threads, {parameters}) {{\n'
    entry += f"    launch(blocks, threads, 16, [=] {{ {name}({names}); }});\n}}\n"
    text = re.sub(r'asm(?: volatile)?\(\s*"([^"]*)".*?\);', call, text, flags=re.S)
    text = text.replace("(u32)__cvta_generic_to_shared(p)", "0")
    return '#include "warp.h"\n#include "arithmetic.h"\n' + text + entry + more


@lru_cache
def library(text: str, name: str, defines: tuple[tuple[str, int], ...], more: str = "") -> ctypes.CDLL:
    """Compiled in a folder that goes with the process. more: C++ that follows the file's text."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_host"))
    (folder / "kernel.cpp").write_text(_host_text(text, name, more))
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-march=native", "-shared", "-fPIC", "-pthread", "-w"]
    options += [f"-I{HERE}", *(f"-D{key}={value}" for key, value in defines)]
    command = [shutil.which("g++"), *options, "-o", folder / "kernel.so", folder / "kernel.cpp"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return loaded


def launch(function: Callable, blocks: int, threads: int, arguments) -> None:
    """As cuda.launch, on CPU tensors."""
    function(blocks, threads, *(a if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
                                for a in arguments))  # fmt: skip


def install() -> None:
    """Puts this file in the place of ops/gpu/cuda.py, for this process."""
    def kernel(home, file: str, name: str, defines, shared: int = 0) -> Callable:
        return getattr(library(source(file), name, defines), f"run_{name}")

    cuda.kernel = kernel
    cuda.launch = lambda function, blocks, threads, shared, arguments: launch(function, blocks, threads, arguments)


def run(text: str, name: str, defines, blocks: int, threads: int, *arguments: Tensor | int | None) -> None:
    launch(getattr(library(text, name, defines), f"run_{name}"), blocks, threads, arguments)
