"""Execution spec rope/1: rotary position embedding, half-split (NeoX) pairs: element i turns with element i + H/2.

    table[p] = f32(cos(a)) for i < H/2, then f32(sin(a))     a = fl64(p * frequency[i]), frequency[i] = theta^(-2i/H)
    c, s     = table[position of the token], pair i
    out[i]       = bf16(fl(fl(x[i] * c) - fl(x[i + H/2] * s)))
    out[i + H/2] = bf16(fl(fl(x[i + H/2] * c) + fl(x[i] * s)))            FP32, no FMA, one rounding

The table is made once, in FP64, and rounded once to FP32; it is FP32 whatever the model's dtype. A frequency is the
FP64 nearest to its exact value (decimal arithmetic), cos and sin are IEEE operations alone (_cos_sin), so the table has
the same bits on every machine, where libm's last bit does not; its hash is in the fingerprint all the same. Given
frequencies (YaRN) are used as they come, and the FP64 cos and sin are multiplied by `magnitude` before the rounding.

Backward: the rotation by -a with the same roundings: dx[i] = bf16(fl(fl(d[i] * c) + fl(d[i + H/2] * s))),
dx[i + H/2] = bf16(fl(fl(d[i + H/2] * c) - fl(d[i] * s))). The table has no gradient.
Refused: a position outside the table, an odd head size, shapes, dtypes, devices without a kernel.
"""

import decimal
import math

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import bf16_to_f32, f32_to_bf16, fma64

SPEC = "rope/1"
_TWO_OVER_PI = 2.0 / math.pi
_MAGIC64 = 1.5 * 2.0**52
# pi/2 in two FP64 parts (106 bits): enough below 2^30 radians.
_HALF_PI_HI, _HALF_PI_LO = float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54")
_SIN = np.array([(-1) ** n / math.factorial(2 * n + 1) for n in range(9, 0, -1)])
_COS = np.array([(-1) ** n / math.factorial(2 * n) for n in range(9, 0, -1)])


@jit
def _cos_sin(a):
    """cos and sin of an FP64 angle: reduction by pi/2 and Taylor polynomials, about 1 ulp of FP64."""
    n = (a * _TWO_OVER_PI + _MAGIC64) - _MAGIC64
    r = fma64(n, -_HALF_PI_LO, fma64(n, -_HALF_PI_HI, a))
    z = r * r
    p, q = _SIN[0], _COS[0]
    for i in range(1, _SIN.size):
        p, q = fma64(z, p, _SIN[i]), fma64(z, q, _COS[i])
    s, c = fma64(r * z, p, r), fma64(z, q, 1.0)
    quarter = np.int64(n) & 3
    if quarter == 0:
        return c, s
    if quarter == 1:
        return -s, c
    if quarter == 2:
        return -c, -s
    return s, -c


@jit
def _table_cpu(begin, end, frequencies, magnitude, table):
    half = frequencies.size
    for p in range(begin, end):
        for i in range(half):
            c, s = _cos_sin(np.float64(p) * frequencies[i])
            table[p, i] = np.float32(c * magnitude)
            table[p, half + i] = np.float32(s * magnitude)


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/H) for i in 0 .. H/2 - 1, FP64, each rounded once from 40 decimal digits (no libm)."""
    with decimal.localcontext(prec=40):
        base = decimal.Decimal(theta)
        return np.array([float(base ** (decimal.Decimal(-2 * i) / head_dim)) for i in range(head_dim // 2)])


def rope_table(
    head_dim: int, theta: float, positions: int, frequencies: np.ndarray | None = None, magnitude: float = 1.0
) -> Tensor:
    """The table FP32 [positions, H]: cos of the H/2 pairs, then sin, for positions 0 .. positions - 1.

    frequencies FP64 [H/2] replace theta's (radians a position), magnitude scales cos and sin (YaRN).
    Raises ValueError on an odd head size or a theta that is not positive.
    """
    if head_dim % 2 or not theta > 0:
        raise ValueError(f"rope_table: head_dim {head_dim} must be even and theta {theta} positive")
    frequencies = rope_frequencies(head_dim, theta) if frequencies is None else np.asarray(frequencies, np.float64)
    table = torch.empty(positions, head_dim, dtype=torch.float32, device="cpu")
    cpu.parallel(_table_cpu, positions, frequencies, float(magnitude), table.numpy(), grain=64)
    return table


@jit
def _forward_cpu(begin, end, x_TNH, positions_T, table_PH, sign, out_TNH):
    half = x_TNH.shape[2] // 2
    for t in range(begin, end):
        cos, sin = table_PH[positions_T[t], :half], table_PH[positions_T[t], half:]
        for n in range(x_TNH.shape[1]):
            low, high = x_TNH[t, n, :half], x_TNH[t, n, half:]
            out_low, out_high = out_TNH[t, n, :half], out_TNH[t, n, half:]
            for i in range(half):
                a, b, c, s = bf16_to_f32(low[i]), bf16_to_f32(high[i]), cos[i], sin[i] * sign
                out_low[i] = f32_to_bf16(a * c - b * s)
                out_high[i] = f32_to_bf16(b * c + a * s)


def rotate(x_TNH: Tensor, positions_T: Tensor, table_PH: Tensor, sign: float = 1.0) -> Tensor:
    """x BF16 [T, N, H] turned by its positions' angles (forward, sign 1) or back (backward, sign -1)."""
    if x_TNH.is_cuda:
        return gpu.rope.rotate(x_TNH, positions_T, table_PH, sign)
    cpu.on_cpu("rope", x_TNH, positions_T, table_PH)
    out = torch.empty(x_TNH.shape, dtype=torch.bfloat16)
    args = cpu.bf16_bits(x_TNH), cpu.i64(positions_T), cpu.f32(table_PH), np.float32(sign), cpu.bf16_bits(out)
    cpu.parallel(_forward_cpu, out.shape[0], *args, grain=8)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNH, positions_T, table_PH):
        ctx.save_for_backward(positions_T, table_PH)
        return rotate(x_TNH, positions_T, table_PH)

    @staticmethod
    def backward(ctx, dx_TNH):
        return rotate(dx_TNH, *ctx.saved_tensors, sign=-1.0), None, None


def rope(q_TNH: Tensor, k_TGH: Tensor, positions_T: Tensor, table_PH: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, N, H] and k [T, G, H] BF16, both turned by positions [T] int64 through the table FP32 [P, H].

    Raises InputError on a position outside the table, ValueError on shapes, TypeError on dtypes, UnsupportedDevice.
    """
    T, P, H = positions_T.shape[0], *table_PH.shape
    if any(x.dim() != 3 or x.shape[0] != T or x.shape[2] != H for x in (q_TNH, k_TGH)):
        raise ValueError(
            f"rope: q {tuple(q_TNH.shape)}, k {tuple(k_TGH.shape)} do not fit {T} positions, head size {H}"
        )
    # On a GPU the kernel looks, so that the host need not wait (gpu/device.py, FAULTS).
    if not positions_T.is_cuda and T and (positions_T.min() < 0 or positions_T.max() >= P):
        worst = int(positions_T.min()) if positions_T.min() < 0 else int(positions_T.max())
        raise InputError(f"rope: position {worst} is outside the table of {P}; shorten the prompt or the completion")
    return apply(_Rope, q_TNH, positions_T, table_PH), apply(_Rope, k_TGH, positions_T, table_PH)
