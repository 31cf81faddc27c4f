"""The experts' weight gradients by the persistent product of pingpong.py: dW = dY^T X, a chain over an expert's rows.

An expert's last step reaches into the next one's rows, which may hold a NaN: there both operands are cleared in shared
memory before the step, while the step before runs.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import Window, cdiv, on, quick
from minitransformer.ops.gpu.pingpong import REGISTERS, barriers, to_bf16, whole_lines
from minitransformer.ops.gpu.tiles import Tile


@gluon.jit
def _place(tile, tiles_n, tiles_k, offsets_ptr):
    """(expert, tile row, tile column, the expert's first row, its end)."""
    expert, inside = tile // (tiles_n * tiles_k), tile % (tiles_n * tiles_k)
    begin, end = gl.load(offsets_ptr + expert).to(gl.int32), gl.load(offsets_ptr + expert + 1).to(gl.int32)
    return expert, inside % tiles_n, inside // tiles_n, begin, end


@gluon.jit
def _produce(dy_desc, x_desc, ring, sizes, offsets_ptr):
    dy_bufs, x_bufs, full, empty, turns = ring
    tiles, tiles_n, tiles_k, N, K = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    DEPTH: gl.constexpr = x_bufs.shape[1]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, i, j, begin, end = _place(tile, tiles_n, tiles_k, offsets_ptr)
        for row in range(begin, end, DEPTH):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            at_dy, at_x = [row, i * dy_bufs.shape[2]], [row, j * x_bufs.shape[2]]
            tma.async_copy_global_to_shared(dy_desc, at_dy, full.index(slot), dy_bufs.index(slot))
            tma.async_copy_global_to_shared(x_desc, at_x, full.index(slot), x_bufs.index(slot))
            step += 1


@gluon.jit
def _clear(buffer, rows):
    """Zeros in all rows from `rows` on."""
    layout: gl.constexpr = whole_lines(buffer.shape[1])
    value = buffer.load(layout)
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    buffer.store(gl.where((row < rows)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _steps_of(tile, sizes, offsets_ptr, DEPTH: gl.constexpr):
    tiles, tiles_n, tiles_k, N, K = sizes
    _, _, _, begin, end = _place(min(tile, tiles - 1), tiles_n, tiles_k, offsets_ptr)
    return gl.cdiv(end - begin, DEPTH)


@gluon.jit
def _consume(which, ring, sizes, dw_ptr, offsets_ptr):
    """Tiles number which, which + 2, ... of this program; as in pingpong.py, but tiles have steps of their own."""
    dy_bufs, x_bufs, full, empty, turns = ring
    tiles, tiles_n, tiles_k, N, K = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    DEPTH: gl.constexpr = x_bufs.shape[1]
    TILE_N: gl.constexpr = dy_bufs.shape[2]
    TILE_K: gl.constexpr = x_bufs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_K, 16]
    )
    out: gl.constexpr = whole_lines(TILE_K)
    programs = gl.num_programs(0)
    step, round_ = 0, 0
    if which == 1:
        step = _steps_of(gl.program_id(0), sizes, offsets_ptr, DEPTH)
    for tile in range(gl.program_id(0) + which * programs, tiles, 2 * programs):
        expert, i, j, begin, end = _place(tile, tiles_n, tiles_k, offsets_ptr)
        steps, others = gl.cdiv(end - begin, DEPTH), _steps_of(tile + programs, sizes, offsets_ptr, DEPTH)
        acc = gl.zeros((TILE_N, TILE_K), gl.float32, layout)
        mbarrier.wait(turns.index(which), (round_ & 1) ^ (1 - which))  # group 0's first turn is free
        for s in range(steps):
            slot = (step + s) % STAGES
            mbarrier.wait(full.index(slot), (step + s) // STAGES & 1)
            left = end - begin - s * DEPTH
            if left < DEPTH:
                _clear(dy_bufs.index(slot), left)
                _clear(x_bufs.index(slot), left)
                fence_async_shared()
                gl.thread_barrier()
            acc = warpgroup_mma(dy_bufs.index(slot).permute((1, 0)), x_bufs.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + s + STAGES - 1) % STAGES), pred=s > 0)
        mbarrier.arrive(turns.index(1 - which))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), pred=steps > 0)
        step += steps + others
        round_ += 1
        y = gl.convert_layout(to_bf16(acc, True), out)
        rows = i * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(1, out))
        columns = j * TILE_K + gl.arange(0, TILE_K, gl.SliceLayout(0, out))
        at = (expert.to(gl.int64) * N + rows)[:, None] * K + columns[None, :]
        gl.store(dw_ptr + at, y, mask=(rows < N)[:, None] & (columns < K)[None, :])


@quick
@gluon.jit(do_not_specialize=["experts"])
def weights_kernel(dy_desc, x_desc, dw_ptr, offsets_ptr, experts, N, K, STAGES: gl.constexpr):
    """dY [R, N], X [R, K] -> dW [experts, N, K] BF16."""
    tiles_n, tiles_k = gl.cdiv(N, dy_desc.block_type.shape[1]), gl.cdiv(K, x_desc.block_type.shape[1])
    dy_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + dy_desc.block_type.shape, dy_desc.layout)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    full, empty, turns = barriers(STAGES, 1)
    ring = (dy_bufs, x_bufs, full, empty, turns)
    sizes = (experts * tiles_n * tiles_k, tiles_n, tiles_k, N, K)
    gl.warp_specialize(
        [
            (_consume, (0, ring, sizes, dw_ptr, offsets_ptr)),
            (_consume, (1, ring, sizes, dw_ptr, offsets_ptr)),
            (_produce, (dy_desc, x_desc, ring, sizes, offsets_ptr)),
        ],
        [4, 1],
        [232, 40],
    )


def product(dy: Tensor, x: Tensor, dw: Tensor, bounds: Tensor, tile: Tile) -> None:
    """Fills dW [E, N, K] BF16 from dY [R, N] and x [R, K] BF16 in dispatch order; +0 where an expert has no rows.

    Contiguous on one Hopper GPU, rows at multiples of 16 bytes. bounds int64 [E + 1]. tile: m of N, n of K, k rows.
    """
    E, N, K = dw.shape
    most = E * cdiv(N, tile.m) * cdiv(K, tile.n)
    with on(dw.device):
        weights_kernel[(min(device.multiprocessors(dw.device), most),)](
            Window(dy, (tile.k, tile.m), gluon=True), Window(x, (tile.k, tile.n), gluon=True), dw, bounds, E, N, K,
            tile.stages,
            num_warps=4, maxnreg=REGISTERS, **device.STRICT,
        )  # fmt: skip
