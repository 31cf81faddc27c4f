"""The persistent product of pingpong.py on packed 4-bit weights: four more warps decode what one would have loaded.

Two groups of four warps take turns at tiles, as there. The decoding warps read a step of the weight (pack.py), 4.5 bits
each, make exact BF16 of it in shared memory, and ask the copy engine for the rows of x beside it. So the weight is
never in memory as BF16, and decoding costs only what four warps issue while the tensor core is busy.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.pack import UNIT_COLUMNS, UNIT_ROWS, UNIT_WORDS
from minitransformer.ops.gpu.pingpong import REGISTERS, SCHEDULE, _consume, _descriptor, _place, schedule_of
from minitransformer.ops.gpu.tiles import Tile

ROWS, COLUMNS, WORDS = gl.constexpr(UNIT_ROWS), gl.constexpr(UNIT_COLUMNS), gl.constexpr(UNIT_WORDS)
TRIPLE, SIGN = gl.constexpr(0x01C001C0), gl.constexpr(0x80008000 - (1 << 32))
SHIFT = gl.constexpr(0x49004900)  # 2^19 twice
AHEAD = gl.constexpr(8)  # steps whose packed words are in shared memory or on their way


@gluon.jit
def _product2(a, b):
    """Two BF16 products in each int32; exact here."""
    return gl.inline_asm_elementwise("mul.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _twice(pair):
    """The low half in both halves, and the high one."""
    low = pair & 0xFFFF
    return low | (low << 16), ((pair >> 16) & 0xFFFF) | (pair & -0x10000)


@gluon.jit
def _decoded(codes, scales, TILE_N: gl.constexpr, EXACT: gl.constexpr, words: gl.constexpr):
    """codes int32 [tiles, g, t, q, p] and scales int32 [tiles, g, q] of a step -> int32 [TILE_N, 32]: W as BF16 pairs,
    or W * 2^-19 if not EXACT. nvfp4_product.cu says what lies where, why products are exact and 2^-19 may stay.
    """
    turned = ((scales >> 8) & 0x00FF00FF) | ((scales << 8) & -0xFF0100)
    both = gl.convert_layout(gl.join(scales, turned), gl.SliceLayout(2, words), assert_trivial=True)
    low, high = _twice((both & 0x0FF00FF0) | 0x70007000)
    low, high = gl.expand_dims(low, 2), gl.expand_dims(high, 2)
    a0 = _product2(codes & (TRIPLE | SIGN), low)
    a1 = _product2((codes << 3) & (TRIPLE | SIGN), high)
    a2 = _product2(((codes << 6) & TRIPLE) | ((codes << 2) & SIGN), low)
    a3 = _product2(((codes >> 3) & TRIPLE) | ((codes << 1) & SIGN), high)
    pairs = gl.join(gl.join(a0, a2), gl.join(a1, a3))  # [tile, g, t, q, p, pair of columns, row half]
    if EXACT:
        pairs = _product2(pairs, SHIFT)
    return gl.reshape(gl.permute(pairs, (0, 6, 1, 3, 4, 2, 5)), (TILE_N, 32))


@gluon.jit
def _row_tile(tile, sizes, schedule_ptr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """The first row tile of W, among all experts', of a tile of the product."""
    _, tiles_m, tiles_n, M, N, K = sizes
    _, _, column, expert = _place(tile, tiles_m, tiles_n, M, N, schedule_ptr, TILE_M, TILE_N, True)
    return expert * gl.cdiv(N, ROWS) + column // ROWS


