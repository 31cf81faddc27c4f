"""Execution spec swiglu/1: h = silu(gate) * up, one rounding.

    g = f32(x[r, f]), u = f32(x[r, F + f])            x [R, 2F] BF16, gate half first
    h[r, f] = bf16(fl(silu_32(g) * u))                silu_32 of rounding.py, not rounded to BF16 in between

swiglu_amax (NVFP4 experts) takes g and u in FP32, as FC1's epilogue leaves them; the same formula; beside h it gives
    amax[r] = max over f of |h[r, f]|                 of the rounded h, taken while the row is written

Backward, FP32 from the operands as saved (BF16 or FP32), one rounding each (dh [R, F] BF16):
    s      = sigmoid_32(g) = fl(1 / fl(1 + exp2_32(fl(g * -log2 e))))
    d      = fl(s + fl(silu_32(g) * fl(1 - s)))       the derivative of silu
    dgate  = bf16(fl(fl(dh * u) * d))
    dup    = bf16(fl(dh * silu_32(g)))
Nothing is refused by value; infinities and NaN follow IEEE through the formula (silu(-infinity) is NaN).
Refused: an odd width, other dtypes, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import bf16_to_f32, f32_to_bf16, sigmoid_32, silu_32

SPEC = "swiglu/1"
_ONE = np.float32(1)


@jit
def _forward_cpu(begin, end, x, out):
    F = out.shape[1]
    for r in range(begin, end):
        gate, up, row = x[r, :F], x[r, F:], out[r]
        for f in range(F):
            row[f] = f32_to_bf16(silu_32(bf16_to_f32(gate[f])) * bf16_to_f32(up[f]))


def forward(gate_up_R2F: Tensor) -> Tensor:
    """BF16 [R, 2F] -> BF16 [R, F]."""
    if gate_up_R2F.is_cuda:
        return gpu.swiglu.forward(gate_up_R2F)
    cpu.on_cpu("swiglu", gate_up_R2F)
    x = cpu.bf16_bits(gate_up_R2F)
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.bfloat16)
    cpu.parallel(_forward_cpu, x.shape[0], x, cpu.bf16_bits(out), grain=8)
    return out


@jit
def _forward_amax_cpu(begin, end, x, out, amax):
    F = out.shape[1]
    for r in range(begin, end):
        gate, up, row = x[r, :F], x[r, F:], out[r]
        top = np.uint16(0)
        for f in range(F):
            row[f] = f32_to_bf16(silu_32(gate[f]) * up[f])
            top = max(top, np.uint16(row[f] & np.uint16(0x7FFF)))  # |h| orders as its bits do, NaN above all
        amax[r] = bf16_to_f32(top)


def forward_amax(gate_up_R2F: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 [R, 2F] -> (h BF16 [R, F], amax FP32 [R])."""
    if gate_up_R2F.is_cuda:
        return gpu.swiglu.forward_amax(gate_up_R2F)
    cpu.on_cpu("swiglu_amax", gate_up_R2F)
    x = cpu.f32(gate_up_R2F)
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.bfloat16)
    amax = torch.empty(x.shape[0], dtype=torch.float32)
    cpu.parallel(_forward_amax_cpu, x.shape[0], x, cpu.bf16_bits(out), amax.numpy(), grain=8)
    return out, amax


@jit
def _backward_cpu(begin, end, dh, x, dx):
    F = dh.shape[1]
    for r in range(begin, end):
        gate, up, grad, dgate, dup = x[r, :F], x[r, F:], dh[r], dx[r, :F], dx[r, F:]
        for f in range(F):
            g, d = gate[f], bf16_to_f32(grad[f])
            s, y = sigmoid_32(g), silu_32(g)
            slope = s + y * (_ONE - s)
            dgate[f] = f32_to_bf16((d * up[f]) * slope)
            dup[f] = f32_to_bf16(d * y)


def backward(dh_RF: Tensor, gate_up_R2F: Tensor) -> Tensor:
    """dh BF16 [R, F], gate_up [R, 2F] BF16 or FP32 -> BF16 [R, 2F], gate half first."""
    if dh_RF.is_cuda:
        return gpu.swiglu.backward(dh_RF, gate_up_R2F)
    dx = torch.empty(gate_up_R2F.shape, dtype=torch.bfloat16)
    x = cpu.f32(gate_up_R2F.float())  # BF16 -> FP32 is exact
    cpu.parallel(_backward_cpu, dx.shape[0], cpu.bf16_bits(dh_RF), x, cpu.bf16_bits(dx), grain=8)
    return dx


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F):
        ctx.save_for_backward(gate_up_R2F)
        return forward(gate_up_R2F)

    @staticmethod
    def backward(ctx, dh_RF):
        return backward(dh_RF, *ctx.saved_tensors)


class _SwiGLUAmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F):
        ctx.save_for_backward(gate_up_R2F)
        h_RF, amax_R = forward_amax(gate_up_R2F)
        ctx.mark_non_differentiable(amax_R)
        return h_RF, amax_R

    @staticmethod
    def backward(ctx, dh_RF, _):
        return backward(dh_RF, *ctx.saved_tensors).float()


def swiglu_amax(gate_up_R2F: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 [R, 2F], gate half first -> (silu(gate) * up BF16 [R, F], its row maxima FP32 [R]). Raises as swiglu."""
    if gate_up_R2F.dim() != 2 or gate_up_R2F.shape[1] % 2:
        raise ValueError(f"swiglu_amax: gate_up is {tuple(gate_up_R2F.shape)}, expected [R, 2F]")
    return apply(_SwiGLUAmax, gate_up_R2F)


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """BF16 [R, 2F], gate half first -> silu(gate) * up, BF16 [R, F].

    Raises ValueError on another shape, TypeError on another dtype, UnsupportedDevice off the CPU.
    """
    if gate_up_R2F.dim() != 2 or gate_up_R2F.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up is {tuple(gate_up_R2F.shape)}, expected [R, 2F]")
    return apply(_SwiGLU, gate_up_R2F)
