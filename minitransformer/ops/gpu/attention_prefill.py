"""attention/2 for many queries: a warp loads tiles by the copy engine, two groups of four warps own 64 rows each.

While one group exponentiates, the other's products keep the tensor core busy. A persistent program has its next block's
queries on their way while it writes the last one. attention_block.py says what a group does.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.attention_block import HALF, attend_segment
from minitransformer.ops.gpu.launch import Window, cdiv, quick


@gluon.jit
def _item(wave, sizes):
    """The program's work number `wave`: forward and back over the programs, so that all get as much."""
    pairs, blocks = sizes
    i = gl.program_id(0)
    if wave % 2 == 1:
        i = gl.num_programs(0) - 1 - i
    return wave * gl.num_programs(0) + i


@gluon.jit
def _waves(sizes):
    """How many pieces of work this program has."""
    pairs, blocks = sizes
    whole = pairs * blocks // gl.num_programs(0)
    return whole + (_item(whole, sizes) < pairs * blocks).to(gl.int32)


@gluon.jit
def _place(wave, sizes, kv_heads, tables, TOKENS: gl.constexpr, KEYS: gl.constexpr):
    """-> first token, end of its sequence, key/value head, row of key 0, tiles."""
    pairs, blocks = sizes
    positions_ptr, bounds_ptr, starts_ptr = tables
    item = gl.minimum(_item(wave, sizes), pairs * blocks - 1)
    pair = item % pairs
    sequence = pair // kv_heads
    # Late tokens see the most keys: they come first.
    first = gl.load(bounds_ptr + sequence) + (blocks - 1 - item // pairs) * TOKENS
    end = gl.load(bounds_ptr + sequence + 1)
    last = gl.load(positions_ptr + gl.minimum(first + TOKENS, end) - 1).to(gl.int32)
    # A block past a short sequence's end repeats its last token over one tile, and stores nothing.
    tiles = last // KEYS * (first < end).to(gl.int32) + 1
    return first, end, pair % kv_heads, gl.load(starts_ptr + sequence), tiles


@gluon.jit
def _produce(k_desc, v_desc, ring, sizes, kv_heads, tables, TOKENS: gl.constexpr):
    k_bufs, v_bufs, full, empty = ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    KEYS: gl.constexpr = k_bufs.shape[1]
    WIDTH: gl.constexpr = k_bufs.shape[2]
    n = 0
    for wave in range(_waves(sizes)):
        _, _, g, row0, tiles = _place(wave, sizes, kv_heads, tables, TOKENS, KEYS)
        for t in range(tiles):
            slot, at = n % STAGES, [row0 + t * KEYS, g * WIDTH]
            mbarrier.wait(empty.index(slot), (n // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, at, full.index(slot), k_bufs.index(slot))
            tma.async_copy_global_to_shared(v_desc, at, full.index(slot), v_bufs.index(slot))
            n += 1


@gluon.jit
def _rows(q_ptr, positions_ptr, first, end, g, N, GROUP: gl.constexpr, WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Starts loading 64 rows (token, query head) of q and their positions."""
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    i = gl.arange(0, HALF, gl.SliceLayout(1, Q_LAYOUT))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
    token = gl.minimum(first + i // GROUP, end - 1)  # spare rows repeat the last token and are not stored
    line = token.to(gl.int64) * N + g * GROUP + i % GROUP
    q = gl.load(q_ptr + line[:, None] * WIDTH + h[None, :])
    i = gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    return q, gl.load(positions_ptr + gl.minimum(first + i // GROUP, end - 1)).to(gl.int32)


@gluon.jit
def _store(
    acc, m, l, o_ptr, m_ptr, l_ptr, first, end, g, N,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = HALF // GROUP
    ROWS_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    i = gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    line = (first + i // GROUP).to(gl.int64) * N + g * GROUP + i % GROUP
    valid = (first + i // GROUP < end) & (i < TOKENS * GROUP)
    gl.store(m_ptr + line, m, mask=valid)
    gl.store(l_ptr + line, l, mask=valid)
    sums = gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT))
    nan = gl.full((HALF, WIDTH), 0x7FC0, gl.int16, O_LAYOUT).to(gl.bfloat16, bitcast=True)
    o = gl.div_rn(acc, gl.expand_dims(sums, 1) + gl.zeros((HALF, WIDTH), gl.float32, O_LAYOUT))
    o = gl.convert_layout(gl.where(o == o, o.to(gl.bfloat16), nan), ROWS_LAYOUT)
    i = gl.arange(0, HALF, gl.SliceLayout(1, ROWS_LAYOUT))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS_LAYOUT))
    line = (first + i // GROUP).to(gl.int64) * N + g * GROUP + i % GROUP
    valid = (first + i // GROUP < end) & (i < TOKENS * GROUP)
    gl.store(o_ptr + line[:, None] * WIDTH + h[None, :], o, mask=valid[:, None])


@gluon.jit
def _consume(which, ring, sum_buf, tensors, sizes, kv_heads, tables, scale, N, constants: gl.constexpr):
    """Rows 64 * which .. of each of the program's blocks of 128: all their segments, then o, m and l."""
    q_ptr, o_ptr, m_ptr, l_ptr = tensors
    GROUP: gl.constexpr = constants[0]
    WIDTH: gl.constexpr = constants[1]
    KEYS: gl.constexpr = ring[0].shape[1]
    SEGMENT: gl.constexpr = constants[2] // KEYS
    TOKENS: gl.constexpr = HALF // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    first, end, g, _, tiles = _place(0, sizes, kv_heads, tables, 2 * TOKENS, KEYS)
    q_next, position = _rows(q_ptr, tables[0], first + which * TOKENS, end, g, N, GROUP, WIDTH, S_LAYOUT)
    n = 0  # of the ring: tiles of the blocks before
    for wave in range(_waves(sizes)):
        q = gl.convert_layout(q_next, gl.DotOperandLayout(0, S_LAYOUT, 2))
        # Tiles that every row surely sees in full: the program's tokens lie side by side.
        whole = tiles - 1 - (2 * TOKENS + KEYS - 3) // KEYS
        position += n * KEYS
        stop = n + gl.minimum(tiles, SEGMENT)
        acc, m, l = attend_segment(q, ring, n, n + whole, stop, position, scale, WIDTH, S_LAYOUT, O_LAYOUT)
        for start in range(n + SEGMENT, n + tiles, SEGMENT):
            sum_buf.store(acc)  # the segments before, out of the way of the registers
            stop = gl.minimum(n + tiles, start + SEGMENT)
            acc_s, m_s, l_s = attend_segment(
                q, ring, start, n + whole, stop, position, scale, WIDTH, S_LAYOUT, O_LAYOUT
            )
            top = gl.maximum(m, m_s)
            old, new = gl.exp2(m - top), gl.exp2(m_s - top)
            m, l = top, l * old + l_s * new
            old = gl.convert_layout(old, gl.SliceLayout(1, O_LAYOUT))
            new = gl.convert_layout(new, gl.SliceLayout(1, O_LAYOUT))
            acc = sum_buf.load(O_LAYOUT) * old[:, None] + acc_s * new[:, None]
        n += tiles
        done, done_end, done_g = first + which * TOKENS, end, g
        first, end, g, _, tiles = _place(wave + 1, sizes, kv_heads, tables, 2 * TOKENS, KEYS)
        q_next, position = _rows(q_ptr, tables[0], first + which * TOKENS, end, g, N, GROUP, WIDTH, S_LAYOUT)
        _store(acc, m, l, o_ptr, m_ptr, l_ptr, done, done_end, done_g, N, GROUP, WIDTH, S_LAYOUT, O_LAYOUT)


@quick
@gluon.jit(do_not_specialize=["pairs", "blocks"])
def prefill_kernel(
    q_ptr, k_desc, v_desc, positions_ptr, bounds_ptr, starts_ptr, o_ptr, m_ptr, l_ptr, scale, N, pairs, blocks,
    GROUP: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A piece of work: 128 rows, (token, query head) pairs of a sequence and a key/value head (a pair)."""
    KEYS: gl.constexpr = k_desc.block_type.shape[0]
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    TOKENS: gl.constexpr = HALF // GROUP * 2
    k_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, WIDTH], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, WIDTH], v_desc.layout)
    SUM_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    sum_bufs = gl.allocate_shared_memory(gl.float32, [2, HALF, WIDTH], SUM_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    ring = (k_bufs, v_bufs, full, empty)
    tensors, tables, sizes = (q_ptr, o_ptr, m_ptr, l_ptr), (positions_ptr, bounds_ptr, starts_ptr), (pairs, blocks)
    constants: gl.constexpr = (GROUP, WIDTH, SEGMENT)
    heads = N // GROUP
    gl.warp_specialize(
        [
            (_consume, (0, ring, sum_bufs.index(0), tensors, sizes, heads, tables, scale, N, constants)),
            (_consume, (1, ring, sum_bufs.index(1), tensors, sizes, heads, tables, scale, N, constants)),
            (_produce, (k_desc, v_desc, ring, sizes, heads, tables, TOKENS)),
        ],
        [4, 1],
        [240, 24],
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, longest: int,
    outputs: tuple[Tensor, Tensor, Tensor], stages: int, persistent: bool,
) -> None:  # fmt: skip
    """Fills o, m, l. Position j of sequence s lies in row starts[s] + j of k and v; bounds [S + 1] are those of q."""
    (_, N, H), G, sequences = q.shape, k.shape[1], len(bounds) - 1
    k_desc, v_desc = (Window(x.view(-1, G * H), (KEY_TILE, H), gluon=True) for x in (k, v))
    blocks, pairs = cdiv(longest, HALF.value // (N // G) * 2), sequences * G
    programs = min(device.multiprocessors(q.device), blocks * pairs) if persistent else blocks * pairs
    prefill_kernel[(programs,)](
        q, k_desc, v_desc, positions, bounds, starts, *outputs, float(_scale(H)), N, pairs, blocks, N // G, SEGMENT,
        stages, num_warps=4, maxnreg=168, **device.STRICT,
    )  # fmt: skip
