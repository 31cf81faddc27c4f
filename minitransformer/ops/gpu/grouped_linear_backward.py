"""grouped_linear/1 on Hopper, its gradients (ops/grouped_linear.py has the spec).

dX: a tile of one expert's rows, a chain over n. dW: a tile of one expert's weight, a chain over that expert's rows,
which one program walks from the first to the last. Nothing is added by atomics.
With the backward `mxfp8` the same kernels run on operands that were rounded before (mxfp8.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import device, mxfp8, pair_product, pingpong_weights
from minitransformer.ops.gpu.grouped_linear import _expert_of
from minitransformer.ops.gpu.launch import Window, cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LANES, lane_tree
from minitransformer.ops.gpu.tiles import Tile, rows_tile, tile_of, to_bf16


@triton.jit
def _chain(
    dy, w, first, end, expert, col, N, K, M: tl.constexpr, C: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """FP32 [M, C]: rows of dY from `first` on times columns of that expert's W [N, K]."""
    acc = tl.zeros((M, C), tl.float32)
    for n0 in range(0, N, DEPTH):
        left = rows_tile(dy, first, n0, end, N, N, M, DEPTH, TMA)
        if TMA:
            right = tl.reshape(w.load([expert, n0, col]), (DEPTH, C))
        else:
            right = rows_tile(w + expert.to(tl.int64) * N * K, n0, col, N, K, K, DEPTH, C, False)
        acc = tl.dot(left, right, acc)
    return acc


