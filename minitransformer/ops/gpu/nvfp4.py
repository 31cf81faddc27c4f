"""nvfp4/1 on Hopper: row maxima and decode in Triton, quantise in CUDA C++ (ops/nvfp4.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops import nvfp4
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import cdiv, on, quick

SOURCE, THREADS = "nvfp4_quantize.cu", 128
MANY = 1 << 21  # blocks of 16: from here on a thread takes four, which are on their way at once


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """E4M3 bits as int32, 0 .. 255 -> FP32, NaN for 0x7f and 0xff; both products are exact."""
    value = float_of((code & 0x7F) << 20) * 1.329227995784916e36  # 2^120
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return float_of(bits_of(value) | ((code & 0x80) << 24))


@triton.jit
def decoded_bits(code, scale):
    """bf16(code * scale) as int16 for FP32 scales: exact."""
    value = float_of(((code & 7) << 22) | ((code & 8) << 28)) * 8.507059173023462e37  # 2^126
    return (bits_of(value * scale) >> 16).to(tl.int16)


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


def rows_of(op: str, x: Tensor) -> Tensor:
    """x [..., N, K] BF16 or FP32 as contiguous [rows, K]."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: x is {x.dtype}, expected BF16 or FP32")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x is {tuple(x.shape)}, expected [..., N, K]")
    return device.take(op, x.device, x.dtype, x)[0].view(-1, x.shape[-1])


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy where a view begins between two 16-byte words."""
    return x.clone() if x.data_ptr() % 16 else x


def defines(K: int, dtype: torch.dtype, decode: bool, steps: int) -> tuple[tuple[str, int], ...]:
    """What nvfp4_quantize.cu is compiled with."""
    wide = int(dtype == torch.float32)
    return ("K", K), ("WIDE", wide), ("DECODE", int(decode)), ("STEPS", steps), ("THREADS", THREADS)


def row_amax(x: Tensor) -> Tensor:
    rows = rows_of("nvfp4.row_amax", x)
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
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
    outer, blocks = torch.empty_like(amax), rows.numel() // nvfp4.BLOCK
    order, slots = (None, 0) if plan is None else (plan.order_R, plan.rows_TK.shape[1])
    steps = 1 if decode or blocks < MANY else 4
    with on(home):
        cuda.launch(
            cuda.kernel(home, SOURCE, "quantize", defines(K, x.dtype, decode, steps)),
            cdiv(blocks, THREADS * steps), THREADS, 0,
            (aligned(rows), amax, order, codes, scales, outer, decoded, device.faults(home), len(rows), group, slots,
             device.slot(fault), device.slot("nvfp4.amax")),
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
