"""rms_norm/1 on Hopper, forward and backward (ops/rms_norm.py has the spec): a row is read in chunks of 128 lanes."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.scalar import LANES, div, lane_tree
from minitransformer.ops.gpu.tiles import in_turn, to_bf16

LANES_SOURCE, SHORT_SOURCE = "norm_lanes.cu", "norm_short.cu"
SHORT_ROWS = 64  # of a block of threads


@triton.jit
def _load(x_ptr, residual_ptr, at, inside, RESIDUAL: tl.constexpr):
    """x, or the unrounded sum with the residual, FP32."""
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        v = v + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return v


@triton.jit
def _weight(w_ptr, d0, D: tl.constexpr, ROWS: tl.constexpr):
    """FP32 [ROWS, 128]: read once a row, from the L1 cache, so that it lies in registers as the rows do."""
    d = tl.broadcast_to(d0 + tl.arange(0, LANES)[None, :], (ROWS, LANES))
    return tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _mean(lanes, D: tl.constexpr, ROWS: tl.constexpr):
    """Of D elements, from their lanes [ROWS, 128] -> [ROWS]."""
    total = lane_tree(lanes, ROWS)
    if D & (D - 1) == 0:  # the same number, rounded the same way, without a division
        mean = total * (1.0 / D)
    else:
        mean = div(total, tl.full((ROWS,), D, tl.float32))
    return mean


@triton.jit
def _inverse_of(lanes, eps, D: tl.constexpr, ROWS: tl.constexpr):
    mean = _mean(lanes, D, ROWS)
    return div(tl.full((ROWS,), 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))[:, None]


@triton.jit
def _inverse(x_ptr, residual_ptr, row, valid, eps, D: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr):
    """1 / rms of ROWS rows [ROWS, 1]."""
    lane = tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for d0 in tl.static_range(0, D, LANES):
        inside = valid & (d0 + lane < D)
        v = _load(x_ptr, residual_ptr, row * D + d0 + lane, inside, RESIDUAL)
        lanes += v * v
    return _inverse_of(lanes, eps, D, ROWS)


@quick
@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, new_ptr, eps, T,
    D: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; x, residual, y, new residual [T, D], w [D] BF16. KEEP: a row stays in registers, w too.

    A load waits for the store before it, which might write what it reads; so w is read before anything is stored.
    """
    in_turn()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane, valid = tl.arange(0, LANES)[None, :], row < T
    kept, weights, lanes = (), (), tl.zeros((ROWS, LANES), tl.float32)
    if KEEP:
        for d0 in tl.static_range(0, D, LANES):
            weights = weights + (_weight(w_ptr, d0, D, ROWS),)
    for d0 in tl.static_range(0, D, LANES):
        v = _load(x_ptr, residual_ptr, row * D + d0 + lane, valid & (d0 + lane < D), RESIDUAL)
        lanes += v * v
        if KEEP:
            kept = kept + (v,)
    inverse = _inverse_of(lanes, eps, D, ROWS)
    for d0 in tl.static_range(0, D, LANES):
        at, inside = row * D + d0 + lane, valid & (d0 + lane < D)
        if KEEP:
            v, w = kept[d0 // LANES], weights[d0 // LANES]
        else:  # a second read, from the cache
            v, w = _load(x_ptr, residual_ptr, at, inside, RESIDUAL), _weight(w_ptr, d0, D, ROWS)
        tl.store(y_ptr + at, to_bf16((v * inverse) * w), mask=inside)
        if RESIDUAL:
            tl.store(new_ptr + at, to_bf16(v), mask=inside)


@quick
@triton.jit(do_not_specialize=["T"])
def dx_kernel(
    dy_ptr, dr_ptr, x_ptr, residual_ptr, w_ptr, dx_ptr, inverse_ptr, eps, T,
    D: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane, valid = tl.arange(0, LANES)[None, :], row < T
    inverse = _inverse(x_ptr, residual_ptr, row, valid, eps, D, ROWS, RESIDUAL)
    tl.store(inverse_ptr + row, inverse, mask=valid)
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for d0 in tl.static_range(0, D, LANES):
        at, inside = row * D + d0 + lane, valid & (d0 + lane < D)
        v = _load(x_ptr, residual_ptr, at, inside, RESIDUAL)
        w = _weight(w_ptr, d0, D, ROWS)
        g = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * w
        # Lanes past the end of a row add nothing, not even to a -0.
        lanes = tl.where(inside, lanes + g * (v * inverse), lanes)
    c = _mean(lanes, D, ROWS)[:, None]
    for d0 in tl.static_range(0, D, LANES):
        at, inside = row * D + d0 + lane, valid & (d0 + lane < D)
        v = _load(x_ptr, residual_ptr, at, inside, RESIDUAL)
        w = _weight(w_ptr, d0, D, ROWS)
        g = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * w
        dv = inverse * (g - (v * inverse) * c)
        if RESIDUAL:
            dv = dv + tl.load(dr_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, to_bf16(dv), mask=inside)


@quick
@triton.jit
def dw_kernel(lanes_ptr, dw_ptr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The halving tree over the lanes of each column."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, LANES)[None, :] * D + column[:, None]
    lanes = tl.load(lanes_ptr + at, mask=(column < D)[:, None], other=0.0)
    tl.store(dw_ptr + column, to_bf16(lane_tree(lanes, COLUMNS)), mask=column < D)


def _floor_power(n: int) -> int:
    """The largest power of two up to n, 1 or more: tl.arange takes no other number."""
    return 1 << n.bit_length() - 1


def rows_of(T: int, D: int) -> int:
    """Rows a program: one a warp for few rows; else about 4,096 elements, as one head's norm has many short rows."""
    return 4 if T < 2048 else _floor_power(min(32, max(8, 4096 // max(1, D))))


def lanes_defines(D: int, residual: bool, aligned: bool = True) -> tuple[tuple[str, int], ...]:
    """What norm_lanes.cu is compiled with."""
    return ("D", D), ("RESIDUAL", int(residual)), ("ALIGNED", int(aligned and D % 8 == 0))


def short(D: int) -> bool:
    """Whether norm_short.cu takes rows of this length."""
    return D in (16, 32, 64, 128)


def float_bits(x: float) -> int:
    """The bits of an FP32 number as the int that a CUDA kernel takes."""
    return struct.unpack("i", struct.pack("f", x))[0]


def schedule_of(T: int, D: int, residual: bool = False) -> tuple[int, bool, int]:
    """(rows a program, whether they stay in registers, warps) of the forward pass. Few rows wait: each has its own."""
    if D < 512 and T <= 1 << 16:
        return 8, True, 4
    if 512 <= D <= 4096 and T < 2048:
        return 1, True, 2 if residual or T > 128 else 4
    return rows_of(T, D), False, 4


def forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    home, D = x.device, x.shape[-1]
    rows, w = device.take("rms_norm", home, torch.bfloat16, x, weight_D)
    (old,) = (rows,) if residual is None else device.take("rms_norm", home, torch.bfloat16, residual)
    y = torch.empty_like(rows)
    new = None if residual is None else torch.empty_like(rows)
    T = y.numel() // max(1, D)
    if T:
        block, keep, warps = schedule_of(T, D, residual is not None)
        with on(home):
            forward_kernel[(cdiv(T, block),)](
                rows, old, w, y, y if new is None else new, eps, T, D, block, residual is not None, keep,
                num_warps=warps, **device.ROWS, **device.EARLY,
            )  # fmt: skip
    return y, new


def backward(dy, dr, x, residual, weight_D, eps, need_dw=True) -> tuple[Tensor, Tensor | None]:
    home, D = x.device, x.shape[-1]
    dy, x, w = device.take("rms_norm", home, torch.bfloat16, dy, x, weight_D)
    with_residual = residual is not None
    dr, old = device.take("rms_norm", home, torch.bfloat16, dr, residual) if with_residual else (dy, x)
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    T = dx.numel() // max(1, D)
    if T:
        # More than 8 short rows spill: Triton spreads the layout of `inverse`, a whole row a thread, over everything.
        block, inverse = rows_of(T, 512), torch.empty(T, dtype=torch.float32, device=home)
        with on(home):
            if not with_residual and short(D) and all(t.data_ptr() % 4 == 0 for t in (dy, x, w)):
                kernel = cuda.kernel(home, SHORT_SOURCE, "norm_short", (("D", D),))
                cuda.launch(kernel, cdiv(T, SHORT_ROWS), 128, 0, (dy, x, w, dx, inverse, T, float_bits(eps)))
            else:
                dx_kernel[(cdiv(T, block),)](
                    dy, dr, x, old, w, dx, inverse, eps, T, D, block, with_residual, num_warps=4, **device.ROWS
                )
            if need_dw:
                lanes = torch.empty(LANES.value, D, dtype=torch.float32, device=home)
                arguments = dy, x, old, inverse, lanes, T
                how = lanes_defines(D, with_residual, all(t.data_ptr() % 16 == 0 for t in (dy, x, old)))
                kernel = cuda.kernel(home, LANES_SOURCE, "norm_lanes", how)
                cuda.launch(kernel, LANES.value * cdiv(D, 64), 32, 0, arguments)
                dw_kernel[(cdiv(D, 16),)](lanes, dw, D, 16, num_warps=4, **device.ROWS)
    return dx, dw if need_dw else None
