"""Execution spec rounding/1: the scalar functions and row sums under every operator.

All arithmetic is IEEE FP32, one operation rounded to nearest even at a time, subnormals kept, nothing contracted; an
FMA stands only where `fma32` is written (Triton: tl.fma, div_rn, fusion off). FP64 appears in log_64 alone.

f32_to_bf16   nearest even, overflow to infinity; any NaN becomes 0x7fc0 (x86 and a GPU give a made NaN another sign)
exp2_32(x)    n = rint(x) by adding and subtracting 1.5 * 2^23, f = x - n (exact), p = Horner in fma32 with EXP2[6..1],
              last step fma32(f, q, 1); n is added to p's exponent. x < -126 gives 0 (results below 2^-126 are flushed),
              x >= 128 gives infinity, NaN gives NaN. Relative error below 1.0e-7. Exact at integers
exp2_hw(x)    ex2.approx.ftz.f32 of Hopper through its table (measured on an H200 for every finite input):
              t = trunc(|x| * 2^23), signed; the result is 2^(t >> 23) times T[t mod 2^23], for x < 0 and a part that is
              not zero T[part - 1]; |x| >= 160 gives 0 or infinity, below 2^-126 gives 0, from 2^128 on infinity
log_32(x)     x = 2^e * m, m in [sqrt(1/2), sqrt(2)), f = m - 1 (exact), r = Horner in fma32 with LOG[10..3] then -1/2,
              t = fma32(e, LN2_LO, fl(fl(f * f) * r)), result fma32(e, LN2_HI, fl(f + t)). 0 gives -infinity, x < 0 NaN,
              infinity infinity. About 1 ulp
log_64(x)     the same reduction in FP64, s = f / (2 + f), log(1 + f) = f - s * (f - R), R = Taylor in z = s * s by
              fma64. About 1 ulp of FP64. IEEE operations only, so that no libm is asked
silu_32(x)    x / (1 + exp2_32(x * -log2 e)): fl product, fl sum, IEEE divide. +infinity gives infinity, NaN gives NaN,
              -infinity gives NaN (infinity / infinity), below about -88.7 the result is -0. The rounded product
              makes the relative error for x < 0 grow as |x| * 2^-24
lane_sum      128 lanes that start at +0; lane l adds elements l, l + 128, ... ascending; then a halving tree: lane l
              adds lane l + 64, then l + 32, ... l + 1. Lanes past the end of a short row stay +0
quad_sum      lane t of four adds columns 8j + 2t, 8j + 2t + 1 for ascending j, starting from its first column; then
              (lane 0 + lane 2) + (lane 1 + lane 3). The length is a multiple of 8. The order of Triton's tl.sum over an
              accumulator tile whose rows belong to one warp each
"""

import hashlib
import threading
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from minitransformer.ops.jit import jit

SPEC = "rounding/1"
LANES = 128
EX2_SHA256 = "4230b4a27ebed3eb6df3051cb604d77651b2b1e2f46d55b4f4045e7d7e48c224"
_EX2_FILE = Path(__file__).resolve().parent.parent / "data" / "hopper_ex2.npz"

# Minimax coefficients, each rounded to FP32 before the next was fitted. The kernels of every device copy these values.
EXP2 = (0.6931471824645996, 0.24022647738456726, 0.05550359934568405, 0.009618505835533142, 0.0013390806270763278,
        0.0001532646274426952)  # fmt: skip
LOG = (0.3333333134651184, -0.2500081956386566, 0.2000124156475067, -0.166234090924263, 0.14201579988002777,
       -0.13159610331058502, 0.12762217223644257, -0.07636439055204391)  # fmt: skip

# Numba would promote FP32 * Python float to FP64, so every constant is an np.float32 before a kernel sees it.
_E1, _E2, _E3, _E4, _E5, _E6 = (np.float32(c) for c in EXP2)
_L3, _L4, _L5, _L6, _L7, _L8, _L9, _L10 = (np.float32(c) for c in LOG)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_INF, _NAN = np.float32(np.inf), np.float32(np.nan)
_MAGIC = np.float32(1.5 * 2**23)
LOG2E = np.float32(1.4426950408889634)
_NEG_LOG2E = np.float32(-1.4426950408889634)
# ln 2 in two parts; e * LN2_HI is exact for every exponent e (HI has 15 bits, in FP64 32), LO is the rest.
_LN2_HI, _LN2_LO = np.float32(float.fromhex("0x1.62e4p-1")), np.float32(float.fromhex("0x1.7f7d1cf79abcap-20"))
_LN2_HI64, _LN2_LO64 = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_TINY32, _TINY64 = np.float32(2.0**-126), 2.0**-1022
_LAST_FLUSHED, _FIRST_INF, _HW_LIMIT = np.float32(-126), np.float32(128), np.float32(160)
_TWO23 = np.float32(2**23)
_MANTISSA = np.int64(2**23 - 1)

