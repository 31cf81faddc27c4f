"""rope/1 on Hopper, forward and backward (ops/rope.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.tiles import to_bf16


@quick
@triton.jit(do_not_specialize=["lines", "P"])
def rope_kernel(
    x_ptr, positions_ptr, table_ptr, out_ptr, faults_ptr, sign, lines, P, N: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """ROWS lines (token, head) a program; x, out [lines, 2 HALF] BF16, table [P, 2 HALF] FP32."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, valid = line // N, line < lines
    position = tl.load(positions_ptr + token, mask=valid, other=0)
    outside = (position < 0) | (position >= P)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(token), token.to(tl.int32), mask=valid & outside, sem="relaxed")
    i = tl.arange(0, WIDTH)[None, :]
    inside = valid[:, None] & (i < HALF)
    angle = table_ptr + tl.where(outside, 0, position)[:, None] * (2 * HALF) + i
    c, s = tl.load(angle, mask=inside, other=0.0), tl.load(angle + HALF, mask=inside, other=0.0) * sign
    at = line[:, None] * (2 * HALF) + i
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, to_bf16(a * c - b * s), mask=inside)
    tl.store(out_ptr + at + HALF, to_bf16(b * c + a * s), mask=inside)


def rotate(x_TNH: Tensor, positions_T: Tensor, table_PH: Tensor, sign: float = 1.0) -> Tensor:
    home, (T, N, H) = x_TNH.device, x_TNH.shape
    (x,) = device.take("rope", home, torch.bfloat16, x_TNH)
    (positions,) = device.take("rope", home, torch.int64, positions_T)
    (table,) = device.take("rope", home, torch.float32, table_PH)
    out, width = torch.empty_like(x), next_power_of_2(H // 2)
    if out.numel():
        rows = max(1, 2048 // width)
        with on(home):
            rope_kernel[(cdiv(T * N, rows),)](
                x, positions, table, out, device.faults(home), float(sign), T * N, table.shape[0], N, H // 2, width,
                rows, device.slot("rope"), num_warps=4, **device.ROWS,
            )  # fmt: skip
    return out
