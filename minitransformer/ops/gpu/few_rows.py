"""The product of few rows (few_rows.cu): 16 columns a block, their whole weight in shared memory."""

import torch
from torch import Tensor

from minitransformer.ops.gpu import cuda
from minitransformer.ops.gpu.launch import cdiv, on
from minitransformer.ops.gpu.tiles import Tile

SOURCE = "few_rows.cu"
SHARED_LIMIT = 227 << 10


def defines(tile: Tile, fp32: bool) -> tuple[tuple[str, int], ...]:
    return ("CHUNK", tile.k), ("FP32_OUT", int(fp32))


def shared(tile: Tile, M: int, K: int) -> int:
    """Bytes: the weight's 16 rows and those of x, padded, and a barrier for each chunk."""
    return (16 + min(M, tile.m)) * (2 * K + 16) + 8 * cdiv(K, tile.k) + 16


def fits(tile: Tile, M: int, K: int) -> bool:
    return K % 16 == 0 and shared(tile, M, K) <= SHARED_LIMIT


def product(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> None:
    """Fills y [M, N] BF16 or FP32 with the chain of x [M, K] and w [N, K], contiguous BF16 at multiples of 16 bytes."""
    (M, K), N = x.shape, w.shape[0]
    if not fits(tile, M, K):
        raise ValueError(f"few_rows: {tile} takes no K of {K} with {M} rows")
    bytes_ = shared(tile, M, K)
    with on(x.device):
        # Allowed all there is, so that one function serves every M.
        function = cuda.kernel(x.device, SOURCE, "few_rows", defines(tile, y.dtype == torch.float32), SHARED_LIMIT)
        blocks = cdiv(N, 16) * cdiv(M, tile.m)
        cuda.launch(function, blocks, 32 * tile.warps, bytes_, (x, w, y, M, N, K))