# NumPy's error model: a divide by zero is IEEE's infinity or NaN. Numba's default tests for it, and does not vectorise.


def _same(*args, kind) -> None:
    for arg in args:
        if arg != kind:
            raise TypingError(f"expected {kind}, got {arg}: an implicit promotion would move a rounding")


@intrinsic
def fma32(typingctx, a, b, c):
    """fl(a * b + c) with one rounding; all three must be FP32."""
    _same(a, b, c, kind=types.float32)
    return types.float32(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def fma64(typingctx, a, b, c):
    """The FP64 fused multiply-add; all three must be FP64."""
    _same(a, b, c, kind=types.float64)
    return types.float64(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


def _bitcast(source, target, llvm_target):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], llvm_target)

    return target(source), codegen


@intrinsic
def bits_of_f32(typingctx, x):
    """The bits of an FP32 value as uint32."""
    _same(x, kind=types.float32)
    return _bitcast(x, types.uint32, ir.IntType(32))


@intrinsic
def f32_of_bits(typingctx, u):
    """The FP32 value of uint32 bits."""
    _same(u, kind=types.uint32)
    return _bitcast(u, types.float32, ir.FloatType())


@intrinsic
def bits_of_f64(typingctx, x):
    """The bits of an FP64 value as int64."""
    _same(x, kind=types.float64)
    return _bitcast(x, types.int64, ir.IntType(64))


@intrinsic
def f64_of_bits(typingctx, u):
    """The FP64 value of int64 bits."""
    _same(u, kind=types.int64)
    return _bitcast(u, types.float64, ir.DoubleType())


@jit
def bf16_to_f32(u):
    """BF16 bits (uint16) -> FP32, exact."""
    return f32_of_bits(np.uint32(np.uint32(u) << np.uint32(16)))


