"""Execution spec quantised_linear/1: each expert's rows times its weight, on operands decoded from 4 or 8 bits.

The operands hold code * block scale, which BF16 holds exactly (nvfp4.py, mxfp8.py); the outer scales stay out of the
product and come in the epilogue. Rows in dispatch order, expert e owns offsets[e] .. offsets[e + 1] (dispatch.py).

    acc[r, n] = chain over k of x[r, k] * W[e(r), n, k]             decoded BF16 operands, FP32, from zero (mma.py)
    y[r, n]   = fl(acc * fl(s_row[r] * s_w[e(r), n]))               s_row = 1 for BF16 and MXFP8 activations
    out       = y in FP32 (gate_up), or bf16(y) (down)

s_w is given a row of W: gate's and up's own outer scale, an expert's, or one a row; they are never merged.

Backward, straight through every rounding of the forward, on the operands as they were before quantising:
    bf16    dX, dW as grouped_linear without routing weights: dX = bf16(chain over n of dY * W),
            dW = bf16(chain over the expert's rows of dY * x); an FP32 dY is rounded to BF16 first
    mxfp8   the same chains on operands rounded to MXFP8 along the axis that the chain sums over (rows padded with
            zeros to a multiple of 32)
Refused: shapes that do not fit, a gradient for a weight that exists only quantised, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu, grouped_linear
from minitransformer.ops.autograd import apply
from minitransformer.ops.dispatch import Plan
from minitransformer.ops.jit import jit
from minitransformer.ops.linear import round_bf16
from minitransformer.ops.mma import grouped_chain_bits

SPEC = "quantised_linear/1"


@jit
def _scale_outer(begin, end, acc, row_scale, weight_scale, offsets):
    expert = 0
    for r in range(begin, end):
        while offsets[expert + 1] <= r:
            expert += 1
        for n in range(acc.shape[1]):
            acc[r, n] = acc[r, n] * (row_scale[r] * weight_scale[expert, n])  # fl of fl


def forward(
    x_RK: Tensor, scale_R: Tensor | None, w_ENK: Tensor, scale_EN: Tensor, plan: Plan, out_dtype, early: bool = False
) -> Tensor:
    """Decoded operands BF16 and their outer scales FP32 -> [R, N] FP32 or BF16. On a GPU w may be packed."""
    if x_RK.is_cuda:
        return gpu.quantised_linear.forward(x_RK, scale_R, w_ENK, scale_EN, plan, out_dtype, early)
    cpu.on_cpu("quantised_linear", x_RK, w_ENK)
    offsets = np.asarray(plan.offsets, np.int64)
    acc = grouped_chain_bits(cpu.bf16_bits(x_RK), cpu.bf16_bits(w_ENK), False, offsets)
    rows = np.ones(acc.shape[0], np.float32) if scale_R is None else cpu.f32(scale_R)
    cpu.parallel(_scale_outer, acc.shape[0], acc, rows, cpu.f32(scale_EN), offsets, grain=16)
    return torch.from_numpy(acc) if out_dtype == torch.float32 else round_bf16(acc)


def backward(dy_RN: Tensor, x_RK: Tensor, weight_ENK: Tensor, plan: Plan, backward_format: str, need_dw=True):
    """dY [R, N] BF16 or FP32, x and W before quantising -> (dX [R, K] BF16, dW [E, N, K] BF16 or None)."""
    if dy_RN.is_cuda:
        dy = dy_RN.to(torch.bfloat16)  # nearest even
    else:
        dy = round_bf16(cpu.f32(dy_RN)) if dy_RN.dtype == torch.float32 else dy_RN
    return grouped_linear.backward(dy, x_RK, weight_ENK, plan, None, need_dw, backward_format)[:2]


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, weight_ENK, x_operand, w_operand, plan, out_dtype, backward_format, early):
        ctx.save_for_backward(x_RK, weight_ENK)
        ctx.plan, ctx.backward_format = plan, backward_format
        return forward(*x_operand, *w_operand, plan, out_dtype, early)

    @staticmethod
    def backward(ctx, dy_RN):
        x_RK, weight_ENK = ctx.saved_tensors
        if weight_ENK is None:
            raise InputError("these experts exist only quantised, without BF16 weights: train from a BF16 checkpoint")
        dx, dw = backward(dy_RN, x_RK, weight_ENK, ctx.plan, ctx.backward_format, ctx.needs_input_grad[1])
        return dx, dw, None, None, None, None, None, None


def quantised_linear(
    x_RK: Tensor,
    weight_ENK: Tensor | None,
    x_operand: tuple[Tensor, Tensor | None],
    w_operand: tuple[Tensor, Tensor],
    plan: Plan,
    out_dtype: torch.dtype,
    backward_format: str = "bf16",
    early: bool = False,
) -> Tensor:
    """[R, N] of decoded operands, FP32 or BF16; x_RK and weight_ENK (None: no gradient) are what gradients see.

    x_operand: decoded BF16 [R, K] and outer scales FP32 [R] (NVFP4) or None; w_operand: decoded BF16 [E, N, K], or on a
    GPU packed int32 (gpu/pack.py), and FP32 [E, N]. early: whatever made w_operand and the plan, a kernel has been
    launched since (a GPU may then fetch weights before that kernel has ended).
    Raises ValueError on shapes that do not fit, TypeError on dtypes, UnsupportedDevice on a device without a kernel.
    """
    rows, experts, (weight, scale_EN) = plan.num_rows, plan.num_experts, w_operand
    (E, N), K = scale_EN.shape, x_RK.shape[-1]
    shape = gpu.pack.packed_shape(E, N, K) if weight.dtype == torch.int32 else (E, N, K)
    if not (x_operand[0].shape == x_RK.shape == (rows, K) and E == experts and weight.shape == shape):
        raise ValueError(
            f"quantised_linear: x is {tuple(x_RK.shape)}, weight {tuple(weight.shape)}, weight scales "
            f"{tuple(scale_EN.shape)}; the plan has {rows} rows and {experts} experts"
        )
    return apply(_QuantisedLinear, x_RK, weight_ENK, x_operand, w_operand, plan, out_dtype, backward_format, early)
