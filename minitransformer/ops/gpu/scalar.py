"""The scalar functions and the row sum of rounding/1 in Triton: the same operations, constants and order.

Compiled with device.ROWS: every operation is one IEEE instruction, an FMA only where tl.fma stands, subnormals kept.
"""

import triton
import triton.language as tl

from minitransformer.ops import rounding

_E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(c) for c in rounding.EXP2)
_L3, _L4, _L5, _L6, _L7, _L8, _L9, _L10 = (tl.constexpr(c) for c in rounding.LOG)
_MAGIC = tl.constexpr(1.5 * 2**23)
LOG2E = tl.constexpr(float(rounding.LOG2E))
_NEG_LOG2E = tl.constexpr(-float(rounding.LOG2E))
_LN2_HI, _LN2_LO = tl.constexpr(float(rounding._LN2_HI)), tl.constexpr(float(rounding._LN2_LO))
LANES = tl.constexpr(rounding.LANES)


@triton.jit
def div(a, b):
    """IEEE a / b of two tensors that broadcast."""
    a, b = tl.broadcast(a, b)
    return tl.math.div_rn(a, b)


@triton.jit
def exp2_32(x):
    """2^x in FP32, portable: results below 2^-126 are 0, from 2^128 on infinity."""
    t = x + _MAGIC
    f = x - (t - _MAGIC)
    q = tl.fma(f, _E6, _E5)
    q = tl.fma(f, q, _E4)
    q = tl.fma(f, q, _E3)
    q = tl.fma(f, q, _E2)
    q = tl.fma(f, q, _E1)
    p = tl.fma(f, q, 1.0)
    # n stands in the low bits of t; shifting it to the exponent drops the rest of t.
    y = (p.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    y = tl.where(x < -126.0, 0.0, y)
    y = tl.where(x >= 128.0, float("inf"), y)
    return tl.where(x == x, y, x)


@triton.jit
def log_32(x):
    """Natural logarithm in FP32, portable."""
    small = x < 1.1754943508222875e-38
    u = tl.where(small, x * 8388608.0, x).to(tl.int32, bitcast=True)
    e = (u - 0x3F3504F3) >> 23
    f = (u - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    k = tl.where(small, e - 23, e).to(tl.float32)
    r = tl.fma(f, _L10, _L9)
    r = tl.fma(f, r, _L8)
    r = tl.fma(f, r, _L7)
    r = tl.fma(f, r, _L6)
    r = tl.fma(f, r, _L5)
    r = tl.fma(f, r, _L4)
    r = tl.fma(f, r, _L3)
    r = tl.fma(f, r, -0.5)
    t = tl.fma(k, _LN2_LO, (f * f) * r)
    y = tl.fma(k, _LN2_HI, f + t)
    y = tl.where(x == 0.0, float("-inf"), y)
    y = tl.where(x < 0.0, float("nan"), y)
    return tl.where(x < float("inf"), y, x)


@triton.jit
def sigmoid_32(x):
    return div(tl.full(x.shape, 1.0, tl.float32), exp2_32(x * _NEG_LOG2E) + 1.0)


@triton.jit
def silu_32(x):
    """One divide, so not x * sigmoid_32(x)."""
    return div(x, exp2_32(x * _NEG_LOG2E) + 1.0)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _halve(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, 2 HALF] -> [ROWS, HALF]: element l plus element l + HALF; a sum of two has one order."""
    return tl.reshape(tl.reduce(tl.reshape(x, (ROWS, 2, HALF)), 1, _add), (ROWS, HALF))


@triton.jit
def lane_tree(x, ROWS: tl.constexpr):
    """The halving tree over lanes [ROWS, 128] -> [ROWS]."""
    x = _halve(x, ROWS, 64)
    x = _halve(x, ROWS, 32)
    x = _halve(x, ROWS, 16)
    x = _halve(x, ROWS, 8)
    x = _halve(x, ROWS, 4)
    x = _halve(x, ROWS, 2)
    return tl.reduce(x, 1, _add)


@triton.jit
def magnitude(x):
    """Bits of |x| of a BF16 tensor as int32: they order as the values do, NaN above all."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def amax_of(top):
    """FP32 row maxima of `magnitude`s [rows, columns]; a NaN is 0x7fc00000 (LLVM's abs.bf16 would make 0x7fff)."""
    bits = tl.max(top, 1)
    return (tl.where(bits > 0x7F80, 0x7FC0, bits) << 16).to(tl.float32, bitcast=True)
