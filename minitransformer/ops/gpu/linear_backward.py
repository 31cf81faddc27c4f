"""linear/1 on Hopper, its gradients (ops/linear.py has the spec): dX = dY W, a chain over n, and dW = dY^T X, over t.

Operands are read where they lie: the one whose chain runs down its rows goes to the tensor core transposed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device, pingpong
from minitransformer.ops.gpu.launch import Window, cdiv, on, quick
from minitransformer.ops.gpu.tiles import Tile, rows_tile, tile_of, to_bf16


@triton.jit
def _elements(i, j, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows, cols = i * TILE_M + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    return rows[:, None].to(tl.int64) * N + cols[None, :], (rows[:, None] < M) & (cols[None, :] < N)


@quick
@triton.jit(do_not_specialize=["M", "DEPTH"])
def product_kernel(
    a, b, y_ptr, start_ptr, M, N, DEPTH, a_stride, b_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PROGRAMS: tl.constexpr, TURNED: tl.constexpr,
    TMA: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """y [M, N] BF16 or FP32 = chain of a [M, DEPTH], or [DEPTH, M] if TURNED, times b [DEPTH, N]; a persistent grid.

    a and b are descriptors (TMA) or pointers to rows of a_stride, b_stride elements; both give zeros outside.
    STARTED: from start [M, N] FP32, which may be y.
    """
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=TMA and not STARTED):
        i, j = tile_of(tile, tiles_m, tiles_n, 8)
        if STARTED:
            at, inside = _elements(i, j, M, N, TILE_M, TILE_N)
            acc = tl.load(start_ptr + at, mask=inside, other=0.0)
        else:
            acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k0 in range(0, DEPTH, TILE_K):
            right = rows_tile(b, k0, j * TILE_N, DEPTH, N, b_stride, TILE_K, TILE_N, TMA)
            if TURNED:
                left = tl.trans(rows_tile(a, k0, i * TILE_M, DEPTH, M, a_stride, TILE_K, TILE_M, TMA))
            else:
                left = rows_tile(a, i * TILE_M, k0, M, DEPTH, a_stride, TILE_M, TILE_K, TMA)
            acc = tl.dot(left, right, acc)
        at, inside = _elements(i, j, M, N, TILE_M, TILE_N)
        tl.store(y_ptr + at, to_bf16(acc) if y_ptr.dtype.element_ty == tl.bfloat16 else acc, mask=inside)


CANDIDATES = (
    Tile(128, 128, 64, 4, 6, pingpong=True), Tile(64, 128, 64, 4, 4, tma=True), Tile(64, 64, 128, 4, 6, tma=True),
    Tile(64, 32, 256, 4, 4, tma=True),
)  # fmt: skip
PLAIN = Tile(64, 64, 32, 4, 3)  # where a row is no multiple of 16 bytes, which the copy engine refuses


def choose(M: int, N: int, programs: int) -> Tile:
    """The largest tile that still gives nearly every multiprocessor work; every choice gives the same bits."""
    for tile in CANDIDATES[:3]:
        if cdiv(M, tile.m) * cdiv(N, tile.n) >= 0.9 * programs and (M > tile.m // 2 and N > tile.n // 2):
            return tile
    return CANDIDATES[3]


def product(
    a: Tensor, b: Tensor, turned: bool, tile: Tile | None = None, y: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """BF16 of the chain a b, or a^T b if turned; a and b contiguous BF16 matrices on one GPU.

    y: where it goes, BF16 or FP32, which is not rounded; start: FP32 accumulators to begin from, perhaps y.
    """
    (M, depth), N = a.shape[:: -1 if turned else 1], b.shape[1]
    if y is None:
        y = torch.empty(M, N, dtype=torch.bfloat16, device=a.device)
    if y.numel() == 0 or depth == 0:
        return y.zero_()
    programs = device.multiprocessors(a.device)
    copied = a.shape[1] % 8 == 0 and N % 8 == 0
    tile = (tile or choose(M, N, programs)) if copied else PLAIN
    if tile.pingpong:
        pingpong.product(a, b, y, tile, turned, deep=True, start=start)
        return y
    count = min(programs, cdiv(M, tile.m) * cdiv(N, tile.n))
    left, right = a, b
    if copied:
        left = Window(a, (tile.k, tile.m) if turned else (tile.m, tile.k))
        right = Window(b, (tile.k, tile.n))
    with on(a.device):
        product_kernel[(count,)](
            left, right, y, y if start is None else start, M, N, depth, a.shape[1], N,
            tile.m, tile.n, tile.k, count, turned, copied, start is not None,
            num_warps=tile.warps, num_stages=tile.stages, **device.STRICT,
        )  # fmt: skip
    return y


def backward(
    dy_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, need_dx: bool, need_dw: bool, into: Tensor | None = None
) -> tuple:
    """dY [T, N] BF16 or FP32 on one Hopper GPU -> (dX [T, K] BF16 or None, dW [N, K] BF16 or None)."""
    home = x_TK.device
    x, w = device.take("linear", home, torch.bfloat16, x_TK, weight_NK)
    (dy,) = device.take("linear", home, dy_TN.dtype, dy_TN)
    dy = dy.to(torch.bfloat16)  # nearest even; a NaN's bits are lost in the chain
    return product(dy, w, False) if need_dx else None, product(dy, x, True, y=into) if need_dw else None


def continue_dx(dy_TN: Tensor, weight_NK: Tensor, acc_TK: Tensor | None, last: bool) -> Tensor:
    """dY [T, N] BF16, W [N, K] -> FP32 [T, K], in acc itself where it is given, or BF16 if last (ops/linear.py)."""
    dy, w = device.take("linear", dy_TN.device, torch.bfloat16, dy_TN, weight_NK)
    y = None if last else acc_TK
    if y is None:
        dtype = torch.bfloat16 if last else torch.float32
        y = torch.empty(dy.shape[0], w.shape[1], dtype=dtype, device=dy.device)
    return product(dy, w, False, y=y, start=acc_TK)
