"""What the product kernels share: a tile of the chain (mma.py), the one rounding, the order of tiles.

The tensor core is the chain of the spec for every tile shape, number of warps and stages, and with the two operands
swapped, so all of those are free. K is never split: one program owns an output's whole chain.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


class Tile(NamedTuple):
    """A schedule: rows x columns x depth of a tile, warps, stages of the load pipeline; moves no bit.

    swap      the weight is the operand with 64 rows and the tokens the narrow one: wgmma for few tokens
    tma       loads by the bulk copy engine, in a persistent grid
    pingpong  the kernel of pingpong.py: one warp loads, two groups of four take turns
    pair      that of pair_product.cu: the same in pairs of blocks
    whole     the kernel of few_rows.cu: 16 columns, their whole weight in shared memory; k: columns behind a barrier
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    pingpong: bool = False
    whole: bool = False
    pair: bool = False


@triton.jit
def in_turn():
    """Stands before a kernel's first access to memory. Where it was launched early (device.EARLY), the kernels in front
    end and what they wrote can be read; then the one behind may begin, which waits here in its turn."""
    if cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(w_ptr, rows, K):
    """Before in_turn: rows of a weight, which no kernel in front writes, come to the L2 cache while that still runs."""
    lines = tl.arange(0, 16) * 64  # of 128 bytes
    for k0 in range(0, K, 1024):
        at = w_ptr + rows[:, None] * K + tl.minimum(k0 + lines, K - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def to_bf16(x):
    """FP32 -> BF16, nearest even; a NaN becomes 0x7fc0, where the hardware's conversion would give 0x7fff."""
    nan = tl.full(x.shape, 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(x == x, x.to(tl.bfloat16), nan)


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile row, tile column) of a program: GROUP tile rows at a time, so that both operands stay in the L2 cache."""
    wide = GROUP * tiles_n
    first = pid // wide * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + pid % wide % rows, pid % wide // rows


@triton.jit
def chain_tile(
    x_ptr, rows, w_ptr, cols, K,
    M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """FP32 [M, N], or [N, M] if SWAP: rows [M] of x times rows `cols` [N] of w, both [.., K], k ascending."""
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + rows[:, None] * K + k[None, :]
    w_at = w_ptr + cols[:, None] * K + k[None, :]
    acc = tl.zeros((N, M) if SWAP else (M, N), tl.float32)
    for k0 in range(0, K, DEPTH):
        if EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:  # zero products at the end of K change no accumulator
            x = tl.load(x_at, mask=k[None, :] < K - k0, other=0.0)
            w = tl.load(w_at, mask=k[None, :] < K - k0, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
        x_at += DEPTH
        w_at += DEPTH
    return acc


@triton.jit
def rows_tile(
    x, row, col, rows, cols, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """[ROWS, COLUMNS] of a matrix rows x cols from (row, col) on, zeros outside; x: a descriptor (TMA) or a pointer."""
    if TMA:
        tile = x.load([row, col])
    else:
        r, c = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(x + r.to(tl.int64) * stride + c, mask=(r < rows) & (c < cols), other=0.0)
    return tile