@jit
def f32_to_bf16(x):
    """FP32 -> BF16 bits (uint16), nearest even; any NaN becomes 0x7fc0."""
    u = bits_of_f32(x)
    even = np.uint32((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    # Adding 0x7fff could carry a NaN's mantissa into the sign, so NaN is decided on the input.
    return np.uint16(0x7FC0) if x != x else np.uint16(even)


@jit
def exp2_32(x):
    """2^x in FP32, portable (module docstring): results below 2^-126 are 0, from 2^128 on infinity."""
    t = x + _MAGIC
    f = x - (t - _MAGIC)
    q = fma32(f, _E6, _E5)
    q = fma32(f, q, _E4)
    q = fma32(f, q, _E3)
    q = fma32(f, q, _E2)
    q = fma32(f, q, _E1)
    p = fma32(f, q, _ONE)
    # n stands in the low bits of t; shifting it to the exponent drops the rest of t.
    y = f32_of_bits(np.uint32(bits_of_f32(p) + np.uint32(bits_of_f32(t) << np.uint32(23))))
    y = _ZERO if x < _LAST_FLUSHED else y
    y = _INF if x >= _FIRST_INF else y
    return x if x != x else y


@jit
def exp2_hw(x, table):
    """Hopper's ex2.approx.ftz.f32 of an FP32 value; table is ex2_table()."""
    size = abs(x)
    # The limit also replaces NaN and infinity, which have no integer.
    t = np.int64(np.int32((size if size < _HW_LIMIT else _HW_LIMIT) * _TWO23))
    t = -t if x < _ZERO else t
    whole, part = t >> 23, t & _MANTISSA
    part = part - 1 if x < _ZERO and part != 0 else part
    y = f32_of_bits(np.uint32(bits_of_f32(table[part]) + np.uint32(whole << 23)))
    y = _ZERO if whole < -126 else y
    y = _INF if whole > 127 else y
    return x if x != x else y


@jit
def log_32(x):
    """Natural logarithm in FP32, portable, about 1 ulp."""
    small = x < _TINY32
    # Subnormals are scaled by 2^23 first (exact), so that they have an exponent field.
    u = np.int64(bits_of_f32(x * _TWO23 if small else x))
    # Counting from sqrt(1/2) centres m on 1.
    e = (u - np.int64(0x3F3504F3)) >> 23
    f = f32_of_bits(np.uint32(u - (e << 23))) - _ONE
    k = np.float32(e - 23 if small else e)
    r = fma32(f, _L10, _L9)
    r = fma32(f, r, _L8)
    r = fma32(f, r, _L7)
    r = fma32(f, r, _L6)
    r = fma32(f, r, _L5)
    r = fma32(f, r, _L4)
    r = fma32(f, r, _L3)
    r = fma32(f, r, -_HALF)
    t = fma32(k, _LN2_LO, (f * f) * r)
    y = fma32(k, _LN2_HI, f + t)
    y = -_INF if x == _ZERO else y
    y = _NAN if x < _ZERO else y
    return y if x < _INF else x


@jit
def log_64(x):
    """Natural logarithm in FP64 from IEEE operations alone, about 1 ulp."""
    small = x < _TINY64
    u = bits_of_f64(x * 2.0**54 if small else x)
    e = (u - np.int64(0x3FE6A09E667F3BCD)) >> 52
    f = f64_of_bits(u - (e << 52)) - 1.0
    k = np.float64(e - 54 if small else e)
    s = f / (2.0 + f)
    z = s * s
    r = fma64(z, 2.0 / 25.0, 2.0 / 23.0)
    r = fma64(z, r, 2.0 / 21.0)
    r = fma64(z, r, 2.0 / 19.0)
    r = fma64(z, r, 2.0 / 17.0)
    r = fma64(z, r, 2.0 / 15.0)
    r = fma64(z, r, 2.0 / 13.0)
    r = fma64(z, r, 2.0 / 11.0)
    r = fma64(z, r, 2.0 / 9.0)
    r = fma64(z, r, 2.0 / 7.0)
    r = fma64(z, r, 2.0 / 5.0)
    r = fma64(z, r, 2.0 / 3.0)
    t = fma64(k, _LN2_LO64, -(s * (f - z * r)))
    y = fma64(k, _LN2_HI64, f + t)
    y = -np.inf if x == 0.0 else y
    y = np.nan if x < 0.0 else y
    return y if x < np.inf else x


@jit
def sigmoid_32(x):
    """1 / (1 + exp2(-x log2 e)) in FP32: the factor of silu, and of its derivative."""
    return _ONE / (_ONE + exp2_32(x * _NEG_LOG2E))


@jit
def silu_32(x):
    """x / (1 + exp2(-x log2 e)) in FP32; one divide, so not x * sigmoid_32(x)."""
    return x / (_ONE + exp2_32(x * _NEG_LOG2E))


@jit
def lane_tree(lanes):
    """The halving tree over lanes [128] FP32, in place; returns the sum."""
    half = LANES // 2
    while half > 0:
        for l in range(half):
            lanes[l] += lanes[l + half]
        half //= 2
    return lanes[0]


@jit
def lane_sum(x):
    """Lane sum of a 1-D FP32 array. Operators that make terms on the fly fill 128 lanes and call lane_tree."""
    lanes = np.zeros(LANES, np.float32)
    full = x.size // LANES * LANES
    # A constant trip count lets LLVM unroll over the lanes, five times as fast as a bound that depends on the row.
    for start in range(0, full, LANES):
        for l in range(LANES):
            lanes[l] += x[start + l]
    for l in range(x.size - full):
        lanes[l] += x[full + l]
    return lane_tree(lanes)


@jit
def quad_sum(p):
    """Quad sum of a 1-D FP32 array whose length is a multiple of 8."""
    a, b, c, d = p[0] + p[1], p[2] + p[3], p[4] + p[5], p[6] + p[7]
    for j in range(8, p.size, 8):
        a = (a + p[j]) + p[j + 1]
        b = (b + p[j + 2]) + p[j + 3]
        c = (c + p[j + 4]) + p[j + 5]
        d = (d + p[j + 6]) + p[j + 7]
    return (a + c) + (b + d)


_ex2_lock = threading.Lock()
_ex2: list[np.ndarray] = []


def ex2_base() -> np.ndarray:
    """2^(F / 2^23) for F in [0, 2^23) as FP32, from square roots and products in FP64 alone.

    np.exp2 would do, but its last bit follows the build of NumPy; IEEE sqrt and multiply are the same everywhere.
    """
    bits = [2.0]
    for _ in range(23):
        bits.append(float(np.sqrt(np.float64(bits[-1]))))
    low, high = np.ones(1), np.ones(1)
    for weight in range(12):
        low = np.concatenate([low, low * bits[23 - weight]])
    for weight in range(12, 23):
        high = np.concatenate([high, high * bits[23 - weight]])
    return (high[:, None] * low[None, :]).astype(np.float32).reshape(-1)


def ex2_table() -> np.ndarray:
    """T [2^23] FP32 in [1, 2), read-only, 32 MB, built once a process. RuntimeError if its hash is wrong."""
    with _ex2_lock:
        if not _ex2:
            with np.load(_EX2_FILE) as file:
                table = ex2_base().view(np.int32) + file["delta"]
            digest = hashlib.sha256((table & 0x7FFFFF).astype("<i4").tobytes()).hexdigest()
            if digest != EX2_SHA256:
                raise RuntimeError(f"{_EX2_FILE}: the exp2 table's sha256 is {digest}, not {EX2_SHA256}; reinstall")
            table = table.view(np.float32)
            table.flags.writeable = False
            _ex2.append(table)
        return _ex2[0]
