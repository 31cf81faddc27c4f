"""A persistent product for many rows: a warp loads by the copy engine, two groups of four warps take turns at tiles.

While one group writes its tile, the other keeps the tensor core busy, so the end of a tile costs nothing. The chain is
the same as everywhere: k ascends, one group owns an output. Serves linear (one group of rows) and grouped_linear.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import Window, cdiv, on, quick
from minitransformer.ops.gpu.schedule import CELLS, schedule_of
from minitransformer.ops.gpu.tiles import Tile

# Of each thread at the launch: 12 warps share the register file; the consumers then take what the loading warp leaves.
REGISTERS = 168
GROUP = gl.constexpr(8)
# What a tile is multiplied by at its end: nothing, a routing weight a row, or outer scales (grouped_linear.py alone).
# CONTINUED: by nothing, but its accumulators are there already.
PLAIN, WEIGHTED, SCALED, CONTINUED = (gl.constexpr(i) for i in range(4))


@gluon.constexpr_function
def whole_lines(width):
    """16 bytes of BF16 a thread, and neighbours in a warp beside each other, so that memory gets whole lines."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def to_bf16(acc, GRADIENT: gl.constexpr):
    """A forward product's NaN is 0x7fff, the hardware's; a gradient's is 0x7fc0 (tiles.to_bf16)."""
    y = acc.to(gl.bfloat16)
    if GRADIENT:
        bits = gl.where(acc == acc, y.to(gl.int16, bitcast=True), 0x7FC0).to(gl.int16)
        y = bits.to(gl.bfloat16, bitcast=True)
    return y


