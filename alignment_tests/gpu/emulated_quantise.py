"""nvfp4_quantize.cu's own text on a CPU (warp.h, arithmetic.h): PTX becomes calls, the rest is compiled as it is."""

import ctypes
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from minitransformer.ops.gpu import nvfp4, quantised_rows

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "minitransformer" / "ops" / "gpu" / nvfp4.SOURCE
# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "fma.rn.sat.f32": "r = saturated_fma(y, 0.5f, c);",
    "cvt.rn.satfinite.e4m3x2.f32": "d = e4m3_code(v);",
    "and.b32": "d = a & 0x7FFF7FFF;",
    "mul.bf16x2": "d = mul_bf16x2(a, b);",
    "cvt.rn.bf16.f32": "bits = nearest_bf16(value);",
}
ENTRIES = """
extern "C" void run_quantize(int blocks, const uint4 *x, const float *amax, const i64 *order, uint2 *codes, u8 *scales,
        float *outer, uint4 *decoded, int *faults, int rows, int group, int slots, int bad, int small) {
    launch(blocks, THREADS, 16, [=] {
        quantize(x, amax, order, codes, scales, outer, decoded, faults, rows, group, slots, bad, small); });
}
#ifdef GATHER
extern "C" void run_produce(int rows, const void *x, const i64 *order, uint4 *y, uint2 *codes, u8 *scales, float *outer,
        uint4 *decoded, int *faults, int slots, int bad) {
    launch(rows, THREADS, 16, [=] {
        produce(x, order, y, codes, scales, outer, decoded, faults, slots, bad); });
}
#endif
// How many sums of four magnitudes, of bits begin .. end - 1 among them, have other codes than the seven ties say.
extern "C" i64 wrong_codes(u32 begin, u32 end) {
    const float ties[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    i64 wrong = 0;
    for (u32 u = begin; u < end; u++) {
        u32 bits[4] = {u, u ^ 0x2A5C3F11, u * 5 & 0x7FFFFFFF, ~u & 0x7FFFFFFF}, got, want = 0;
        float a[4];
        for (int i = 0; i < 4; i++) {
            a[i] = __uint_as_float(bits[i] > 0x7F800000 ? bits[i] & 0x3FFFFFFF : bits[i]);
            u32 code = 0;
            for (int t = 0; t < 7; t++) code += t % 2 ? a[i] >= ties[t] : a[i] > ties[t];
            want |= code << 4 * i;
        }
        got = four_codes(a, 1.0f) & 0xFFFF;
        wrong += got != want;
    }
    return wrong;
}
"""


def host_text(text: str) -> str:
    """The kernel's text without PTX; an instruction that has no call here is an error."""
    def call(match: re.Match) -> str:
        return next(call for start, call in CALLS.items() if match.group(1).startswith(start))

    text = re.sub(r'asm(?: volatile)?\(\s*"([^"]*)".*?\);', call, text, flags=re.S)
    return '#include "warp.h"\n#include "arithmetic.h"\n' + text + ENTRIES


@lru_cache
def library(folder: str, text: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    stem = Path(folder) / f"quantise{abs(hash((text, defines)))}"
    stem.with_suffix(".cpp").write_text(host_text(text))
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-march=native", "-shared", "-fPIC", "-pthread"]
    options += ["-w", f"-I{HERE}"]
    options += [f"-D{name}={value}" for name, value in defines]
    command = [shutil.which("g++"), *options, "-o", stem.with_suffix(".so"), stem.with_suffix(".cpp")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(stem.with_suffix(".so")))


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _empty(R: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and the decoded operand, filled with what no kernel writes."""
    codes, scales = (torch.full((R, K // n), 0xEE, dtype=torch.uint8) for n in (2, 16))
    return codes, scales, torch.full((R, K), torch.nan, dtype=torch.bfloat16)


def quantize(folder, x: Tensor, amax: Tensor, group: int, steps: int, decode: bool, plan=None, text=None):
    """As gpu.nvfp4.quantize on CPU tensors x [rows, K] -> (codes, scales, outer, decoded, faults)."""
    (R, K), blocks = x.shape, x.numel() // 16
    codes, scales, decoded = _empty(R, K)
    outer, faults = torch.full_like(amax, torch.nan), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    order, slots = (None, 0) if plan is None else (plan.order_R, plan.rows_TK.shape[1])
    run = library(str(folder), text or SOURCE.read_text(), nvfp4.defines(K, x.dtype, decode, steps)).run_quantize
    run(-(-blocks // (nvfp4.THREADS * steps)), _at(x), _at(amax), _at(order), _at(codes), _at(scales), _at(outer),
        _at(decoded), _at(faults), R, group, slots, 0, 1)  # fmt: skip
    return codes, scales, outer, decoded, faults


def produce(folder, x: Tensor, plan, K: int, gather: bool, text=None):
    """As gpu.quantised_rows on CPU tensors -> (y, codes, scales, outer, decoded, faults)."""
    R, (codes, scales, decoded) = plan.num_rows, _empty(plan.num_rows, K)
    y, outer, faults = decoded.clone(), torch.full((R,), torch.nan), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    run = library(str(folder), text or SOURCE.read_text(), quantised_rows.defines(K, gather)).run_produce
    run(R, _at(x), _at(plan.order_R), _at(y), _at(codes), _at(scales), _at(outer), _at(decoded), _at(faults),
        plan.rows_TK.shape[1], 0)  # fmt: skip
    return y, codes, scales, outer, decoded, faults
