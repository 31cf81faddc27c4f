"""nvfp4/1 on Hopper: row maxima, quantise, decode (ops/nvfp4.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops import nvfp4
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import div

_TOP, _FLT_MAX = tl.constexpr(float(nvfp4._TOP)), tl.constexpr(float(nvfp4.FLT_MAX))
_SIXTH = tl.constexpr(float(nvfp4._SIXTH))
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_bits(v):
    """Non-negative FP32 -> E4M3 bits, nearest even, saturating at 448."""
    u = bits_of(v)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - 960
    subnormal = bits_of(v + 16384.0) - 0x46800000  # an ulp at 2^14 is 2^-9
    return tl.where(v >= 448.0, 0x7E, tl.where(v < 0.015625, subnormal, normal))


@triton.jit
def e4m3_value(code):
    """E4M3 bits as int32, 0 .. 255 -> FP32, NaN for 0x7f and 0xff; both products are exact."""
    value = float_of((code & 0x7F) << 20) * 1.329227995784916e36  # 2^120
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return float_of(bits_of(value) | ((code & 0x80) << 24))


@triton.jit
def e2m1_code(y):
    """FP32 -> E2M1 code 0 .. 15 as int32, nearest, ties to the even code, saturating at 6; the sign is kept."""
    a = tl.minimum(tl.abs(y), 6.0)
    # Codes are 0.5 apart below 2, 1 below 4, 2 above: the adder rounds to an ulp of 2^22 * 2^e, with 2^e <= max(a, 1).
    e = tl.maximum(bits_of(a), 0x3F800000) & 0x7F800000
    magic = e + (22 << 23)
    steps = bits_of(a + float_of(magic)) - magic
    return (steps + (e >> 22) - 254) | ((bits_of(y) >> 28) & 8)


@triton.jit
def decoded_bits(code, scale):
    """bf16(code * scale) as int16 for FP32 scales: exact."""
    value = float_of(((code & 7) << 22) | ((code & 8) << 28)) * 8.507059173023462e37  # 2^126
    return (bits_of(value * scale) >> 16).to(tl.int16)


@triton.jit
def outer_of(g):
    """(s_enc, s_dec) of FP32 maxima."""
    s_enc = tl.minimum(div(tl.full(g.shape, _TOP, tl.float32), g), _FLT_MAX)
    s_enc = tl.where((g == 0.0) | (s_enc == 0.0), 1.0, s_enc)
    return s_enc, div(tl.full(g.shape, 1.0, tl.float32), s_enc)


@triton.jit
def quantised(x, top, s_enc, s_dec):
    """FP32 [rows, blocks, 16] and its blocks' magnitudes, outer scales [rows] -> codes, scale bits, scales as FP32."""
    d = e4m3_bits(tl.minimum(float_of(top) * (s_enc * _SIXTH)[:, None], _FLT_MAX))
    scale = e4m3_value(d)
    enc = tl.minimum(div(tl.full(d.shape, 1.0, tl.float32), scale * s_dec[:, None]), _FLT_MAX)
    return e2m1_code(x * enc[:, :, None]), d, scale