@gluon.jit
def _place(
    tile, tiles_m, tiles_n, M, N, schedule_ptr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, GROUPED: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """(first row, end of the rows, first column, expert) of a tile: GROUP tile rows at a time, or one expert's.

    FULL: the last tile of rows begins early enough to be full, and some rows are computed twice: the copy engine is
    slow to fill what lies outside with zeros.
    """
    if GROUPED:
        cell = schedule_ptr + tile // tiles_n * CELLS
        first, rows = gl.load(cell + 3), gl.load(cell + 4)
    else:
        first = tile // (GROUP * tiles_n) * GROUP
        rows = min(tiles_m - first, GROUP)
    i, j = first + (tile - first * tiles_n) % rows, (tile - first * tiles_n) // rows
    if GROUPED:
        cell = schedule_ptr + i * CELLS
        return gl.load(cell + 1), gl.load(cell + 2), j * TILE_N, gl.load(cell)
    elif FULL:
        return min(i * TILE_M, max(M - TILE_M, 0)), M, j * TILE_N, 0
    else:
        return i * TILE_M, M, j * TILE_N, 0


@gluon.jit
def _produce(
    x_desc, w_desc, ring, sizes, schedule_ptr, TURNED: gl.constexpr, DEEP: gl.constexpr, GROUPED: gl.constexpr,
    END: gl.constexpr,
):  # fmt: skip
    x_bufs, w_bufs, full, empty, turns = ring
    tiles, tiles_m, tiles_n, M, N, K = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    TILE_M: gl.constexpr = x_bufs.shape[2 if TURNED else 1]
    TILE_N: gl.constexpr = w_bufs.shape[2 if DEEP else 1]
    DEPTH: gl.constexpr = x_bufs.shape[1 if TURNED else 2]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, _, column, expert = _place(
            tile, tiles_m, tiles_n, M, N, schedule_ptr, TILE_M, TILE_N, GROUPED, END == PLAIN and not TURNED
        )
        for k0 in range(0, K, DEPTH):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            if TURNED:
                tma.async_copy_global_to_shared(x_desc, [k0, row], full.index(slot), x_bufs.index(slot))
            else:
                tma.async_copy_global_to_shared(x_desc, [row, k0], full.index(slot), x_bufs.index(slot))
            if DEEP:
                at = [k0, column]
            else:
                at = [expert * N + column, k0]
            tma.async_copy_global_to_shared(w_desc, at, full.index(slot), w_bufs.index(slot))
            step += 1


@gluon.jit
def _consume(
    which, ring, sizes, pointers, TURNED: gl.constexpr, DEEP: gl.constexpr, GROUPED: gl.constexpr, END: gl.constexpr
):  # fmt: skip
    """Tiles number which, which + 2, ... of this program. END: WEIGHTED by weights[order[row]], SCALED by
    fl(weights[row] * order[expert, column]), or CONTINUED from weights [M, N], which may be y.

    A group waits for its turn before its first step of a tile: a barrier's parity tells a phase from the next alone, so
    a group that waited for steps more than one round of the ring ahead would pass at once.
    """
    x_bufs, w_bufs, full, empty, turns = ring
    tiles, tiles_m, tiles_n, M, N, K = sizes
    y_ptr, schedule_ptr, weights_ptr, order_ptr = pointers
    STAGES: gl.constexpr = x_bufs.shape[0]
    TILE_M: gl.constexpr = x_bufs.shape[2 if TURNED else 1]
    TILE_N: gl.constexpr = w_bufs.shape[2 if DEEP else 1]
    DEPTH: gl.constexpr = x_bufs.shape[1 if TURNED else 2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_N, 16]
    )
    steps = gl.cdiv(K, DEPTH)
    number, round_ = which, 0
    for tile in range(gl.program_id(0) + which * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        row, end, column, expert = _place(
            tile, tiles_m, tiles_n, M, N, schedule_ptr, TILE_M, TILE_N, GROUPED, END == PLAIN and not TURNED
        )
        if END == WEIGHTED:  # read here, where there is time, and not before the stores
            rows = row + gl.arange(0, TILE_M, gl.SliceLayout(1, layout))
            weights = gl.load(weights_ptr + gl.load(order_ptr + rows, mask=rows < end, other=0))
        if END == CONTINUED:
            rows = row + gl.arange(0, TILE_M, gl.SliceLayout(1, layout))
            columns = column + gl.arange(0, TILE_N, gl.SliceLayout(0, layout))
            at = rows[:, None].to(gl.int64) * N + columns[None, :]
            acc = gl.load(weights_ptr + at, mask=(rows < end)[:, None] & (columns < N)[None, :], other=0.0)
        else:
            acc = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
        mbarrier.wait(turns.index(which), (round_ & 1) ^ (1 - which))  # group 0's first turn is free
        for s in range(steps):
            step = number * steps + s
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            x, w = x_bufs.index(slot), w_bufs.index(slot)
            if TURNED:
                x = x.permute((1, 0))
            if not DEEP:
                w = w.permute((1, 0))
            acc = warpgroup_mma(x, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=s > 0)
        mbarrier.arrive(turns.index(1 - which))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((number * steps + steps - 1) % STAGES))
        number += 2
        round_ += 1
        if END == WEIGHTED:
            acc = acc * weights[:, None]  # fl: the routing weight in FP32
        if y_ptr.dtype.element_ty == gl.bfloat16:
            out: gl.constexpr = whole_lines(TILE_N)
            y = gl.convert_layout(to_bf16(acc, DEEP), out)
        else:
            out: gl.constexpr = layout
            y = acc
        rows = row + gl.arange(0, TILE_M, gl.SliceLayout(1, out))
        columns = column + gl.arange(0, TILE_N, gl.SliceLayout(0, out))
        at, inside = rows[:, None].to(gl.int64) * N + columns[None, :], (rows < end)[:, None] & (columns < N)[None, :]
        gl.store(y_ptr + at, y, mask=inside)


