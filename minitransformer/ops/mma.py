"""Execution spec hopper-k16-f25/2: the BF16 tensor-core chain of NVIDIA Hopper, as measured on an H200.

    d[m, n] = chain over k of a[m, k] * b[k, n], started from c[m, n] (FP32; zero when absent)

k ascends in steps of 16 (a short last step is filled with zeros). One step adds 16 exact products to c:

    e(x)    = floor(log2|x|); a subnormal counts as -126; zero terms are left out
    E       = the largest of e(a_i) + e(b_i), e(c) and -133 (exponents of the operands, not of the product)
    each term (16 products and c) is truncated toward zero to a multiple of 2^(E - 25)
    the truncated terms are added exactly
    the sum is truncated toward zero to FP32: 24 significant bits, below 2^-126 a multiple of 2^-149,
    from 2^128 on infinity; a zero sum is +0
    NaN or infinity among the terms: what IEEE addition gives; NaN is 0x7fffffff

mma.sync (m16n8k16) and wgmma give these bits for every tile shape; so do cuBLAS and CUTLASS where they do not split K.
The order over k is the contract. Tiles, threads and rows per call are free.

CPU: `chain_scalar` is the definition in integers. `chain_block` computes 32 columns at once (mma_kernel.py) and
falls back to the definition, row by row, where an exponent leaves FP32's comfortable range.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu
from minitransformer.ops.jit import jit
from minitransformer.ops.mma_kernel import COLUMNS, ODD, STEP, ZERO, step_row, unpack_columns, unpack_rows

SPEC = "hopper-k16-f25/2"
ROWS = 64  # rows of `a` that share one unpacked panel of `b`; keeps their accumulators in the L1 cache
NAN_BITS = np.uint32(0x7FFFFFFF)
LOWEST_TOP = -133  # measured on an H200: alignment_tests/gpu/measure_tiny.py


@jit
def split(a, values, exponents, begin, end):
    """BF16 bits a [M, K] -> FP32 values and int16 exponents (each twice in an int32), zeros up to a whole step."""
    pair_of_zero = np.int32(np.int64(ZERO & 0xFFFF) * 65537 - (1 << 32))
    for m in range(begin, end):
        row = values[m].view(np.uint32)
        for k in range(a.shape[1]):
            bits = np.uint32(a[m, k])
            row[k] = bits << np.uint32(16)
            field = np.int32((bits >> np.uint32(7)) & np.uint32(255))
            e = np.int32(1) if field == 0 else field
            e = np.int32(ZERO) if (bits & np.uint32(0x7FFF)) == 0 else e
            e = np.int32(ODD) if field == 255 else e
            exponents[m, k] = (e << np.int32(16)) | (e & np.int32(0xFFFF))
        for k in range(a.shape[1], values.shape[1]):
            row[k] = np.uint32(0)
            exponents[m, k] = pair_of_zero


@jit
def _term(a, b):
    """Exact product of two finite nonzero BF16 bit patterns: (sign, integer, exponent of the operands)."""
    ea, eb = np.int64((a >> 7) & 255), np.int64((b >> 7) & 255)
    ma, mb = np.int64(a & 127), np.int64(b & 127)
    ma, ea = (ma, np.int64(1)) if ea == 0 else (ma | 128, ea)
    mb, eb = (mb, np.int64(1)) if eb == 0 else (mb | 128, eb)
    sign = np.int64(-1) if ((a ^ b) >> 15) & 1 else np.int64(1)
    return sign, ma * mb, ea + eb - 254


@jit
def _fp32_toward_zero(total, top):
    """The bits of total * 2^(top - 25), truncated toward zero to FP32."""
    size = abs(total)
    if size == 0:
        return np.uint32(0)
    sign = np.int64(1) if total < 0 else np.int64(0)
    unit, length = top - 25, np.int64(0)
    while (size >> length) != 0:
        length += 1
    drop = max(length - 24, -149 - unit)
    if drop > 0:
        # A shift by 64 or more is undefined; size has fewer bits than 63, so 63 clears it just as well.
        size, unit, length = size >> min(drop, np.int64(63)), unit + drop, length - drop
        if size == 0:
            return np.uint32(0)
    exponent = length - 1 + unit
    if exponent >= 128:
        return np.uint32((sign << 31) | 0x7F800000)
    if exponent < -126:
        return np.uint32((sign << 31) | (size << (unit + 149)))
    mantissa = (size << (24 - length)) & 0x7FFFFF
    return np.uint32((sign << 31) | ((exponent + 127) << 23) | mantissa)


@jit
def _special(a, b, c, k0):
    """What IEEE addition gives where a term is NaN or infinite, as FP32 bits; 0 where every term is finite."""
    plus, minus, nan = False, False, False
    for k in range(k0, min(k0 + STEP, a.size)):
        a_size, b_size = a[k] & 0x7FFF, b[k] & 0x7FFF
        if a_size >= 0x7F80 or b_size >= 0x7F80:
            nan = nan or a_size > 0x7F80 or b_size > 0x7F80 or a_size == 0 or b_size == 0
            negative = ((a[k] ^ b[k]) >> 15) & 1 == 1
            plus, minus = plus or not negative, minus or negative
    c_size = c & np.uint32(0x7FFFFFFF)
    if c_size >= np.uint32(0x7F800000):
        nan = nan or c_size > np.uint32(0x7F800000)
        negative = (c >> np.uint32(31)) == np.uint32(1)
        plus, minus = plus or not negative, minus or negative
    if nan or (plus and minus):
        return NAN_BITS
    return np.uint32(0x7F800000) if plus else np.uint32(0xFF800000) if minus else np.uint32(0)


@jit
def chain_scalar(a, b, c):
    """The definition, for one output. a, b: BF16 bits [K] as uint16; c, result: FP32 bits as uint32."""
    for k0 in range(0, a.size, STEP):
        special = _special(a, b, c, k0)
        if special != np.uint32(0):
            c = special
            continue
        field = np.int64((c >> np.uint32(23)) & np.uint32(255))
        c_size = np.int64(c & np.uint32(0x7FFFFF)) | ((np.int64(1) << 23) if field != 0 else np.int64(0))
        c_exponent = (field if field != 0 else np.int64(1)) - 127
        top = np.int64(LOWEST_TOP) if c_size == 0 else c_exponent
        for k in range(k0, min(k0 + STEP, a.size)):
            if (a[k] & 0x7FFF) != 0 and (b[k] & 0x7FFF) != 0:
                top = max(top, _term(np.int64(a[k]), np.int64(b[k]))[2])
        total = np.int64(0)
        if c_size != 0:
            part = (c_size << 2) >> min(top - c_exponent, np.int64(60))  # c in units of 2^(E - 25)
            total = -part if (c >> np.uint32(31)) else part
        for k in range(k0, min(k0 + STEP, a.size)):
            if (a[k] & 0x7FFF) != 0 and (b[k] & 0x7FFF) != 0:
                sign, size, e = _term(np.int64(a[k]), np.int64(b[k]))
                total += sign * ((size << 11) >> min(top - e, np.int64(60)))
        c = _fp32_toward_zero(total, top)
    return c


@jit
def _fill_panel(b, k_major, k0, n0, scratch):
    """Zero-padded copy of one 16 x 32 piece of b into scratch [16, 32] (the edge of the matrix)."""
    depth, width = (b.shape[0], b.shape[1]) if k_major else (b.shape[1], b.shape[0])
    for k in range(STEP):
        for n in range(COLUMNS):
            inside = k0 + k < depth and n0 + n < width
            scratch[k, n] = (b[k0 + k, n0 + n] if k_major else b[n0 + n, k0 + k]) if inside else np.uint16(0)


@jit
def workspace():
    """Scratch of one thread for chain_block: panel values, exponents, raw piece, accumulators, flags."""
    return (
        np.empty((STEP, COLUMNS), np.float32),
        np.empty((STEP, COLUMNS), np.int16),
        np.empty((STEP, COLUMNS), np.uint16),
        np.empty((ROWS, COLUMNS), np.float32),
        np.empty(ROWS, np.int64),
    )


@jit
def chain_block(a, values, exponents, m0, m1, b, k_major, n0, c, work):
    """Rows m0..m1 (at most ROWS) and columns n0..n0+32 of the chain a @ b, into work[3] [rows, 32] FP32.

    a [M, K] BF16 bits with its `split`; b BF16 bits: [K, N] if k_major, else [N, K], unit stride along the last axis.
    c [M, N] FP32: incoming accumulators, or an array of no elements for zero.
    """
    panel, panel_exponents, piece, acc, odd = work
    depth, width = (b.shape[0], b.shape[1]) if k_major else (b.shape[1], b.shape[0])
    columns = min(COLUMNS, width - n0)
    rows = m1 - m0
    for i in range(rows):
        odd[i] = 0
        for j in range(COLUMNS):
            acc[i, j] = c[m0 + i, n0 + j] if c.size != 0 and j < columns else np.float32(0)
    row_bytes, row_stride = np.int64(b.strides[0]), np.int64(values.strides[0])
    for k0 in range(0, depth, STEP):
        if k0 + STEP > depth or columns < COLUMNS:
            _fill_panel(b, k_major, k0, n0, piece)
            unpack_columns(piece.ctypes.data, COLUMNS * 2, panel.ctypes.data, panel_exponents.ctypes.data)
        elif k_major:
            start = b.ctypes.data + k0 * row_bytes + n0 * 2
            unpack_columns(start, row_bytes, panel.ctypes.data, panel_exponents.ctypes.data)
        else:
            start = b.ctypes.data + n0 * row_bytes + k0 * 2
            unpack_rows(start, row_bytes, panel.ctypes.data, panel_exponents.ctypes.data)
        at = m0 * row_stride + k0 * 4
        for i in range(rows):
            odd[i] |= step_row(
                values.ctypes.data + at + i * row_stride,
                exponents.ctypes.data + at + i * row_stride,
                panel.ctypes.data,
                panel_exponents.ctypes.data,
                acc.ctypes.data + i * COLUMNS * 4,
            )
    for i in range(rows):
        if odd[i] != 0:
            for j in range(columns):
                start = c[m0 + i, n0 + j] if c.size != 0 else np.float32(0)
                column = b[:, n0 + j] if k_major else b[n0 + j]
                acc[i, j] = _from_bits(chain_scalar(a[m0 + i], column, _to_bits(start)))


@jit
def _to_bits(x):
    return np.float32(x).view(np.uint32)


@jit
def _from_bits(u):
    return np.uint32(u).view(np.float32)


@jit
def _chain_panels(begin, end, a, values, exponents, b, k_major, offsets, c, out):
    """Work items begin..end: (group, panel of 32 columns); group e is rows offsets[e]..offsets[e + 1], times b[e]."""
    work = workspace()
    panels = (out.shape[1] + COLUMNS - 1) // COLUMNS
    for item in range(begin, end):
        group, n0 = item // panels, (item % panels) * COLUMNS
        last = offsets[group + 1]
        for m0 in range(offsets[group], last, ROWS):
            m1 = min(m0 + ROWS, last)
            chain_block(a, values, exponents, m0, m1, b[group], k_major, n0, c, work)
            for i in range(m1 - m0):
                for j in range(min(COLUMNS, out.shape[1] - n0)):
                    out[m0 + i, n0 + j] = work[3][i, j]


@jit
def _split_rows(begin, end, a, values, exponents):
    split(a, values, exponents, begin, end)


def split_operand(a_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The left operand as chain_block wants it: FP32 values and paired exponents [M, K padded to 16]."""
    rows, depth = a_bits.shape
    padded = -(-depth // STEP) * STEP
    values, exponents = np.empty((rows, padded), np.float32), np.empty((rows, padded), np.int32)
    cpu.parallel(_split_rows, rows, a_bits, values, exponents, grain=64)
    return values, exponents


NO_ACCUMULATOR = np.empty((0, 0), np.float32)


def grouped_chain_bits(
    a: np.ndarray, b: np.ndarray, k_major: bool, offsets: np.ndarray, c: np.ndarray = NO_ACCUMULATOR
) -> np.ndarray:
    """a [M, K] in groups of rows, one b [E, K, N] (k_major) or [E, N, K] a group: BF16 bits as uint16 -> FP32 [M, N].

    offsets int64 [E + 1]: bounds of the groups' rows; c [M, N] FP32: incoming accumulators.
    """
    depth, width = b.shape[1:] if k_major else b.shape[:0:-1]
    if a.shape[1] != depth:
        raise ValueError(f"chain: a is {a.shape} but b has K = {depth}")
    out = np.empty((a.shape[0], width), np.float32)
    if a.shape[0] and width:
        items = b.shape[0] * -(-width // COLUMNS)
        cpu.parallel(_chain_panels, items, a, *split_operand(a), b, k_major, offsets, c, out)
    return out


def chain_bits(a: np.ndarray, b: np.ndarray, k_major: bool, c: np.ndarray = NO_ACCUMULATOR) -> np.ndarray:
    """a [M, K], b [K, N] (k_major) or [N, K]: BF16 bits as uint16, C-contiguous -> FP32 [M, N]."""
    return grouped_chain_bits(a, b[None], k_major, np.array([0, a.shape[0]]), c)


def chain(a_MK: Tensor, b_KN: Tensor, c_MN: Tensor | None = None) -> Tensor:
    """The tensor-core product of BF16 a [M, K] and b [K, N], accumulated from FP32 c [M, N] -> FP32 [M, N].

    A transposed view of a contiguous [N, K] matrix is read in place. Raises UnsupportedDevice off the CPU, ValueError
    on shapes that do not fit, TypeError on other dtypes. Source: numerics measured on an H200 (docs/design.md).
    """
    cpu.on_cpu("mma.chain", a_MK, b_KN)
    k_major = not (b_KN.stride(0) == 1 and b_KN.stride(1) == b_KN.shape[0])
    b = cpu.bf16_bits(b_KN if k_major else b_KN.t())
    c = NO_ACCUMULATOR if c_MN is None else cpu.f32(c_MN)
    if c_MN is not None and c.shape != (a_MK.shape[0], b_KN.shape[1]):
        raise ValueError(f"chain: the accumulator is {c.shape}, expected {(a_MK.shape[0], b_KN.shape[1])}")
    return torch.from_numpy(chain_bits(cpu.bf16_bits(a_MK), b, k_major, c))
