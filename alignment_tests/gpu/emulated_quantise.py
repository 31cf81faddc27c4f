"""nvfp4_quantize.cu's own text on a CPU (cuda_host.py)."""

import ctypes

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host
from minitransformer.ops.gpu import nvfp4, quantised_rows

COUNT = """
// How many sums of four magnitudes, of bits begin .. end - 1 among them, have other codes than the seven ties say.
extern "C" i64 wrong_codes(u32 begin, u32 end) {
    const float ties[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    i64 wrong = 0;
    for (u32 u = begin; u < end; u++) {
        u32 bits[4] = {u, u ^ 0x2A5C3F11, u * 5 & 0x7FFFFFFF, ~u & 0x7FFFFFFF}, want = 0;
        float a[4];
        for (int i = 0; i < 4; i++) {
            a[i] = __uint_as_float(bits[i] > 0x7F800000 ? bits[i] & 0x3FFFFFFF : bits[i]);
            u32 code = 0;
            for (int t = 0; t < 7; t++) code += t % 2 ? a[i] >= ties[t] : a[i] > ties[t];
            want |= code << 4 * i;
        }
        wrong += (four_codes(a, 1.0f) & 0xFFFF) != want;
    }
    return wrong;
}
"""


def wrong_codes(begin: int, end: int) -> int:
    defines = nvfp4.defines(16, torch.bfloat16, False, 1)
    count = cuda_host.library(cuda_host.source(nvfp4.SOURCE), "quantize", defines, COUNT).wrong_codes
    count.restype = ctypes.c_int64
    return count(begin, end)


def _empty(R: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and the decoded operand, filled with what no kernel writes."""
    codes, scales = (torch.full((R, K // n), 0xEE, dtype=torch.uint8) for n in (2, 16))
    return codes, scales, torch.full((R, K), torch.nan, dtype=torch.bfloat16)


def quantize(x: Tensor, amax: Tensor, group: int, steps: int, decode: bool, plan=None, text=None):
    """As gpu.nvfp4.quantize on CPU tensors x [rows, K] -> (codes, scales, outer, decoded, faults)."""
    (R, K), blocks, text = x.shape, x.numel() // 16, text or cuda_host.source(nvfp4.SOURCE)
    codes, scales, decoded = _empty(R, K)
    outer, faults = torch.full_like(amax, torch.nan), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    order, slots = (None, 0) if plan is None else (plan.order_R, plan.rows_TK.shape[1])
    how, threads = nvfp4.defines(K, x.dtype, decode, steps), nvfp4.THREADS
    cuda_host.run(
        text, "quantize", how, -(-blocks // (threads * steps)), threads,
        x, amax, order, codes, scales, outer, decoded, faults, R, group, slots, 0, 1,
    )  # fmt: skip
    return codes, scales, outer, decoded, faults


def produce(x: Tensor, plan, K: int, gather: bool, keep=True):
    """As gpu.quantised_rows on CPU tensors -> (y, codes, scales, outer, decoded, faults)."""
    R, (codes, scales, decoded) = plan.num_rows, _empty(plan.num_rows, K)
    defines = quantised_rows.defines(K, int(gather), keep)
    places = plan.rows_TK if gather else plan.order_R
    y, outer, faults = decoded.clone(), torch.full((R,), torch.nan), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    cuda_host.run(
        cuda_host.source(nvfp4.SOURCE), "produce", defines, len(places), dict(defines)["THREADS"],
        x, places, y, codes, scales, outer, decoded, faults, plan.rows_TK.shape[1], 0,
    )  # fmt: skip
    return y, codes, scales, outer, decoded, faults
