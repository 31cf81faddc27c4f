"""CUDA C++ of ops/gpu on a CPU (warp.h, arithmetic.h): PTX becomes calls, the rest is compiled as it stands by g++."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from torch import Tensor

from minitransformer.ops.gpu import cuda

HERE = Path(__file__).parent
OPTIONS = "-std=c++20 -O2 -ffp-contract=off -shared -fPIC -pthread -w".split()
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


def translated(
    text: str, calls: Mapping[str, str], entry: str, nothing: tuple[str, ...] = (), header: str = '"warp.h"'
) -> str:
    """The kernel's file for g++. An instruction becomes the call whose start it has, or nothing; or is an error."""
    def call(match: re.Match) -> str:
        start = match.group(1)
        known = [call for name, call in calls.items() if start.startswith(name)]
        if not known and start and not start.startswith(nothing):
            raise ValueError(f"no call stands for {start!r}")
        return known[0] if known else ";"

    text = re.sub(r'asm(?: volatile)?\(\s*"([^"]*)".*?\);', call, text, flags=re.S)
    text = re.sub(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];", r"char *\1 = block_memory;", text)
    text = re.sub(r"\(u32\)__cvta_generic_to_shared\((\w+)\)", r"(u32)((const char *)\1 - block_memory)", text)
    return f"#include {header}\n{text}{entry}"


@cache
def compiled(text: str, defines: tuple[tuple[str, int], ...], *more: str) -> ctypes.CDLL:
    """translated's text as a library, once a process; its folder goes at once. more: options."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_host"))
    (folder / "kernel.cpp").write_text(text)
    options = [*OPTIONS, *more, f"-I{HERE}", *(f"-D{key}={value}" for key, value in defines)]
    try:
        subprocess.run(["g++", *options, "-o", folder / "kernel.so", folder / "kernel.cpp"], check=True)
        return ctypes.CDLL(str(folder / "kernel.so"))
    finally:
        shutil.rmtree(folder)


def library(text: str, name: str, defines: tuple[tuple[str, int], ...], more: str = "") -> ctypes.CDLL:
    """With run_<name>, which launches the kernel of this name. more: C++ that follows the file's text."""
    parameters = re.search(rf'extern "C" __global__ void __launch_bounds__\(\w+\) {name}\(\s*([^)]*)\)', text).group(1)
    names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
    entry = f'extern "C" void run_{name}(int blocks, int threads, {parameters}) {{\n'
    entry += f"    launch(blocks, threads, 16, [=] {{ {name}({names}); }});\n}}\n"
    text = translated(text, CALLS, entry + more, header='"warp.h"\n#include "arithmetic.h"')
    return compiled(text, defines, "-march=native")  # so that a fused multiplication is an instruction, not a call


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def launch(function: Callable, blocks: int, threads: int, arguments) -> None:
    """As cuda.launch, on CPU tensors."""
    function(blocks, threads, *(a if isinstance(a, int) else pointer(a) for a in arguments))


def install() -> None:
    """Puts this file in the place of ops/gpu/cuda.py, for this process."""
    def kernel(home, file: str, name: str, defines, shared: int = 0) -> Callable:
        return getattr(library(source(file), name, defines), f"run_{name}")

    cuda.kernel = kernel
    cuda.launch = lambda function, blocks, threads, shared, arguments: launch(function, blocks, threads, arguments)


def run(text: str, name: str, defines, blocks: int, threads: int, *arguments: Tensor | int | None) -> None:
    launch(getattr(library(text, name, defines), f"run_{name}"), blocks, threads, arguments)