@triton.jit
def store_quantised(
    codes_ptr, scales_ptr, decoded_ptr, row, b, inside, code, d, scale, K: tl.constexpr, DECODE: tl.constexpr
):
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1], 8, 2)))
    half = row[:, None, None] * (K // 2) + b[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(codes_ptr + half, (low | (high << 4)).to(tl.uint8), mask=inside[:, :, None])
    tl.store(scales_ptr + row[:, None] * (K // 16) + b[None, :], d.to(tl.uint8), mask=inside)
    if DECODE:
        at = row[:, None, None] * K + b[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        bits = decoded_bits(code, scale[:, :, None])
        tl.store(decoded_ptr + at, bits.to(tl.bfloat16, bitcast=True), mask=inside[:, :, None])


@quick
@triton.jit(do_not_specialize=["rows", "group"])
def quantize_kernel(
    x_ptr, amax_ptr, order_ptr, codes_ptr, scales_ptr, outer_ptr, decoded_ptr, faults_ptr, rows, group,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, DECODE: tl.constexpr,
    SLOT: tl.constexpr, SMALL_SLOT: tl.constexpr,
):  # fmt: skip
    """x [rows, K], amax and outer [rows / group]; order: a fault names token order[row] // SLOTS (0: the row)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    entry = row // group
    g = tl.load(amax_ptr + entry, mask=row < rows, other=0.0)
    s_enc, s_dec = outer_of(g)
    if tl.program_id(1) == 0:
        tl.store(outer_ptr + entry, s_dec, mask=(row < rows) & (row % group == 0))
    b = tl.program_id(1) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    at = row[:, None, None] * K + b[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    inside = (row < rows)[:, None] & (b < K // 16)[None, :]
    x = tl.load(x_ptr + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    top = tl.max(bits_of(x) & 0x7FFFFFFF, 2)
    code, d, scale = quantised(x, top, s_enc, s_dec)
    store_quantised(codes_ptr, scales_ptr, decoded_ptr, row, b, inside, code, d, scale, K, DECODE)
    bad = inside & (top >= _INFINITY_BITS)
    small = inside & ~bad & ((float_of(top) > g[:, None]) | ~(g < float("inf"))[:, None])
    name = row if SLOTS == 0 else tl.load(order_ptr + row, mask=row < rows, other=0) // SLOTS
    name = tl.broadcast_to(name.to(tl.int32)[:, None], bad.shape)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(name), name, mask=bad, sem="relaxed")
    tl.atomic_min(faults_ptr + SMALL_SLOT + tl.zeros_like(name), name, mask=small, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["blocks"])
def decode_kernel(codes_ptr, scales_ptr, out_ptr, blocks, BLOCKS: tl.constexpr):
    """codes [blocks, 8] and scales [blocks] -> BF16 [blocks, 16]."""
    b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (b < blocks)[:, None]
    pair = tl.load(codes_ptr + b[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside, other=0).to(tl.int32)
    scale = e4m3_value(tl.load(scales_ptr + b, mask=b < blocks, other=0).to(tl.int32))[:, None]
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCKS, 16))
    # One NaN for all, with the scale's sign, as the CPU's table has it.
    nan = tl.where(bits_of(scale) < 0, -0x40, 0x7FC0).to(tl.int16)
    bits = tl.where(scale == scale, decoded_bits(code, scale), nan)
    at = b[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, bits.to(tl.bfloat16, bitcast=True), mask=inside)


@quick
@triton.jit(do_not_specialize=["rows"])
def amax_kernel(x_ptr, out_ptr, rows, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, K] -> FP32 [rows]; the integer order of magnitudes puts NaN above infinity."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    top = tl.zeros((ROWS, COLUMNS), tl.int32)
    for k0 in range(0, K, COLUMNS):
        k = k0 + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + k, mask=(row < rows)[:, None] & (k < K), other=0.0).to(tl.float32)
        top = tl.maximum(top, bits_of(x) & 0x7FFFFFFF)
    tl.store(out_ptr + row, float_of(tl.max(top, 1)), mask=row < rows)


def tile(K: int, block: int, rows: int) -> tuple[int, int]:
    """(columns, rows) of a program of quantize_kernel; moves no bit."""
    columns = max(block, min(2048, next_power_of_2(K)))
    return columns, max(1, (4096 if rows >= 4096 else 2048) // columns)


def rows_of(op: str, x: Tensor) -> Tensor:
    """x [..., N, K] BF16 or FP32 as contiguous [rows, K]."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: x is {x.dtype}, expected BF16 or FP32")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x is {tuple(x.shape)}, expected [..., N, K]")
    return device.take(op, x.device, x.dtype, x)[0].view(-1, x.shape[-1])


def row_amax(x: Tensor) -> Tensor:
    rows = rows_of("nvfp4.row_amax", x)
    out = torch.empty(rows.shape[0], device=x.device)
    if out.numel():
        with on(x.device):
            amax_kernel[(cdiv(rows.shape[0], 4),)](
                rows, out, rows.shape[0], rows.shape[1], 4, 512, num_warps=4, **device.ROWS
            )
    return out.view(x.shape[:-1])


def quantize(
    x: Tensor, amax: Tensor, group: int, decode: bool = False, fault: str = "nvfp4.quantize", plan=None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x [..., K], amax FP32 of one entry for `group` rows -> codes, scales, outer, and the decoded operand if wanted.

    Values that are not finite are left in the slot of `fault`, by token if a plan says where the rows come from.
    """
    rows, home, lead = rows_of("nvfp4.quantize", x), x.device, x.shape[:-1]
    K, (amax,) = rows.shape[1], device.take("nvfp4.quantize", home, torch.float32, amax)
    codes, scales = (torch.empty(*lead, K // n, dtype=torch.uint8, device=home) for n in (2, nvfp4.BLOCK))
    decoded = torch.empty(x.shape, dtype=torch.bfloat16, device=home) if decode else None
    if rows.numel() == 0:
        return codes, scales, torch.from_numpy(nvfp4.outer_scales(amax.cpu().numpy())[1]).to(home), decoded
    outer, (columns, count) = torch.empty_like(amax), tile(K, nvfp4.BLOCK, rows.shape[0])
    order, slots = (amax, 0) if plan is None else (plan.order_R, plan.rows_TK.shape[1])
    with on(home):
        quantize_kernel[(cdiv(rows.shape[0], count), cdiv(K, columns))](
            rows, amax, order, codes, scales, outer, decoded if decode else codes, device.faults(home),
            rows.shape[0], group, K, columns, count, slots, decode, device.slot(fault), device.slot("nvfp4.amax"),
            num_warps=4, **device.ROWS,
        )  # fmt: skip
    return codes, scales, outer, decoded


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., K/2] and scales [..., K/16] uint8 -> BF16 [..., K]."""
    home = codes.device
    codes, scales = device.take("nvfp4.decode", home, torch.uint8, codes, scales)
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=torch.bfloat16, device=home)
    if out.numel():
        with on(home):
            decode_kernel[(cdiv(scales.numel(), 256),)](
                codes, scales, out, scales.numel(), 256, num_warps=4, **device.ROWS
            )
    return out
