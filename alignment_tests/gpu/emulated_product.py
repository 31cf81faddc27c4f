"""nvfp4_product.cu's own text on a CPU (warp.h): its PTX becomes calls, everything else is compiled as it stands."""

import ctypes
import math
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from minitransformer.ops.gpu import cuda
from minitransformer.ops.gpu.pack import UNIT_ROWS

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "minitransformer" / "ops" / "gpu" / "nvfp4_product.cu"
# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "mul.bf16x2": "d = mul_bf16x2(a, b);",
    "lop3.b32": "pair = (word & 0x0FF00FF0) | 0x70007000;",
    "{.reg .b16": "low = (pair & 0xFFFF) * 0x10001, high = (pair >> 16) * 0x10001;",
    "ld.global.nc.L1::no_allocate.L2::256B.v4": "memcpy(&v, unit, 16);",
    "ld.global.nc.L1::no_allocate.L2::256B.v2": "memcpy(&v, unit, 8);",
    "ld.global.f32": "v = *at;",
    "griddepcontrol": ";",
    "ldmatrix": "v = load_matrices(at);",
    "mma.sync.aligned.m16n8k16": "mma_m16n8k16(v, a, {b0, b1});",
    "cvt.rn.bf16": "bits = nearest_bf16(value);",
    "cp.async.cg": "memcpy(block_memory + to, x + (i64)(first + row) * K + k, 16);",
    "st.shared.v4": "memset(block_memory + to, 0, 16);",
    "cp.async.wait_all": ";",
}
ENTRIES = """
extern "C" void run_product(int blocks, int threads, int shared, const char *packed, const u16 *x,
        const float *row_scale, const float *weight_scale, const i64 *bounds, void *y, int experts, int N, int K) {
    launch(blocks, threads, shared, [=] { product(packed, x, row_scale, weight_scale, bounds, y, experts, N, K); });
}
"""


def host_text(text: str, calls: dict[str, str], entries: str) -> str:
    """The kernel's text without PTX; an instruction that has no call here is an error."""
    def call(match: re.Match) -> str:
        return next(call for start, call in calls.items() if match.group(1).startswith(start))

    text = re.sub(r'asm(?: volatile)?\(\s*"([^"]*)".*?\);', call, text, flags=re.S)
    text = text.replace("extern __shared__ __align__(16) char shared[];", "char *shared = block_memory;")
    return '#include "warp.h"\n' + text.replace("(u32)__cvta_generic_to_shared(shared)", "0") + entries


@lru_cache
def library(folder: str, text: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """text: host_text's."""
    stem = Path(folder) / f"product{abs(hash((text, defines)))}"
    stem.with_suffix(".cpp").write_text(text)
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w", f"-I{HERE}"]
    options += [f"-D{name}={value}" for name, value in defines]
    command = [shutil.which("g++"), *options, "-o", stem.with_suffix(".so"), stem.with_suffix(".cpp")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(stem.with_suffix(".so")))


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def product(folder, schedule, x, scale_R, packed, scale_EN, bounds, out_dtype, text=None) -> Tensor:
    """As gpu.quantised_linear.packed_product, on CPU tensors."""
    (R, K), (E, N), rows = x.shape, scale_EN.shape, 8 * schedule.groups
    y = torch.full((R, N), torch.nan, dtype=out_dtype)
    groups = (R + min(E, R) * (rows - 1)) // rows
    blocks = groups * math.ceil(math.ceil(N / UNIT_ROWS) / (schedule.tiles * schedule.warps))
    defines = schedule.defines(scale_R is None, out_dtype == torch.float32)
    run = library(str(folder), host_text(text or cuda.source_of(SOURCE.name), CALLS, ENTRIES), defines).run_product
    run(blocks, 32 * schedule.warps, schedule.shared(K), _at(packed), _at(x), _at(scale_R), _at(scale_EN), _at(bounds),
        _at(y), E, N, K)  # fmt: skip
    return y
