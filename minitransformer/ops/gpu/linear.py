"""linear/2 on Hopper: y = x W^T by the tensor-core chain (ops/linear.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import choice, device, few_rows, library, pingpong
from minitransformer.ops.gpu.launch import Window, cdiv, on, quick
from minitransformer.ops.gpu.tiles import Tile, chain_tile, fetch, in_turn, tile_of
from minitransformer.tuning.table import Product


@triton.jit
def _store(y_ptr, acc, rows, cols, M, N, SWAP: tl.constexpr):
    """rows and cols of the tile within the matrix; BF16 rounds once, FP32 takes the accumulator as it is."""
    if SWAP:
        at, inside = rows[None, :].to(tl.int64) * N + cols[:, None], (rows[None, :] < M) & (cols[:, None] < N)
    else:
        at, inside = rows[:, None].to(tl.int64) * N + cols[None, :], (rows[:, None] < M) & (cols[None, :] < N)
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + at, acc.to(tl.bfloat16), mask=inside)  # a NaN is 0x7fff, the hardware's
    else:
        tl.store(y_ptr + at, acc, mask=inside)


@quick
@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr, w_ptr, y_ptr, M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    FETCH: tl.constexpr,
):  # fmt: skip
    """One tile a program; x [M, K], w [N, K] BF16 -> y [M, N]. FETCH: the weight is asked for before x is there."""
    i, j = tile_of(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), 8)
    rows, cols = i * TILE_M + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    # Rows past the end read another and are not stored: no mask in the loop. Each another one, or all programs would
    # ask the cache for one row's lines.
    x_rows, w_rows = (rows % M).to(tl.int64), tl.where(cols < N, cols, 0).to(tl.int64)
    if FETCH:
        fetch(w_ptr, w_rows, K)
    in_turn()
    acc = chain_tile(x_ptr, x_rows, w_ptr, w_rows, K, TILE_M, TILE_N, TILE_K, SWAP, EVEN)
    _store(y_ptr, acc, rows, cols, M, N, SWAP)


@quick
@triton.jit(do_not_specialize=["M"])
def linear_tma_kernel(
    x_desc, w_desc, y_ptr, M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A persistent grid of PROGRAMS; the copy engine fills what lies outside the matrices with zeros.

    That is slow, so the last tile of rows begins early enough to be full, and some rows are computed twice.
    """
    in_turn()
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        i, j = tile_of(tile, tiles_m, tiles_n, 8)
        row = tl.minimum(i * TILE_M, tl.maximum(M - TILE_M, 0))
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k0 in range(0, K, TILE_K):
            x, w = x_desc.load([row, k0]), w_desc.load([j * TILE_N, k0])
            acc = tl.dot(x, tl.trans(w), acc)
        rows = row + tl.arange(0, TILE_M)
        if y_ptr.dtype.element_ty == tl.float32:
            # Two halves: a whole FP32 tile on its way to memory does not fit beside the loads of the next.
            left, right = tl.split(tl.permute(tl.reshape(acc, (TILE_M, 2, TILE_N // 2)), (0, 2, 1)))
            cols = j * TILE_N + tl.arange(0, TILE_N // 2)
            _store(y_ptr, left, rows, cols, M, N, False)
            _store(y_ptr, right, rows, cols + TILE_N // 2, M, N, False)
        else:
            _store(y_ptr, acc, rows, j * TILE_N + tl.arange(0, TILE_N), M, N, False)


# Few tokens: the weight streams through once, so many narrow tiles. Many: large tiles and the copy engine.
CANDIDATES = (
    Tile(16, 16, 256, 4, 5), Tile(16, 16, 512, 4, 3), Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 4, 5),
    Tile(16, 128, 128, 4, 4), Tile(16, 64, 128, 4, 5, swap=True), Tile(16, 128, 128, 4, 4, swap=True),
    Tile(32, 64, 128, 4, 5, swap=True), Tile(64, 32, 128, 4, 4), Tile(64, 64, 64, 4, 6),
    Tile(16, 32, 256, 4, 4, tma=True), Tile(64, 16, 256, 4, 4, tma=True), Tile(64, 32, 128, 4, 6, tma=True),
    Tile(64, 64, 128, 4, 4, tma=True), Tile(64, 128, 64, 4, 5, tma=True), Tile(64, 256, 64, 4, 4, tma=True),
    Tile(128, 64, 64, 4, 6, tma=True), Tile(128, 128, 64, 4, 4, tma=True), Tile(128, 128, 64, 8, 4, tma=True),
    Tile(128, 256, 64, 8, 3, tma=True), Tile(256, 128, 64, 8, 3, tma=True),
    Tile(64, 128, 64, 4, 8, pingpong=True), Tile(64, 256, 64, 4, 4, pingpong=True),
    Tile(128, 128, 64, 4, 6, pingpong=True), Tile(128, 128, 128, 4, 3, pingpong=True),
    Tile(8, 16, 512, 3, 1, whole=True), Tile(8, 16, 1024, 3, 1, whole=True), Tile(8, 16, 2048, 3, 1, whole=True),
)  # fmt: skip
REFERENCE = Tile(64, 64, 64, 4, 6)  # plain loads, which take any K: what other candidates are compared with


def fits(tile: Tile, M: int, N: int, K: int, fewest: int | None = None) -> bool:
    """Whether a tile is worth a try (no padding for the most part, no crowd of small ones), and the engine reads K.

    fewest: rows that it would have to serve too (default M); the copy engine is slow where a tile has more.
    """
    if (tile.tma or tile.pingpong) and (K % 8 or tile.m > (M if fewest is None else fewest)):
        return False
    if tile.whole:
        return M <= tile.m and few_rows.fits(tile, M, K)
    tiles = -(-M // tile.m) * -(-N // tile.n)
    return tile.m <= max(16, 2 * M) and (tiles <= 1200 or tile.m * tile.n >= 8192 or M <= tile.m)


# Measured on an H200 at the widths of Qwen3-30B-A3B. ONE_WAVE: the smallest tile that every multiprocessor takes at
# most once reads the weight with the most of them. Beyond one wave the larger tiles move fewer bytes.
ONE_WAVE = (
    Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 4, 5), Tile(64, 32, 128, 4, 4), Tile(64, 128, 64, 4, 5, tma=True),
    Tile(128, 256, 64, 8, 3, tma=True),
)  # fmt: skip
ONE_ROW = Tile(8, 16, 512, 3, 1, whole=True)  # where all blocks run at once


def choose(M: int, N: int, K: int, programs: int, aligned: bool = True) -> Tile:
    """The schedule for a shape; every choice gives the same bits. aligned: the operands begin at multiples of 16 bytes.

    Where the table has a row, that decides instead.
    """

    def waves(tile: Tile) -> float:
        return -(-M // tile.m) * -(-N // tile.n) / programs

    copy_engine = aligned and K % 8 == 0
    if M == 1 and aligned and few_rows.fits(ONE_ROW, M, K):
        blocks = few_rows.SHARED_LIMIT // few_rows.shared(ONE_ROW, M, K) * programs
        if N <= 16 * blocks:
            return ONE_ROW
    for tile in ONE_WAVE:
        if waves(tile) <= 1 and tile.n <= max(32, N) and (copy_engine or not tile.tma):
            return tile
    if not copy_engine:
        return Tile(64, 64, 64, 4, 6) if M > 16 else Tile(16, 128, 128, 4, 4)
    if M <= 64:
        return Tile(16, 128, 128, 4, 4) if M <= 16 else Tile(64, 256, 64, 4, 4, tma=True)
    wide, square = Tile(128, 256, 64, 8, 3, tma=True), Tile(128, 128, 64, 4, 4, tma=True)
    if N <= 128:
        return square
    if M >= 2048:
        return Tile(128, 128, 64, 4, 6, pingpong=True)

    def full(tile: Tile) -> float:  # share of the last wave's places that do work
        return waves(tile) / -(-waves(tile) // 1)

    return wide if full(wide) >= full(square) - 0.02 else square


def forward(
    x_TK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None
) -> Tensor:
    """x [T, K], W [N, K] BF16 on one Hopper GPU -> [T, N] BF16 or FP32. tile: a schedule instead of the chosen one.

    Without one, the table's (choice.py): a tile, or a library where it was proven; else `choose`.
    """
    home = x_TK.device
    x, w = device.take("linear", home, torch.bfloat16, x_TK, weight_NK)
    (M, K), N = x.shape, w.shape[0]
    if M * N == 0:
        return torch.empty(M, N, dtype=out_dtype, device=home)
    if tile is None:
        found = choice.of(home, Product("linear", 1, N, K, library.NAMES[out_dtype]), M)
        if found.library is not None and library.aligned(x, w):
            return library.DENSE[found.library](x, w.t(), out_dtype)
        tile = choice.tile(found, x, w)
    programs = device.multiprocessors(home)
    tile = tile or choose(M, N, K, programs, x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0)
    y = torch.empty(M, N, dtype=out_dtype, device=home)
    if tile.pingpong or tile.whole:
        (pingpong if tile.pingpong else few_rows).product(x, w, y, tile)
        return y
    count = cdiv(M, tile.m) * cdiv(N, tile.n)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **device.STRICT, **device.EARLY}
    with on(home):
        if tile.tma:
            x_desc, w_desc = Window(x, (tile.m, tile.k)), Window(w, (tile.n, tile.k))
            linear_tma_kernel[(min(programs, count),)](
                x_desc, w_desc, y, M, N, K, tile.m, tile.n, tile.k, programs, **options
            )
        else:
            # Few programs of few rows: all begin at once, and each asks for a weight that is its own.
            early = device.EARLY["launch_pdl"] and tile.m <= 16 and count <= 2 * programs
            linear_kernel[(count,)](
                x, w, y, M, N, K, tile.m, tile.n, tile.k, tile.swap, K % tile.k == 0, early, **options
            )
    return y
