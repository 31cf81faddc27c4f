"""Execution spec rms_norm/1: root-mean-square norm, with and without a residual; also the q and k norm (D = head size).

    v[d]   = f32(x[d]), or with a residual s[d] = fl(f32(x[d]) + f32(r[d])); the new residual is bf16(s)
    q      = lane sum over D of fl(v[d] * v[d])                          (rounding.py; rows shorter than 128 too)
    inv    = fl(1 / sqrt(fl(fl(q / D) + eps)))                           IEEE divide and sqrt, eps as FP32
    y[d]   = bf16(fl(fl(v[d] * inv) * f32(w[d])))                        the norm sees the unrounded s; one rounding

Each row on its own. Backward, FP32, inv recomputed from the saved operands:
    n[d]   = fl(v[d] * inv),  g[d] = fl(f32(dy[d]) * f32(w[d]))
    c      = fl(lane sum over D of fl(g[d] * n[d]) / D)
    dv[d]  = fl(inv * fl(g[d] - fl(n[d] * c)))
    dx[d]  = bf16(dv[d]); with a residual bf16(fl(dv[d] + f32(dr[d]))), the same for x and for the residual
    dw[d]  = bf16(lane sum over rows of fl(f32(dy[t, d]) * n[t, d])), rows t in order (leading dimensions flattened)
Refused: shapes that do not fit, other dtypes, devices without a kernel. NaN and infinity follow IEEE.
"""

import math

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import LANES, bf16_to_f32, f32_to_bf16, lane_sum, lane_tree

SPEC = "rms_norm/1"
_ONE = np.float32(1)
_NO_ROWS = np.zeros((0, 0), np.uint16)


@jit
def _load_row(x, residual, t, v):
    """v = x[t], or the unrounded sum with residual[t] (an empty residual means none)."""
    if residual.size == 0:
        for d in range(v.size):
            v[d] = bf16_to_f32(x[t, d])
    else:
        for d in range(v.size):
            v[d] = bf16_to_f32(x[t, d]) + bf16_to_f32(residual[t, d])


@jit
def _inverse_rms(v, terms, eps):
    for d in range(v.size):
        terms[d] = v[d] * v[d]
    return _ONE / math.sqrt(lane_sum(terms) / np.float32(v.size) + eps)


