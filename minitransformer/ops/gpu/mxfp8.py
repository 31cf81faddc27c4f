"""mxfp8/1 on Hopper: quantise, decode, and both at once for the gradients' operands (ops/mxfp8.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops import mxfp8
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.grouped_linear import _expert_of
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.nvfp4 import bits_of, e4m3_value, float_of, rows_of
from minitransformer.ops.gpu.tiles import to_bf16


@triton.jit
def e4m3_bits(v):
    """Non-negative FP32 -> E4M3 bits, nearest even, saturating at 448."""
    u = bits_of(v)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - 960
    subnormal = bits_of(v + 16384.0) - 0x46800000  # an ulp at 2^14 is 2^-9
    return tl.where(v >= 448.0, 0x7E, tl.where(v < 0.015625, subnormal, normal))


@triton.jit
def decoded(code, field):
    """bf16(E4M3 * 2^(field - 127)); the product in FP32 rounds where it is subnormal, as on the CPU."""
    power = float_of(tl.where(field == 0, 0x00400000, field << 23))  # 255 << 23 is infinity; E8M0 has NaN there
    return to_bf16(e4m3_value(code) * tl.where(field == 255, float("nan"), power))


@triton.jit
def field_of(top):
    """E8M0 of a block whose largest magnitude has the bits `top`."""
    return tl.maximum((top >> 23) - 8, 0)


@triton.jit
def code_of(x, field):
    y = x * float_of((254 - field) << 23)
    return e4m3_bits(tl.abs(y)) | ((bits_of(y) >> 24) & 0x80)


@triton.jit
def rounded(x, top):
    """BF16 of FP32 x in MXFP8, top of its block; a block with a value that is not finite becomes NaN, as a gradient
    that is not finite is refused where an update is applied."""
    value = decoded(code_of(x, field_of(top)), field_of(top))
    nan = tl.full(x.shape, 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(tl.broadcast_to(top, x.shape) >= 0x7F800000, nan, value)


@quick
@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr, order_ptr, codes_ptr, scales_ptr, decoded_ptr, faults_ptr, rows,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, DECODE: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """x [rows, K]; order: a fault names token order[row] // SLOTS (0: the row)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    at = row[:, None, None] * K + b[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    inside = (row < rows)[:, None] & (b < K // 32)[None, :]
    x = tl.load(x_ptr + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    top = tl.max(bits_of(x) & 0x7FFFFFFF, 2)
    field = field_of(top)
    if DECODE:  # what Triton 3.6 made of the conversion's bytes as integers was wrong
        code = code_of(x, field[:, :, None])
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside[:, :, None])
    else:  # cvt.rn.satfinite: nearest even, saturating at 448, the sign of -0 kept
        y = x * float_of((254 - field) << 23)[:, :, None]
        tl.store(codes_ptr + at, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside[:, :, None])
    tl.store(scales_ptr + row[:, None] * (K // 32) + b[None, :], field.to(tl.uint8), mask=inside)
    if DECODE:
        tl.store(decoded_ptr + at, decoded(code, field[:, :, None]), mask=inside[:, :, None])
    bad = inside & (top >= 0x7F800000)
    name = row if SLOTS == 0 else tl.load(order_ptr + row, mask=row < rows, other=0) // SLOTS
    name = tl.broadcast_to(name.to(tl.int32)[:, None], bad.shape)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(name), name, mask=bad, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["blocks"])
def decode_kernel(codes_ptr, scales_ptr, out_ptr, blocks, BLOCKS: tl.constexpr):
    """codes [blocks, 32] and scales [blocks] -> BF16 [blocks, 32]."""
    b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(codes_ptr + at, mask=(b < blocks)[:, None], other=0).to(tl.int32)
    field = tl.load(scales_ptr + b, mask=b < blocks, other=0).to(tl.int32)
    tl.store(out_ptr + at, decoded(code, field[:, None]), mask=(b < blocks)[:, None])


@quick
@triton.jit(do_not_specialize=["rows"])
def round_rows_kernel(x_ptr, out_ptr, rows, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, K] BF16, blocks along K, the last one filled up with zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    column = b[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    inside = (row < rows)[:, None, None] & (column < K)
    x = tl.load(x_ptr + row[:, None, None] * K + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(bits_of(x) & 0x7FFFFFFF, 2)
    tl.store(out_ptr + row[:, None, None] * K + column, rounded(x, top[:, :, None]), mask=inside)


@quick
@triton.jit(do_not_specialize=["experts"])
def round_columns_kernel(
    x_ptr, out_ptr, offsets_ptr, experts, C, PADDED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """x [rows, C] BF16, blocks of 32 rows of one expert, its last one filled up with zeros."""
    expert, first, end = _expert_of(tl.program_id(0), offsets_ptr, experts, 32, PADDED)
    if expert >= experts:
        return
    row, column = first + tl.arange(0, 32), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = row[:, None].to(tl.int64) * C + column[None, :], (row < end)[:, None] & (column < C)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(bits_of(x) & 0x7FFFFFFF, 0)
    tl.store(out_ptr + at, rounded(x, top[None, :]), mask=inside)


def tile(K: int, rows: int) -> tuple[int, int]:
    """(columns, rows) of a program of quantize_kernel, no column idle; moves no bit."""
    columns = min(2048, K & -K)
    return columns, max(1, (4096 if rows >= 4096 else 2048) // columns)


def quantize(
    x: Tensor, decode: bool = False, fault: str = "mxfp8.quantize", plan=None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [..., K] -> codes, scales, and the decoded operand if wanted; faults as in gpu/nvfp4.py."""
    rows, home = rows_of("mxfp8.quantize", x), x.device
    K, codes = rows.shape[1], torch.empty(x.shape, dtype=torch.uint8, device=home)
    scales = torch.empty(*x.shape[:-1], K // mxfp8.BLOCK, dtype=torch.uint8, device=home)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=home) if decode else None
    if rows.numel():
        columns, count = tile(K, rows.shape[0])
        order, slots = (codes, 0) if plan is None else (plan.order_R, plan.rows_TK.shape[1])
        with on(home):
            quantize_kernel[(cdiv(rows.shape[0], count), cdiv(K, columns))](
                rows, order, codes, scales, out if decode else codes, device.faults(home),
                rows.shape[0], K, columns, count, slots, decode, device.slot(fault), num_warps=4, **device.ROWS,
            )  # fmt: skip
    return codes, scales, out


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., K] and scales [..., K/32] uint8 -> BF16 [..., K]."""
    home = codes.device
    codes, scales = device.take("mxfp8.decode", home, torch.uint8, codes, scales)
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=home)
    if out.numel():
        with on(home):
            decode_kernel[(cdiv(scales.numel(), 128),)](
                codes, scales, out, scales.numel(), 128, num_warps=4, **device.ROWS
            )
    return out


def round_rows(x: Tensor) -> Tensor:
    """Contiguous BF16 [rows, K] -> the same rounded to MXFP8 along K (ops/mxfp8.py, rounded_bits). The current GPU."""
    (rows, K), out = x.shape, torch.empty_like(x)
    columns = max(mxfp8.BLOCK, min(2048, next_power_of_2(K)))
    count = 2048 // columns
    round_rows_kernel[cdiv(rows, count), cdiv(K, columns)](
        x, out, rows, K, count, columns, num_warps=4, **device.ROWS
    )
    return out


def round_columns(x: Tensor, bounds: Tensor) -> Tensor:
    """Contiguous BF16 [rows, C] -> rounded along the rows, expert by expert: bounds int64 [E + 1]. The current GPU."""
    (rows, C), E, out = x.shape, bounds.shape[0] - 1, torch.empty_like(x)
    blocks = (rows + min(E, rows) * (mxfp8.BLOCK - 1)) // mxfp8.BLOCK  # an expert may end with one that is not full
    round_columns_kernel[blocks, cdiv(C, 128)](
        x, out, bounds, E, C, next_power_of_2(E), 128, num_warps=4, **device.ROWS
    )
    return out
