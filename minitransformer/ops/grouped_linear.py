"""Execution spec grouped_linear/2: each expert's rows times that expert's weight (gate_up and down).

Rows come in dispatch order (dispatch.py): expert e owns rows offsets[e] .. offsets[e + 1], in token order.

    acc[r, n] = chain over k of x[r, k] * W[e(r), n, k]       FP32, from zero (mma.py)
    y[r, n]   = bf16(acc)                                     gate_up
    y[r, n]   = bf16(fl(acc * w[r]))                          down: the routing weight w (FP32), only here
    a NaN of y becomes 0x7fff, as in linear.py

Backward, straight through the roundings:
    g[r, k]   = chain over n ascending of dY[r, n] * W[e(r), n, k]              FP32
    dX[r, k]  = bf16(g), or bf16(fl(g * w[r]))
    dw[r]     = lane sum over k of fl(x[r, k] * g[r, k])                        FP32
    dW[e,n,k] = bf16(chain over the expert's rows ascending of s[r, n] * x[r, k]), s = dY, or bf16(fl(dY * w[r]))
An expert without rows gets dW = +0. With the backward `mxfp8` (to compare; recipe.py) the same chains run on operands
rounded to MXFP8 along the axis of the sum (mxfp8.py), rows padded with zeros to a multiple of 32.
Refused: other dtypes, shapes that do not fit the plan, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu, gpu, mxfp8
from minitransformer.ops.autograd import apply
from minitransformer.ops.dispatch import Plan
from minitransformer.ops.jit import jit
from minitransformer.ops.linear import PRODUCT_NAN, round_bf16
from minitransformer.ops.mma import chain_bits, grouped_chain_bits
from minitransformer.ops.rounding import bf16_to_f32, lane_sum

SPEC = "grouped_linear/2"


@jit
def _scale_rows(begin, end, x, scale):
    for r in range(begin, end):
        for n in range(x.shape[1]):
            x[r, n] = x[r, n] * scale[r]  # fl: the routing weight in FP32


@jit
def _row_dots(begin, end, x, g, out):
    terms = np.empty(x.shape[1], np.float32)
    for r in range(begin, end):
        for k in range(x.shape[1]):
            terms[k] = bf16_to_f32(x[r, k]) * g[r, k]
        out[r] = lane_sum(terms)


def _rounded(acc: np.ndarray, scale: np.ndarray | None, nan: int = 0x7FC0) -> Tensor:
    if scale is not None:
        cpu.parallel(_scale_rows, acc.shape[0], acc, scale, grain=16)
    return round_bf16(acc, nan)


def _row_weights(weights_TK: Tensor | None, plan: Plan) -> np.ndarray | None:
    return None if weights_TK is None else cpu.f32(weights_TK.detach().reshape(-1)[plan.order_R])


def _offsets(plan: Plan) -> np.ndarray:
    return np.asarray(plan.offsets, np.int64)


def forward(x_RK: Tensor, weight_ENK: Tensor, plan: Plan, weights_TK: Tensor | None = None) -> Tensor:
    if x_RK.is_cuda:
        return gpu.grouped_linear.forward(x_RK, weight_ENK, plan, weights_TK)
    cpu.on_cpu("grouped_linear", x_RK, weight_ENK)
    acc = grouped_chain_bits(cpu.bf16_bits(x_RK), cpu.bf16_bits(weight_ENK), False, _offsets(plan))
    return _rounded(acc, _row_weights(weights_TK, plan), PRODUCT_NAN)


def backward(
    dy_RN: Tensor, x_RK: Tensor, weight_ENK: Tensor, plan: Plan, weights_TK: Tensor | None, need_dw: bool = True,
    backward_format: str = "bf16",
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """-> (dX [R, K] BF16, dW [E, N, K] BF16 or None, dweights [T, K] FP32 or None)."""
    if dy_RN.is_cuda:
        return gpu.grouped_linear_backward.backward(
            dy_RN, x_RK, weight_ENK, plan, weights_TK, need_dw, backward_format=backward_format
        )
    scale = _row_weights(weights_TK, plan)
    x, low = cpu.bf16_bits(x_RK), backward_format == "mxfp8"
    if low:
        turned = mxfp8.rounded_bits(weight_ENK.transpose(1, 2))
        g = grouped_chain_bits(mxfp8.rounded_bits(dy_RN), turned, False, _offsets(plan))
    else:
        g = grouped_chain_bits(cpu.bf16_bits(dy_RN), cpu.bf16_bits(weight_ENK), True, _offsets(plan))
    dweights = None
    if weights_TK is not None:
        dots = np.empty(x.shape[0], np.float32)
        cpu.parallel(_row_dots, x.shape[0], x, g, dots, grain=16)
        dweights = torch.from_numpy(dots)[plan.rows_TK.reshape(-1)].reshape(weights_TK.shape)
    dx = _rounded(g, scale)
    if not need_dw:
        return dx, None, dweights
    scaled = dy_RN if scale is None else _rounded(dy_RN.float().numpy(), scale)
    dw = torch.zeros_like(weight_ENK)
    for e in range(weight_ENK.shape[0]):
        rows = slice(plan.offsets[e], plan.offsets[e + 1])
        if rows.stop == rows.start:
            continue
        if low:
            pair = mxfp8.rounded_bits(scaled[rows].t()), mxfp8.rounded_bits(x_RK[rows].t())
            dw[e] = round_bf16(chain_bits(*pair, k_major=False))
        else:
            dw[e] = round_bf16(chain_bits(cpu.bf16_bits(scaled[rows].t()), x[rows], k_major=True))
    return dx, dw, dweights


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, weight_ENK, plan, weights_TK, backward_format):
        ctx.save_for_backward(x_RK, weight_ENK, weights_TK)
        ctx.plan, ctx.backward_format = plan, backward_format
        return forward(x_RK, weight_ENK, plan, weights_TK)

    @staticmethod
    def backward(ctx, dy_RN):
        x_RK, weight_ENK, weights_TK = ctx.saved_tensors
        need = ctx.needs_input_grad[1]
        dx, dw, dweights = backward(dy_RN, x_RK, weight_ENK, ctx.plan, weights_TK, need, ctx.backward_format)
        return dx, dw, None, dweights, None


def grouped_linear(
    x_RK: Tensor, weight_ENK: Tensor, plan: Plan, weights_TK: Tensor | None = None, backward_format: str = "bf16"
) -> Tensor:
    """x [R, K] BF16 in dispatch order times each row's expert of W [E, N, K] BF16 -> [R, N] BF16.

    weights_TK [T, K slots] FP32: routing weights to scale the rows by before the one rounding (down projection).
    Raises ValueError on shapes that do not fit, TypeError on dtypes, UnsupportedDevice off the CPU.
    """
    rows, experts = plan.num_rows, plan.num_experts
    if x_RK.shape[0] != rows or weight_ENK.shape[0] != experts or x_RK.shape[1] != weight_ENK.shape[2]:
        raise ValueError(
            f"grouped_linear: x is {tuple(x_RK.shape)}, weight is {tuple(weight_ENK.shape)}, "
            f"the plan has {rows} rows and {experts} experts"
        )
    if weights_TK is not None and weights_TK.numel() != rows:
        raise ValueError(f"grouped_linear: {weights_TK.numel()} routing weights for {rows} rows")
    return apply(_GroupedLinear, x_RK, weight_ENK, plan, weights_TK, backward_format)
