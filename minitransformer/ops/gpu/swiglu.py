"""swiglu/1 on Hopper, forward, with row maxima, and backward (ops/swiglu.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.scalar import amax_of, magnitude, sigmoid_32, silu_32
from minitransformer.ops.gpu.tiles import in_turn, to_bf16


@quick
@triton.jit(do_not_specialize=["R"])
def swiglu_kernel(x_ptr, out_ptr, R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [R, 2F], out [R, F] BF16; one tile a program."""
    in_turn()
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (r < R) & (f < F)
    gate = tl.load(x_ptr + r * (2 * F) + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + r * (2 * F) + F + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + r * F + f, to_bf16(silu_32(gate) * up), mask=inside)


@quick
@triton.jit(do_not_specialize=["R"])
def amax_kernel(x_ptr, out_ptr, amax_ptr, R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [R, 2F] FP32, out [R, F] BF16, amax [R] FP32; whole rows a program."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r, top = row[:, None], tl.zeros((ROWS, COLUMNS), tl.int32)
    for f0 in range(0, F, COLUMNS):
        f = f0 + tl.arange(0, COLUMNS)[None, :]
        inside = (r < R) & (f < F)
        gate = tl.load(x_ptr + r * (2 * F) + f, mask=inside, other=0.0)
        up = tl.load(x_ptr + r * (2 * F) + F + f, mask=inside, other=0.0)
        h = to_bf16(silu_32(gate) * up)
        top = tl.maximum(top, magnitude(h))
        tl.store(out_ptr + r * F + f, h, mask=inside)
    tl.store(amax_ptr + row, amax_of(top), mask=row < R)


@quick
@triton.jit(do_not_specialize=["R"])
def backward_kernel(dh_ptr, x_ptr, dx_ptr, R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dh [R, F] BF16, x [R, 2F] BF16 or FP32, dx [R, 2F] BF16."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (r < R) & (f < F)
    at = r * (2 * F) + f
    gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh_ptr + r * F + f, mask=inside, other=0.0).to(tl.float32)
    s, y = sigmoid_32(gate), silu_32(gate)
    slope = s + y * (1.0 - s)
    tl.store(dx_ptr + at, to_bf16((d * up) * slope), mask=inside)
    tl.store(dx_ptr + at + F, to_bf16(d * y), mask=inside)


COLUMNS = 256
WHOLE = 1024  # columns with row maxima, for few rows: many warps read a row at once


def rows_of(R: int, most: int) -> int:
    """Rows a program: with few rows in all, more programs finish sooner."""
    return most if R >= 4096 else most // 4


def forward(gate_up_R2F: Tensor) -> Tensor:
    home, R, F = gate_up_R2F.device, gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    (x,) = device.take("swiglu", home, torch.bfloat16, gate_up_R2F)
    out = torch.empty(R, F, dtype=torch.bfloat16, device=home)
    if out.numel():
        with on(home):
            block = rows_of(R, 8)
            grid = cdiv(R, block), cdiv(F, COLUMNS)
            swiglu_kernel[grid](x, out, R, F, block, COLUMNS, num_warps=4, **device.ROWS, **device.EARLY)
    return out


def forward_amax(gate_up_R2F: Tensor) -> tuple[Tensor, Tensor]:
    home, R, F = gate_up_R2F.device, gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    (x,) = device.take("swiglu_amax", home, torch.float32, gate_up_R2F)
    out, amax = torch.empty(R, F, dtype=torch.bfloat16, device=home), torch.empty(R, dtype=torch.float32, device=home)
    if F == 0:
        amax.zero_()
    if out.numel():
        with on(home):
            block, columns, warps = (4, COLUMNS, 4) if R >= 1024 else (1, WHOLE, 8 if R > 128 else 16)
            grid = (cdiv(R, block),)
            amax_kernel[grid](
                x, out, amax, R, F, block, columns, num_warps=warps, **device.ROWS, **device.EARLY
            )
    return out, amax


def backward(dh_RF: Tensor, gate_up_R2F: Tensor) -> Tensor:
    home, R, F = dh_RF.device, gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    (dh,) = device.take("swiglu", home, torch.bfloat16, dh_RF)
    (x,) = device.take("swiglu", home, gate_up_R2F.dtype, gate_up_R2F)
    dx = torch.empty(R, 2 * F, dtype=torch.bfloat16, device=home)
    if dx.numel():
        with on(home):
            grid = cdiv(R, 8), cdiv(F, COLUMNS)
            backward_kernel[grid](dh, x, dx, R, F, 8, COLUMNS, num_warps=4, **device.ROWS)
    return dx