@gluon.jit
def barriers(STAGES: gl.constexpr, LOADS: gl.constexpr):
    """A ring's (full, empty, turns): a slot is full after LOADS arrivals; two groups take turns."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=LOADS)
        mbarrier.init(empty.index(s), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    return full, empty, turns


@quick
@gluon.jit(do_not_specialize=["tiles_m", "M"])
def pingpong_kernel(
    x_desc, w_desc, y_ptr, schedule_ptr, weights_ptr, order_ptr, tiles_m, M, N, K,
    STAGES: gl.constexpr, TURNED: gl.constexpr, DEEP: gl.constexpr, GROUPED: gl.constexpr, END: gl.constexpr,
):  # fmt: skip
    """y [M, N] BF16 or FP32 = x [M, K], or [K, M] if TURNED, times w [N, K] transposed, or w [K, N] if DEEP.

    Grouped: w has the experts' matrices one below the other, and the schedule says which rows are whose; tiles_m is
    where it says how many tiles of rows there are.
    """
    tiles_n = gl.cdiv(N, w_desc.block_type.shape[1 if DEEP else 0])
    if GROUPED:
        tiles_m = gl.load(schedule_ptr + tiles_m * CELLS)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    full, empty, turns = barriers(STAGES, 1)
    ring = (x_bufs, w_bufs, full, empty, turns)
    sizes = (tiles_m * tiles_n, tiles_m, tiles_n, M, N, K)
    pointers = (y_ptr, schedule_ptr, weights_ptr, order_ptr)
    gl.warp_specialize(
        [
            (_consume, (0, ring, sizes, pointers, TURNED, DEEP, GROUPED, END)),
            (_consume, (1, ring, sizes, pointers, TURNED, DEEP, GROUPED, END)),
            (_produce, (x_desc, w_desc, ring, sizes, schedule_ptr, TURNED, DEEP, GROUPED, END)),
        ],
        [4, 1],
        [232, 40],
    )


def _descriptor(x: Tensor, rows: int, columns: int) -> Window:
    return Window(x, (rows, columns), gluon=True)


def _launch(x, w, y, tile: Tile, tiles_m: int, most: int, turned=False, deep=False, experts=(), weights=None) -> None:
    """experts: (schedule, order) where the product is grouped; else weights are accumulators."""
    (M, N), K = y.shape, x.shape[0 if turned else 1]
    schedule, order = experts or (y, y)
    end = PLAIN if weights is None else WEIGHTED if experts else CONTINUED
    with on(y.device):
        pingpong_kernel[(min(device.multiprocessors(y.device), most),)](
            _descriptor(x, *((tile.k, tile.m) if turned else (tile.m, tile.k))),
            _descriptor(w, *((tile.k, tile.n) if deep else (tile.n, tile.k))),
            y, schedule, y if weights is None else weights, order, tiles_m, M, N, K,
            tile.stages, turned, deep, bool(experts), end.value,
            num_warps=4, maxnreg=REGISTERS, **device.STRICT,
        )  # fmt: skip


def product(
    x: Tensor, w: Tensor, y: Tensor, tile: Tile, turned: bool = False, deep: bool = False, start: Tensor | None = None
) -> None:
    """Fills y [M, N] BF16 or FP32 with the chain of x [M, K] and w [N, K]; turned: x is [K, M]; deep: w is [K, N].

    start: FP32 [M, N] accumulators to begin from, perhaps y.
    Only gradients read w so: with deep a NaN is theirs, 0x7fc0. Contiguous BF16 on one Hopper GPU, rows of x and w at
    multiples of 16 bytes, which the copy engine wants.
    """
    tiles_m = cdiv(y.shape[0], tile.m)
    _launch(x, w, y, tile, tiles_m, tiles_m * cdiv(y.shape[1], tile.n), turned, deep, weights=start)


def grouped(
    x: Tensor, w: Tensor, y: Tensor, bounds: Tensor, weights: Tensor | None, order: Tensor, tile: Tile
) -> None:
    """Fills y [R, N] BF16: x [R, K] in dispatch order times w [E, N, K], scaled by weights if any.

    bounds int64 [E + 1]. The rest as in `product`.
    """
    with on(x.device):
        schedule, bound = schedule_of(bounds, x.shape[0], tile.m)
    most = bound * cdiv(y.shape[1], tile.n)
    _launch(x, w.view(-1, w.shape[2]), y, tile, bound, most, experts=(schedule, order), weights=weights)
