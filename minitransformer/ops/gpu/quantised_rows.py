"""The experts' rows as they are produced, with their row's NVFP4 in the same kernel: gather, or SwiGLU of gate_up.

The bits of gather_amax (dispatch/1) or swiglu_amax (swiglu/1) followed by nvfp4/1 with an outer scale a row; the
backward is the producer's. A row that is not finite leaves its token in the slot of the product that it is for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops import dispatch
from minitransformer.ops import swiglu as swiglu_op
from minitransformer.ops.autograd import apply
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.nvfp4 import bits_of, float_of, outer_of, quantised, store_quantised
from minitransformer.ops.gpu.scalar import silu_32
from minitransformer.ops.gpu.tiles import to_bf16
from minitransformer.ops.nvfp4 import BLOCK, Nvfp4

LONGEST = 8192  # a row is in the registers of one program


@quick
@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x_ptr, order_ptr, y_ptr, codes_ptr, scales_ptr, outer_ptr, decoded_ptr, faults_ptr, rows,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, GATHER: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """GATHER: x [tokens, K] BF16, y[r] = x[order[r] // SLOTS]. Else x [rows, 2K] FP32, y = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.load(order_ptr + row, mask=row < rows, other=0) // SLOTS
    b = tl.arange(0, COLUMNS // 16)
    inside = (row < rows)[:, None] & (b < K // 16)[None, :]
    column = b[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    if GATHER:
        y = tl.load(x_ptr + token[:, None, None] * K + column, mask=inside[:, :, None], other=0.0)
    else:
        at = row[:, None, None] * (2 * K) + column
        gate = tl.load(x_ptr + at, mask=inside[:, :, None], other=0.0)
        up = tl.load(x_ptr + at + K, mask=inside[:, :, None], other=0.0)
        y = to_bf16(silu_32(gate) * up)
    tl.store(y_ptr + row[:, None, None] * K + column, y, mask=inside[:, :, None])
    x = y.to(tl.float32)
    top = tl.max(bits_of(x) & 0x7FFFFFFF, 2)
    row_top = tl.max(tl.where(inside, top, 0), 1)
    s_enc, s_dec = outer_of(float_of(row_top))
    tl.store(outer_ptr + row, s_dec, mask=row < rows)
    code, d, scale = quantised(x, top, s_enc, s_dec)
    store_quantised(codes_ptr, scales_ptr, decoded_ptr, row, b, inside, code, d, scale, K, True)
    bad = (row < rows) & (row_top >= 0x7F800000)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), token.to(tl.int32), mask=bad, sem="relaxed")


def _launch(x: Tensor, plan, K: int, gather: bool) -> tuple[Tensor, ...]:
    """(y [R, K] BF16, codes, scales, outer, decoded)"""
    home, R = x.device, plan.num_rows
    (order,) = device.take("quantised_rows", home, torch.int64, plan.order_R)
    y, decoded = (torch.empty(R, K, dtype=torch.bfloat16, device=home) for _ in range(2))
    codes, scales = (torch.empty(R, K // n, dtype=torch.uint8, device=home) for n in (2, BLOCK))
    outer = torch.empty(R, device=home)
    if y.numel():
        columns = next_power_of_2(K)
        count = max(1, 2048 // columns)
        where = device.slot("experts.gate_up" if gather else "experts.down")
        with on(home):
            rows_kernel[(cdiv(R, count),)](
                x, order, y, codes, scales, outer, decoded, device.faults(home), R,
                K, columns, count, plan.rows_TK.shape[1], gather, where, num_warps=4, **device.ROWS,
            )  # fmt: skip
    return y, codes, scales, outer, decoded


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, plan):
        ctx.plan = plan
        (x,) = device.take("quantised_rows", x_TD.device, torch.bfloat16, x_TD)
        y, *made = _launch(x, plan, x.shape[1], True)
        ctx.mark_non_differentiable(*made)
        return y, *made

    @staticmethod
    def backward(ctx, dy_RD, *_):
        return dispatch.combine_forward(dy_RD, ctx.plan), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F, plan):
        ctx.save_for_backward(gate_up_R2F)
        (x,) = device.take("quantised_rows", gate_up_R2F.device, torch.float32, gate_up_R2F)
        y, *made = _launch(x, plan, x.shape[1] // 2, False)
        ctx.mark_non_differentiable(*made)
        return y, *made

    @staticmethod
    def backward(ctx, dy_RF, *_):
        return swiglu_op.backward(dy_RF, *ctx.saved_tensors).float(), None


def serves(columns: int) -> bool:
    """Whether a row of x fits one program and has whole blocks (2F columns for swiglu)."""
    return columns % (2 * BLOCK) == 0 and columns <= LONGEST


def gather(x_TD: Tensor, plan) -> tuple[Tensor, Nvfp4, Tensor]:
    """x [T, D] BF16 -> (rows in dispatch order [R, D] BF16, quantised, decoded BF16 [R, D])."""
    y, codes, scales, outer, decoded = apply(_Gather, x_TD, plan)
    return y, Nvfp4(codes, scales, outer), decoded


def swiglu(gate_up_R2F: Tensor, plan) -> tuple[Tensor, Nvfp4, Tensor]:
    """FP32 [R, 2F], gate half first -> (silu(gate) * up BF16 [R, F], quantised, decoded BF16 [R, F])."""
    y, codes, scales, outer, decoded = apply(_SwiGLU, gate_up_R2F, plan)
    return y, Nvfp4(codes, scales, outer), decoded