@jit
def _forward_cpu(begin, end, x, residual, weight, eps, y, new_residual):
    D = x.shape[1]
    v, terms, w = np.empty(D, np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    for d in range(D):
        w[d] = bf16_to_f32(weight[d])
    for t in range(begin, end):
        _load_row(x, residual, t, v)
        inv = _inverse_rms(v, terms, eps)
        for d in range(D):
            y[t, d] = f32_to_bf16((v[d] * inv) * w[d])
        if residual.size:
            for d in range(D):
                new_residual[t, d] = f32_to_bf16(v[d])


def _rows(tensor: Tensor) -> np.ndarray:
    return cpu.bf16_bits(tensor).reshape(-1, tensor.shape[-1])


def forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """BF16 [..., D] -> (y, new residual or None), the shape of x."""
    if x.is_cuda:
        return gpu.rms_norm.forward(x, residual, weight_D, eps)
    cpu.on_cpu("rms_norm", x, weight_D)
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    new = None if residual is None else torch.empty(x.shape, dtype=torch.bfloat16)
    old_rows, new_rows = (_NO_ROWS, _NO_ROWS) if residual is None else (_rows(residual), _rows(new))
    args = _rows(x), old_rows, cpu.bf16_bits(weight_D), np.float32(eps), _rows(y), new_rows
    cpu.parallel(_forward_cpu, args[0].shape[0], *args, grain=8)
    return y, new


@jit
def _dx_cpu(begin, end, dy, dr, x, residual, weight, eps, dx, inv_T):
    D = x.shape[1]
    v, terms = np.empty(D, np.float32), np.empty(D, np.float32)
    for t in range(begin, end):
        _load_row(x, residual, t, v)
        inv = _inverse_rms(v, terms, eps)
        inv_T[t] = inv
        for d in range(D):
            terms[d] = (bf16_to_f32(dy[t, d]) * bf16_to_f32(weight[d])) * (v[d] * inv)
        c = lane_sum(terms) / np.float32(D)
        for d in range(D):
            g = bf16_to_f32(dy[t, d]) * bf16_to_f32(weight[d])
            v[d] = inv * (g - (v[d] * inv) * c)
        if residual.size:
            for d in range(D):
                v[d] = v[d] + bf16_to_f32(dr[t, d])
        for d in range(D):
            dx[t, d] = f32_to_bf16(v[d])


@jit
def _dw_cpu(begin, end, dy, x, residual, inv_T, dw):
    # Row t belongs to lane t mod 128 of its column: 128 sums a column, all columns side by side.
    lanes = np.zeros((LANES, end - begin), np.float32)
    for t in range(dy.shape[0]):
        lane, inv = lanes[t % LANES], inv_T[t]
        for d in range(begin, end):
            v = bf16_to_f32(x[t, d])
            if residual.size:
                v = v + bf16_to_f32(residual[t, d])
            lane[d - begin] += bf16_to_f32(dy[t, d]) * (v * inv)
    for d in range(begin, end):
        dw[d] = f32_to_bf16(lane_tree(lanes[:, d - begin].copy()))


def backward(dy, dr, x, residual, weight_D, eps, need_dw=True) -> tuple[Tensor, Tensor | None]:
    """dy and dr (None without a residual) BF16 like x -> (dx like x, for x and for the residual; dw [D] or None)."""
    if x.is_cuda:
        return gpu.rms_norm.backward(dy, dr, x, residual, weight_D, eps, need_dw)
    dx = torch.empty(x.shape, dtype=torch.bfloat16)
    dy_rows, x_rows = _rows(dy), _rows(x)
    residual_rows, dr_rows = (_NO_ROWS, _NO_ROWS) if residual is None else (_rows(residual), _rows(dr))
    inv = np.empty(x_rows.shape[0], np.float32)
    args = dy_rows, dr_rows, x_rows, residual_rows, cpu.bf16_bits(weight_D), np.float32(eps), _rows(dx), inv
    cpu.parallel(_dx_cpu, x_rows.shape[0], *args, grain=8)
    if not need_dw:
        return dx, None
    dw = torch.empty(weight_D.shape, dtype=torch.bfloat16)
    cpu.parallel(_dw_cpu, x_rows.shape[1], dy_rows, x_rows, residual_rows, inv, cpu.bf16_bits(dw), grain=64)
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return forward(x, None, weight_D, eps)[0]

    @staticmethod
    def backward(ctx, dy):
        x, weight_D = ctx.saved_tensors
        dx, dw = backward(dy, None, x, None, weight_D, ctx.eps, ctx.needs_input_grad[1])
        return dx, dw, None


class _RMSNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight_D, eps):
        ctx.save_for_backward(x, residual, weight_D)
        ctx.eps = eps
        return forward(x, residual, weight_D, eps)

    @staticmethod
    def backward(ctx, dy, dr):
        x, residual, weight_D = ctx.saved_tensors
        dx, dw = backward(dy, dr, x, residual, weight_D, ctx.eps, ctx.needs_input_grad[2])
        return dx, dx, dw, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x [..., D] BF16, weight [D] BF16 -> BF16 of x's shape.

    Raises ValueError on shapes that do not fit, TypeError on dtypes, UnsupportedDevice off the CPU.
    """
    _check(x, weight_D)
    return apply(_RMSNorm, x, weight_D, eps)


def rms_norm_residual(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D] BF16 -> (norm of their FP32 sum, new residual = that sum rounded). Raises as rms_norm."""
    _check(x, weight_D)
    if residual.shape != x.shape:
        raise ValueError(f"rms_norm: x is {tuple(x.shape)}, the residual is {tuple(residual.shape)}")
    return apply(_RMSNormResidual, x, residual, weight_D, eps)


def _check(x: Tensor, weight_D: Tensor) -> None:
    if weight_D.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight_D.shape[0]:
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight_D.shape)}; the last size must match")
