"""Execution spec linear/2: y = x W^T, for qkv, o, the router gate, dense FFNs and the lm_head.

    y[t, n] = bf16(chain over k of x[t, k] * W[n, k])   x [T, K], W [N, K] BF16, accumulator from zero (mma.py)
    a NaN becomes 0x7fff, the accumulator's own NaN cut short, as the hardware and its libraries round it
    out_dtype FP32 (the lm_head): the chain's accumulator itself, no rounding

Backward, straight through the roundings; dY is rounded to BF16 first when it arrives in FP32 (nearest even):
    dX[t, k] = bf16(chain over n ascending of dY[t, n] * W[n, k])
    dW[n, k] = bf16(chain over t ascending, in packed order, of dY[t, n] * X[t, k])
A chain may be continued: dX by some rows of W after others, FP32 in between; parts but the last are multiples of 16.
No bias. Refused: other dtypes, K that does not match, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.mma import NO_ACCUMULATOR, STEP, chain_bits
from minitransformer.ops.rounding import f32_to_bf16

SPEC = "linear/2"
PRODUCT_NAN = 0x7FFF


@jit
def _round_rows(begin, end, x, out, nan):
    for m in range(begin, end):
        for n in range(x.shape[1]):
            out[m, n] = f32_to_bf16(x[m, n]) if x[m, n] == x[m, n] else nan


def round_bf16(x: np.ndarray, nan: int = 0x7FC0) -> Tensor:
    """FP32 [M, N] -> BF16 tensor, nearest even: the one rounding at the end of a product. nan: the bits of a NaN."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    cpu.parallel(_round_rows, x.shape[0], x, cpu.bf16_bits(out), np.uint16(nan), grain=16)
    return out


def forward(x_TK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if x_TK.is_cuda:
        return gpu.linear.forward(x_TK, weight_NK, out_dtype)
    cpu.on_cpu("linear", x_TK, weight_NK)
    acc = chain_bits(cpu.bf16_bits(x_TK), cpu.bf16_bits(weight_NK), k_major=False)
    return torch.from_numpy(acc) if out_dtype == torch.float32 else round_bf16(acc, PRODUCT_NAN)


def backward(dy_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, need_dx=True, need_dw=True, into=None) -> tuple:
    """dY [T, N] BF16 or FP32 -> (dX [T, K] BF16 or None, dW [N, K] BF16 or None). into: where dW goes."""
    if dy_TN.is_cuda:
        return gpu.linear_backward.backward(dy_TN, x_TK, weight_NK, need_dx, need_dw, into)
    dy = round_bf16(cpu.f32(dy_TN)) if dy_TN.dtype == torch.float32 else dy_TN
    dx = round_bf16(chain_bits(cpu.bf16_bits(dy), cpu.bf16_bits(weight_NK), k_major=True)) if need_dx else None
    dw = round_bf16(chain_bits(cpu.bf16_bits(dy.t()), cpu.bf16_bits(x_TK), k_major=True)) if need_dw else None
    return dx, dw if into is None else into.copy_(dw)


def continue_dx(dy_TN: Tensor, weight_NK: Tensor, acc_TK: Tensor | None, last: bool) -> Tensor:
    """dX's chain over these rows of the weight, from FP32 acc (None: zero), which may be overwritten.

    dY [T, N] BF16 of these rows -> FP32 [T, K] to go on from, N a multiple of 16; BF16 where they are the last.
    """
    if not last and dy_TN.shape[1] % STEP:
        raise ValueError(f"linear: a part of {dy_TN.shape[1]} rows; all but the last must be multiples of {STEP}")
    if dy_TN.is_cuda:
        return gpu.linear_backward.continue_dx(dy_TN, weight_NK, acc_TK, last)
    start = NO_ACCUMULATOR if acc_TK is None else cpu.f32(acc_TK)
    acc = chain_bits(cpu.bf16_bits(dy_TN), cpu.bf16_bits(weight_NK), k_major=True, c=start)
    return round_bf16(acc) if last else torch.from_numpy(acc)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_NK, out_dtype):
        ctx.save_for_backward(x_TK, weight_NK)
        return forward(x_TK, weight_NK, out_dtype)

    @staticmethod
    def backward(ctx, dy_TN):
        return *backward(dy_TN, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None


def linear(x_TK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K] BF16 times W [N, K] BF16 transposed -> [T, N] BF16, or FP32 with out_dtype=torch.float32.

    Raises ValueError on shapes or an out_dtype that do not fit, TypeError on dtypes, UnsupportedDevice off the CPU.
    """
    if x_TK.dim() != 2 or weight_NK.dim() != 2 or x_TK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"linear: x is {tuple(x_TK.shape)}, weight is {tuple(weight_NK.shape)}; K must be the same")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"linear: out_dtype must be torch.bfloat16 or torch.float32, got {out_dtype}")
    return apply(_Linear, x_TK, weight_NK, out_dtype)
