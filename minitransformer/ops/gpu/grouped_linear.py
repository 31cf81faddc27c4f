"""grouped_linear/2 on Hopper: each expert's rows times that expert's weight (ops/grouped_linear.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import choice, device, library, pingpong
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.pingpong import PLAIN, SCALED, WEIGHTED
from minitransformer.ops.gpu.tiles import Tile, chain_tile, in_turn, tile_of, to_bf16
from minitransformer.tuning.table import Product


@triton.jit
def _expert_of(tile, offsets_ptr, experts, TILE_M: tl.constexpr, PADDED: tl.constexpr):
    """(expert, its first row of this tile, the expert's end) for the tile'th tile of rows; expert = experts: none."""
    e = tl.arange(0, PADDED)
    begin = tl.load(offsets_ptr + e, mask=e < experts, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0)
    tiles = (end - begin + TILE_M - 1) // TILE_M
    # Integers: the experts whose tiles all come before this one.
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (e < experts)).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    mine = e == expert
    return expert, tl.sum(tl.where(mine, begin, 0), 0) + (tile - before) * TILE_M, tl.sum(tl.where(mine, end, 0), 0)


@quick
@triton.jit(do_not_specialize=["tiles_m", "experts"])
def grouped_kernel(
    x_ptr, w_ptr, y_ptr, offsets_ptr, weights_ptr, order_ptr, tiles_m, experts, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    PADDED: tl.constexpr, END: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x [R, K], w [E, N, K] BF16 -> y [R, N] BF16 or FP32; tiles_m is a bound on the number of tiles of rows.

    END: as in pingpong.py, WEIGHTED by weights[order[row]] or SCALED by fl(weights[row] * order[expert, column]).
    """
    in_turn()
    i, j = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, TILE_N), GROUP)
    expert, first, end = _expert_of(i, offsets_ptr, experts, TILE_M, PADDED)
    if expert >= experts:
        return
    rows, cols = first + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    # Rows and columns past the end read a valid one and are not stored.
    x_rows, w_rows = tl.where(rows < end, rows, first).to(tl.int64), tl.where(cols < N, cols, 0)
    w_rows = w_rows + expert.to(tl.int64) * N
    acc = chain_tile(x_ptr, x_rows, w_ptr, w_rows, K, TILE_M, TILE_N, TILE_K, SWAP, EVEN)
    if END == WEIGHTED:
        scale = tl.load(weights_ptr + tl.load(order_ptr + x_rows))
        acc = acc * (scale[None, :] if SWAP else scale[:, None])  # fl: the routing weight in FP32
    if END == SCALED:
        scale, outer = tl.load(weights_ptr + x_rows), tl.load(order_ptr + w_rows)
        acc = acc * (scale[None, :] * outer[:, None] if SWAP else scale[:, None] * outer[None, :])
    if SWAP:
        at, inside = x_rows[None, :] * N + cols[:, None], (rows[None, :] < end) & (cols[:, None] < N)
    else:
        at, inside = x_rows[:, None] * N + cols[None, :], (rows[:, None] < end) & (cols[None, :] < N)
    if END == SCALED and y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + at, to_bf16(acc), mask=inside)
    else:
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)  # BF16: a NaN is 0x7fff, the hardware's


CANDIDATES = (
    Tile(16, 128, 64, 4, 5), Tile(16, 128, 128, 4, 4), Tile(16, 64, 128, 4, 5, swap=True),
    Tile(16, 128, 64, 4, 5, swap=True), Tile(16, 128, 128, 4, 4, swap=True), Tile(32, 128, 64, 4, 5),
    Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3),
    Tile(64, 128, 64, 4, 6, pingpong=True), Tile(64, 256, 64, 4, 4, pingpong=True),
    Tile(128, 128, 64, 4, 6, pingpong=True), Tile(128, 128, 128, 4, 3, pingpong=True),
)  # fmt: skip
REFERENCE = CANDIDATES[0]  # plain loads, which take any K: what other candidates are compared with


def fits(tile: Tile, rows: int, experts: int) -> bool:
    """Whether a tile is worth a try where an expert has rows / experts rows on average."""
    return tile.m <= max(16, 4 * rows // experts) and rows <= 64 * tile.m * experts


def choose(rows: int, experts: int, N: int) -> Tile:
    """The schedule for a shape; every choice gives the same bits. Where the table has a row, that decides instead."""
    average = rows / experts
    if average <= 8:
        return Tile(16, 128, 64, 4, 5, swap=True)
    if average <= 32:
        return Tile(32, 128, 64, 4, 5)
    if average <= 64 or N < 256:
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 3)


def tiled(
    x: Tensor, w: Tensor, y: Tensor, bounds: Tensor, weights: Tensor, order: Tensor, tile: Tile, end: int
) -> None:
    """Fills y [R, N] by grouped_kernel, whose docstring says what weights and order are; contiguous, on one GPU."""
    (R, K), (E, N, _) = x.shape, w.shape
    # Every expert may end with a tile that is not full; the programs past the last tile return at once.
    tiles_m = (R + min(E, R) * (tile.m - 1)) // tile.m
    with on(x.device):
        grouped_kernel[(tiles_m * cdiv(N, tile.n),)](
            x, w, y, bounds, weights, order, tiles_m, E, N, K,
            tile.m, tile.n, tile.k, tile.swap, K % tile.k == 0, next_power_of_2(E), end, 4,
            num_warps=tile.warps, num_stages=tile.stages, **device.STRICT, **device.EARLY,
        )  # fmt: skip


def forward(
    x_RK: Tensor, weight_ENK: Tensor, plan: Plan, weights_TK: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """x [R, K], W [E, N, K] BF16 and a plan on one Hopper GPU -> [R, N] BF16, scaled by routing weights if given.

    tile: a schedule instead of the table's (choice.py) or, without a row there, of `choose`.
    """
    home = x_RK.device
    x, w = device.take("grouped_linear", home, torch.bfloat16, x_RK, weight_ENK)
    order, bounds = device.take("grouped_linear", home, torch.int64, plan.order_R, plan.bounds_E1)
    scale = x if weights_TK is None else device.take("grouped_linear", home, torch.float32, weights_TK)[0]
    (R, K), (E, N, _) = x.shape, w.shape
    y = torch.empty(R, N, dtype=torch.bfloat16, device=home)
    if y.numel() == 0:
        return y
    if tile is None:
        found = choice.of(home, Product(f"grouped_linear{'' if weights_TK is None else ' weighted'}", E, N, K), R)
        if found.library is not None and library.aligned(x, w):
            return library.GROUPED[found.library](x, w.transpose(1, 2), bounds)
        tile = choice.tile(found, x, w)
    tile = tile or choose(R, E, N)
    if tile.pingpong and K % 8 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0:
        pingpong.grouped(x, w, y, bounds, None if weights_TK is None else scale, order, tile)
        return y
    tiled(x, w, y, bounds, scale, order, tile, PLAIN.value if weights_TK is None else WEIGHTED.value)
    return y