@quick
@triton.jit(do_not_specialize=["tiles_m", "experts"])
def dx_kernel(
    dy, w, dx_ptr, offsets_ptr, tiles_m, experts, N, K,
    TILE_M: tl.constexpr, TILE_C: tl.constexpr, TILE_N: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dY [R, N], W [E, N, K] -> dX [R, K]; tiles_m is a bound on the number of tiles of rows."""
    i, j = tile_of(tl.program_id(0), tiles_m, tl.cdiv(K, TILE_C), 4)
    expert, first, end = _expert_of(i, offsets_ptr, experts, TILE_M, PADDED)
    if expert >= experts:
        return
    first, end = first.to(tl.int32), end.to(tl.int32)
    acc = _chain(dy, w, first, end, expert, j * TILE_C, N, K, TILE_M, TILE_C, TILE_N, TMA)
    rows, cols = first + tl.arange(0, TILE_M), j * TILE_C + tl.arange(0, TILE_C)
    inside = (rows < end)[:, None] & (cols < K)[None, :]
    tl.store(dx_ptr + rows[:, None].to(tl.int64) * K + cols[None, :], to_bf16(acc), mask=inside)


@quick
@triton.jit(do_not_specialize=["tiles_m", "experts"])
def weighted_dx_kernel(
    dy, w, x_ptr, weights_ptr, order_ptr, dx_ptr, dots_ptr, offsets_ptr, tiles_m, experts, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dx_kernel with routing weights, and their own gradients: the lane sum runs along a row, 128 columns at a time."""
    expert, first, end = _expert_of(tl.program_id(0), offsets_ptr, experts, TILE_M, PADDED)
    if expert >= experts:
        return
    first, end = first.to(tl.int32), end.to(tl.int32)
    rows, lane = first + tl.arange(0, TILE_M), tl.arange(0, LANES)
    slot = tl.load(order_ptr + rows, mask=rows < end, other=0)
    weight = tl.load(weights_ptr + slot, mask=rows < end, other=0.0)
    lanes = tl.zeros((TILE_M, LANES), tl.float32)
    for col in range(0, K, LANES):
        g = _chain(dy, w, first, end, expert, col, N, K, TILE_M, LANES, TILE_N, TMA)
        at, inside = rows[:, None].to(tl.int64) * K + col + lane[None, :], (rows < end)[:, None] & (col + lane < K)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        lanes = tl.where(inside, lanes + x * g, lanes)  # lanes past a row's end add nothing
        tl.store(dx_ptr + at, to_bf16(g * weight[:, None]), mask=inside)
    tl.store(dots_ptr + slot, lane_tree(lanes, TILE_M), mask=rows < end)


@quick
@triton.jit(do_not_specialize=["experts"])
def dw_kernel(
    dy_ptr, x_ptr, dw_ptr, offsets_ptr, experts, N, K,
    TILE_N: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Program (tile of W [N, K], expert): dW = dY^T X over the expert's rows; +0 if it has none."""
    expert = tl.program_id(1)
    i, j = tile_of(tl.program_id(0), tl.cdiv(N, TILE_N), tl.cdiv(K, TILE_C), 8)
    begin = tl.load(offsets_ptr + expert).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    acc = tl.zeros((TILE_N, TILE_C), tl.float32)
    for r in range(begin, end, TILE_R):  # rows of the next expert are not read: they may hold a NaN
        left = rows_tile(dy_ptr, r, i * TILE_N, end, N, N, TILE_R, TILE_N, False)
        right = rows_tile(x_ptr, r, j * TILE_C, end, K, K, TILE_R, TILE_C, False)
        acc = tl.dot(tl.trans(left), right, acc)
    rows, cols = i * TILE_N + tl.arange(0, TILE_N), j * TILE_C + tl.arange(0, TILE_C)
    at = expert.to(tl.int64) * N * K + rows[:, None] * K + cols[None, :]
    tl.store(dw_ptr + at, to_bf16(acc), mask=(rows < N)[:, None] & (cols < K)[None, :])


@quick
@triton.jit(do_not_specialize=["R"])
def scale_kernel(y_ptr, weights_ptr, order_ptr, out_ptr, R, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[r, n] = bf16(fl(y[r, n] * w[r]))."""
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = row[:, None].to(tl.int64) * N + n[None, :], (row < R)[:, None] & (n < N)[None, :]
    weight = tl.load(weights_ptr + tl.load(order_ptr + row, mask=row < R, other=0), mask=row < R, other=0.0)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, to_bf16(y * weight[:, None]), mask=inside)


DX_CANDIDATES = (
    Tile(16, 128, 64, 4, 4, tma=True), Tile(64, 128, 64, 4, 4, tma=True), pair_product.TILE,
)  # fmt: skip
WEIGHTED_CANDIDATES = DX_CANDIDATES  # the last where pair_product fits
DW = Tile(128, 128, 64, 4, 6, pingpong=True)
PLAIN = Tile(64, 64, 32, 4, 3)  # where a row is no multiple of 16 bytes, which the copy engine refuses


def choose(rows: int, experts: int, N: int, K: int) -> tuple[Tile, Tile, Tile]:
    """(dX, dX with routing weights, dW) for the average rows of an expert; the fastest on an H200."""
    size = 0 if rows <= 16 * experts else 1
    dx, weighted = size, size
    if rows > 48 * experts:
        dx = 2 if pair_product.fits(N, K) else size
        weighted = 2 if pair_product.weighted_fits(N, K) else size
    return DX_CANDIDATES[dx], WEIGHTED_CANDIDATES[weighted], DW


def _tiles(R: int, E: int, m: int) -> int:
    """Every expert may end with a tile that is not full; the programs past the last tile return at once."""
    return (R + min(E, R) * (m - 1)) // m


def _dx(dy, w, bounds, R, tile: Tile | None):
    (E, N, K), copied = w.shape, tile is not None
    tile = tile or PLAIN
    dx, tiles = torch.empty(R, K, dtype=torch.bfloat16, device=w.device), _tiles(R, E, tile.m)
    if tile.pair:
        pair_product.dx(dy, w, dx, bounds)
        return dx
    left = Window(dy, (tile.m, tile.k)) if copied else dy
    right = Window(w, (1, tile.k, tile.n)) if copied else w
    dx_kernel[(tiles * cdiv(K, tile.n),)](
        left, right, dx, bounds, tiles, E, N, K, tile.m, tile.n, tile.k, next_power_of_2(E), copied,
        num_warps=tile.warps, num_stages=tile.stages, **device.STRICT,
    )  # fmt: skip
    return dx


def _weighted_dx(dy, x, w, weights, order, bounds, R, tile: Tile | None):
    (E, N, K), copied = w.shape, tile is not None
    tile = tile or PLAIN
    dx, dots = torch.empty(R, K, dtype=torch.bfloat16, device=w.device), torch.empty_like(weights)
    if tile.pair:
        pair_product.weighted_dx(dy, w, dx, bounds, weights, order, x, dots)
        return dx, dots
    left = Window(dy, (tile.m, tile.k)) if copied else dy
    right = Window(w, (1, tile.k, LANES.value)) if copied else w
    tiles = _tiles(R, E, tile.m)
    weighted_dx_kernel[(tiles,)](
        left, right, x, weights, order, dx, dots, bounds, tiles, E, N, K, tile.m, tile.k, next_power_of_2(E),
        copied, num_warps=tile.warps, num_stages=tile.stages, **device.STRICT,
    )  # fmt: skip
    return dx, dots


def _dw(dy, x, w, bounds, tile: Tile | None):
    (E, N, K), dw = w.shape, torch.empty_like(w)
    if tile is not None:
        pingpong_weights.product(dy, x, dw, bounds, tile)
        return dw
    tile = PLAIN
    dw_kernel[(cdiv(N, tile.m) * cdiv(K, tile.n), E)](
        dy, x, dw, bounds, E, N, K, tile.m, tile.n, tile.k,
        num_warps=tile.warps, num_stages=tile.stages, **device.STRICT,
    )  # fmt: skip
    return dw


def backward(
    dy_RN: Tensor, x_RK: Tensor, weight_ENK: Tensor, plan: Plan, weights_TK: Tensor | None, need_dw: bool = True,
    tiles: tuple[Tile, Tile, Tile | None] | None = None, backward_format: str = "bf16",
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """BF16 on one Hopper GPU -> (dX [R, K] BF16, dW [E, N, K] BF16 or None, dweights [T, K] FP32 or None)."""
    home = x_RK.device
    dy, x, w = device.take("grouped_linear", home, torch.bfloat16, dy_RN, x_RK, weight_ENK)
    order, bounds = device.take("grouped_linear", home, torch.int64, plan.order_R, plan.bounds_E1)
    weights = None if weights_TK is None else device.take("grouped_linear", home, torch.float32, weights_TK)[0]
    (R, K), (E, N, _) = x.shape, w.shape
    if R == 0 or dy.numel() == 0:
        dots = None if weights is None else torch.zeros_like(weights)
        return torch.zeros_like(x), torch.zeros_like(w) if need_dw else None, dots
    copied = N % 8 == 0 and K % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (dy, x, w))
    tiles = tiles or choose(R, E, N, K)
    for_dx, for_weighted, for_dw = tiles if copied else (None, None, None)
    low = backward_format == "mxfp8"
    with on(home):
        left, right = dy, w
        if low:  # along n, which is W's second axis
            ends = torch.arange(0, E * N + 1, N, device=home)
            left, right = mxfp8.round_rows(dy), mxfp8.round_columns(w.view(E * N, K), ends).view(E, N, K)
        if weights is None:
            dx, dots, scaled = _dx(left, right, bounds, R, for_dx), None, dy
        else:
            dx, dots = _weighted_dx(left, x, right, weights, order, bounds, R, for_weighted)
            scaled = torch.empty_like(dy) if need_dw else dy
        if weights is not None and need_dw:
            columns = min(1024, next_power_of_2(N))
            grid = (cdiv(R, 4096 // columns), cdiv(N, columns))
            scale_kernel[grid](
                dy, weights, order, scaled, R, N, 4096 // columns, columns, num_warps=4, **device.ROWS
            )
        if not need_dw:
            return dx, None, dots
        if low:
            scaled, x = mxfp8.round_columns(scaled, bounds), mxfp8.round_columns(x, bounds)
        return dx, _dw(scaled, x, w, bounds, for_dw), dots
