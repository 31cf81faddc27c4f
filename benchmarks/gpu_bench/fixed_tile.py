"""What a batch-invariant library runs for every shape: one persistent 128 x 128 x 64 tile. Only to compare with."""

import torch
import triton
import triton.language as tl

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.linear import _store
from minitransformer.ops.gpu.tiles import chain_tile, tile_of


@triton.jit(do_not_specialize=["M"])
def fixed_tile_kernel(x_ptr, w_ptr, y_ptr, M, N, K, PROGRAMS: tl.constexpr):
    tiles_m, tiles_n = tl.cdiv(M, 128), tl.cdiv(N, 128)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        i, j = tile_of(tile, tiles_m, tiles_n, 8)
        rows, cols = i * 128 + tl.arange(0, 128), j * 128 + tl.arange(0, 128)
        x_rows, w_rows = tl.where(rows < M, rows, 0).to(tl.int64), tl.where(cols < N, cols, 0).to(tl.int64)
        acc = chain_tile(x_ptr, x_rows, w_ptr, w_rows, K, 128, 128, 64, False, True)
        _store(y_ptr, acc, rows, cols, M, N, False)


def fixed_tile(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K], w [N, K] BF16, K a multiple of 64 -> BF16 [M, N]."""
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    programs = device.multiprocessors(x.device)
    count = min(programs, triton.cdiv(M, 128) * triton.cdiv(N, 128))
    fixed_tile_kernel[(count,)](x, w, y, M, N, K, programs, num_warps=8, num_stages=3, **device.STRICT)
    return y