@gluon.jit
def _ask(raw, at, sizes, schedule_ptr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Has the copy engine bring the packed words of a step. at: (tile, step in it, row tile, how many before)."""
    codes_desc, scales_desc, codes_bufs, scales_bufs, there = raw
    tile, u, first, count = at
    if tile < sizes[0]:
        slot = count % AHEAD
        mbarrier.expect(there.index(slot), codes_desc.block_type.nbytes + scales_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(codes_desc, [first, u * WORDS], there.index(slot), codes_bufs.index(slot))
        at_scales = [first, u * WORDS + 128]
        tma.async_copy_global_to_shared(scales_desc, at_scales, there.index(slot), scales_bufs.index(slot))
        u += 1
        if u == gl.cdiv(sizes[5], COLUMNS):
            u = 0
            tile += gl.num_programs(0)
            if tile < sizes[0]:
                first = _row_tile(tile, sizes, schedule_ptr, TILE_M, TILE_N)
    return tile, u, first, count + 1


@gluon.jit
def _produce(x_desc, raw, ring, sizes, schedule_ptr, EXACT: gl.constexpr):
    """Fills a slot of the ring: x by the copy engine, W by these warps; the slot is full when both are there.

    Loads to registers would not be ahead: the fence in front of `arrive` waits for them.
    """
    x_bufs, w_bufs, full, empty, turns = ring
    codes_desc, scales_desc, codes_bufs, scales_bufs, there = raw
    tiles, tiles_m, tiles_n, M, N, K = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    TILE_M: gl.constexpr = x_bufs.shape[1]
    TILE_N: gl.constexpr = w_bufs.shape[1]
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    words: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    some: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, words))
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_N, COLUMNS // 2], gl.int32)
    step = 0
    tile = gl.program_id(0)
    first = 0
    if tile < tiles:
        first = _row_tile(tile, sizes, schedule_ptr, TILE_M, TILE_N)
    at = (tile, 0, first, 0)
    for _ in range(AHEAD - 1):
        at = _ask(raw, at, sizes, schedule_ptr, TILE_M, TILE_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, _, _, _ = _place(tile, tiles_m, tiles_n, M, N, schedule_ptr, TILE_M, TILE_N, True)
        for k0 in range(0, K, COLUMNS):
            at = _ask(raw, at, sizes, schedule_ptr, TILE_M, TILE_N)  # where the last step's words lay
            slot, place = step % STAGES, step % AHEAD
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [row, k0], full.index(slot), x_bufs.index(slot))
            mbarrier.wait(there.index(place), step // AHEAD & 1)
            codes = gl.reshape(codes_bufs.index(place).load(flat), (TILE_N // ROWS, 8, 4, 2, 2))
            codes = gl.convert_layout(codes, words, assert_trivial=True)
            scales = scales_bufs.index(place).reshape((TILE_N // ROWS, 8, 2)).load(some)
            w = w_bufs.index(slot)._reinterpret(gl.int32, [TILE_N, COLUMNS // 2], pairs)
            w.store(_decoded(codes, scales, TILE_N, EXACT, words))
            fence_async_shared()
            gl.thread_barrier()  # every warp's part is there before one of them says so
            mbarrier.arrive(full.index(slot))
            step += 1


@quick
@gluon.jit(do_not_specialize=["tiles_m", "M"])
def packed_kernel(
    x_desc, codes_desc, scales_desc, y_ptr, schedule_ptr, row_scale_ptr, weight_scale_ptr, tiles_m, M, N, K,
    STAGES: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """y [M, N] FP32 or BF16 = x [M, K] times packed W [E, N, K], times fl(row_scale [M] * weight_scale [E, N]).

    codes_desc and scales_desc: windows of TILE_N rows' words of one step on the packed weight as [row tiles, words].
    """
    TILE_N: gl.constexpr = codes_desc.block_type.shape[0] * ROWS
    tiles_n = gl.cdiv(N, TILE_N)
    tiles_m = gl.load(schedule_ptr + tiles_m * SCHEDULE)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_N, COLUMNS], gl.bfloat16)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE_N, COLUMNS], w_layout)
    codes_bufs = gl.allocate_shared_memory(gl.int32, [AHEAD] + codes_desc.block_type.shape, codes_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.int32, [AHEAD] + scales_desc.block_type.shape, scales_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    for s in gl.static_range(AHEAD):
        mbarrier.init(there.index(s), count=1)
    ring = (x_bufs, w_bufs, full, empty, turns)
    raw = (codes_desc, scales_desc, codes_bufs, scales_bufs, there)
    sizes = (tiles_m * tiles_n, tiles_m, tiles_n, M, N, K)
    pointers = (y_ptr, schedule_ptr, row_scale_ptr, weight_scale_ptr)
    END: gl.constexpr = 2 if EXACT else 3
    gl.warp_specialize(
        [
            (_consume, (0, ring, sizes, pointers, False, False, True, END)),
            (_consume, (1, ring, sizes, pointers, False, False, True, END)),
            (_produce, (x_desc, raw, ring, sizes, schedule_ptr, EXACT)),
        ],
        [4, 4],
        [200, 104],
    )


def grouped(
    x: Tensor, packed: Tensor, y: Tensor, bounds: Tensor, scale_R: Tensor, scale_EN: Tensor, tile: Tile, exact: bool
) -> None:
    """Fills y [R, N] FP32 or BF16: x [R, K] BF16 in dispatch order times the packed weight, with the outer scales.

    exact: x is not code * scale of NVFP4. Contiguous tensors on one Hopper GPU, K a multiple of 8, x and the weight at
    multiples of 16 bytes; bounds int64 [E + 1].
    """
    (R, K), N, rows = x.shape, scale_EN.shape[1], packed.view(-1, packed.shape[2] * UNIT_WORDS)
    with on(x.device):
        schedule, bound = schedule_of(bounds, R, tile.m)
        programs = min(device.multiprocessors(x.device), bound * cdiv(N, tile.n))
        packed_kernel[(programs,)](
            _descriptor(x, tile.m, tile.k), _descriptor(rows, tile.n // UNIT_ROWS, 128),
            _descriptor(rows, tile.n // UNIT_ROWS, 16), y, schedule, scale_R, scale_EN, bound, R, N, K,
            tile.stages, exact, num_warps=4, maxnreg=REGISTERS, **device.STRICT,
        )  # fmt: skip
