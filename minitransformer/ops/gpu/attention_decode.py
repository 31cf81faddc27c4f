"""attention/2 for few queries with many keys: a program takes one segment, each of its warps the scores of a key tile.

TILES tiles at a time: warp w owns the 16 rows of tile w, so its row sums are the quad sum, and all warps share P V by
columns. Keys and values come through a ring of three slots by asynchronous copies of single rows, of any page size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from minitransformer.ops.gpu.launch import quick
from minitransformer.ops.gpu.tiles import in_turn

ROWS = gl.constexpr(16)


@gluon.jit
def _issue(step, store_k, store_v, slots, rows_buf, count, stride, LAYOUT: gl.constexpr):
    """Starts the copy number step: keys of tiles step // 2 if it is even, else their values; zeros past the end."""
    TILES: gl.constexpr = slots.shape[1]
    KEYS: gl.constexpr = slots.shape[2]
    WIDTH: gl.constexpr = slots.shape[3]
    tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    j = step // 2 * (TILES * KEYS) + tile[:, None] * KEYS + key[None, :]
    if step // 2 * (TILES * KEYS) < count:
        row = rows_buf.index(step // 2).load(gl.SliceLayout(2, LAYOUT))
        at = row.to(gl.int64)[:, :, None] * stride + h[None, None, :]
        if step % 2 == 0:
            async_copy.async_copy_global_to_shared(slots.index(step % 3), store_k + at, mask=(j < count)[:, :, None])
        else:
            async_copy.async_copy_global_to_shared(slots.index(step % 3), store_v + at, mask=(j < count)[:, :, None])
    async_copy.commit_group()


@gluon.jit
def _tops(s, m, max_buf, tile_max, TILES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores [TILES, 16, 64] -> the running maximum [TILES, 16] of each tile, and m after the last."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, S_LAYOUT))
    max_buf.store(gl.max(s, 2))
    gl.thread_barrier()
    tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, S_LAYOUT)))
    tops = gl.zeros((TILES, ROWS), gl.float32, gl.SliceLayout(2, S_LAYOUT))
    for i in gl.static_range(TILES):
        m = gl.maximum(m, tile_max.index(i).load(ROW))
        tops = gl.where((tile == i)[:, None], m[None, :], tops)
    return tops, m


@gluon.jit
def _queries(
    q_ptr, positions_ptr, first, end, begin, g, N,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The rows' queries [TILES, 16, WIDTH], the same for every tile, and their positions from `begin` on [16]."""
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    i = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, Q_LAYOUT)))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, Q_LAYOUT)))
    token = gl.minimum(first + i // GROUP, end - 1)  # spare rows repeat a token and are not stored
    at = (token.to(gl.int64) * N + g * GROUP + i % GROUP)[None, :, None] * WIDTH + h[None, None, :]
    none = gl.zeros((TILES, ROWS, WIDTH), gl.int64, Q_LAYOUT)
    q = gl.load(q_ptr + (at + none))
    i = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, S_LAYOUT)))
    return q, gl.load(positions_ptr + gl.minimum(first + i // GROUP, end - 1)).to(gl.int32) - begin


@gluon.jit
def _weights(q, slot, position, b, m, scale, p_buf, max_buf, sum_buf, tile_max, S_LAYOUT: gl.constexpr):
    """Batch b of tiles: their weights into p_buf, the sums of those into sum_buf; m after the last tile."""
    TILES: gl.constexpr = p_buf.shape[0]
    KEYS: gl.constexpr = p_buf.shape[2]
    tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, S_LAYOUT)))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, S_LAYOUT)))
    k = slot.permute((0, 2, 1)).load(gl.DotOperandLayout(1, S_LAYOUT, 2))
    s = mma_v2(q, k, gl.zeros((TILES, ROWS, KEYS), gl.float32, S_LAYOUT)) * scale
    at_key = b * (TILES * KEYS) + tile[:, None, None] * KEYS + key[None, None, :]
    s = gl.where(at_key <= position[None, :, None], s, float("-inf"))
    tops, m = _tops(s, m, max_buf, tile_max, TILES, S_LAYOUT)
    p = gl.exp2(s - tops[:, :, None])
    p_buf.store(p.to(gl.bfloat16))
    sum_buf.store(gl.sum(p, 2))
    return m


@gluon.jit
def _values(acc, m, l, p_tiles, v_tiles, tile_max, tile_sum, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """The tiles' weights times their values, one tile after another, from m, l and acc of those before."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, S_LAYOUT))
    TILES: gl.constexpr = p_tiles.shape[0]
    for w in gl.static_range(TILES):
        top = gl.maximum(m, tile_max.index(w).load(ROW))
        shrink = gl.exp2(m - top)
        m = top
        l = l * shrink + tile_sum.index(w).load(ROW)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p_tile = p_tiles.index(w).load(gl.DotOperandLayout(0, O_LAYOUT, 2))
        v = v_tiles.index(w).load(gl.DotOperandLayout(1, O_LAYOUT, 2))
        acc = mma_v2(p_tile, v, acc)
    return acc, l


@gluon.jit
def _store(
    acc, m, l, o_ptr, m_ptr, l_ptr, acc_ptr, position, first, end, g, N, segment, lines,
    GROUP: gl.constexpr, SPLIT: gl.constexpr, ROW: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = acc.shape[1]
    i = gl.arange(0, ROWS, ROW)
    token = first + i // GROUP
    line = token.to(gl.int64) * N + g * GROUP + i % GROUP
    valid = (token < end) & (i < ROWS // GROUP * GROUP)
    if SPLIT:
        valid = valid & (position >= 0)
        line += segment.to(gl.int64) * lines
    gl.store(m_ptr + line, m, mask=valid)
    gl.store(l_ptr + line, l, mask=valid)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))
    token = first + i // GROUP
    line = token.to(gl.int64) * N + g * GROUP + i % GROUP
    valid = ((token < end) & (i < ROWS // GROUP * GROUP))[:, None]
    if SPLIT:
        line += segment.to(gl.int64) * lines
        gl.store(acc_ptr + line[:, None] * WIDTH + h[None, :], acc, mask=valid)
    else:
        sums = gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT))
        o = gl.div_rn(acc, sums[:, None] + gl.zeros((ROWS, WIDTH), gl.float32, O_LAYOUT))
        nan = gl.full((ROWS, WIDTH), 0x7FC0, gl.int16, O_LAYOUT).to(gl.bfloat16, bitcast=True)
        o = gl.where(o == o, o.to(gl.bfloat16), nan)
        gl.store(o_ptr + line[:, None] * WIDTH + h[None, :], o, mask=valid)


@gluon.jit
def _attend(
    rows, q_ptr, k_ptr, v_ptr, positions_ptr, o_ptr, m_ptr, l_ptr, acc_ptr, first, end, count, g, segment, scale, N,
    stride, lines, GROUP: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, SEGMENT: gl.constexpr,
    TILES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A segment of `count` keys, whose row numbers are rows [batches of tiles, TILES * KEYS]."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [TILES, 1, 1], [1, 16, 8])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, TILES], [16, 8])
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [TILES, 1, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, S_LAYOUT))
    SWIZZLED2: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SWIZZLED3: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    PLAIN1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BATCHES: gl.constexpr = rows.shape[0]
    slots = gl.allocate_shared_memory(gl.bfloat16, [3, TILES, KEYS, WIDTH], SWIZZLED3)
    rows_buf = gl.allocate_shared_memory(gl.int32, [BATCHES, TILES, KEYS], PLAIN2)
    p_buf = gl.allocate_shared_memory(gl.bfloat16, [TILES, ROWS, KEYS], SWIZZLED3)
    p_tiles = p_buf._reinterpret(gl.bfloat16, [TILES, ROWS, KEYS], SWIZZLED2)
    max_buf = gl.allocate_shared_memory(gl.float32, [TILES, ROWS], PLAIN2)
    sum_buf = gl.allocate_shared_memory(gl.float32, [TILES, ROWS], PLAIN2)
    tile_max = max_buf._reinterpret(gl.float32, [TILES, ROWS], PLAIN1)
    tile_sum = sum_buf._reinterpret(gl.float32, [TILES, ROWS], PLAIN1)
    rows_buf._reinterpret(gl.int32, [BATCHES, TILES * KEYS], PLAIN2).store(rows)
    gl.thread_barrier()
    k_head, v_head = k_ptr + g * WIDTH, v_ptr + g * WIDTH
    for step in gl.static_range(2):
        _issue(step, k_head, v_head, slots, rows_buf, count, stride, COPY_LAYOUT)
    q, position = _queries(q_ptr, positions_ptr, first, end, segment * SEGMENT, g, N, GROUP, WIDTH, TILES, S_LAYOUT)
    m, l = gl.full((ROWS,), -1e30, gl.float32, ROW), gl.full((ROWS,), 0.0, gl.float32, ROW)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, O_LAYOUT)
    for b in range(0, gl.cdiv(count, TILES * KEYS)):
        async_copy.wait_group(1)
        gl.thread_barrier()
        _issue(2 * b + 2, k_head, v_head, slots, rows_buf, count, stride, COPY_LAYOUT)
        before = m
        m = _weights(
            q, slots.index(2 * b % 3), position, b, m, scale, p_buf, max_buf, sum_buf, tile_max, S_LAYOUT
        )  # fmt: skip
        async_copy.wait_group(1)
        gl.thread_barrier()
        _issue(2 * b + 3, k_head, v_head, slots, rows_buf, count, stride, COPY_LAYOUT)
        v_tiles = slots.index((2 * b + 1) % 3)._reinterpret(gl.bfloat16, [TILES, KEYS, WIDTH], SWIZZLED2)
        acc, l = _values(acc, before, l, p_tiles, v_tiles, tile_max, tile_sum, S_LAYOUT, O_LAYOUT)
        gl.thread_barrier()
    _store(
        acc, m, l, o_ptr, m_ptr, l_ptr, acc_ptr, position, first, end, g, N, segment, lines, GROUP, SPLIT, ROW, O_LAYOUT
    )  # fmt: skip


@quick
@gluon.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, key_rows_ptr, bounds_ptr, o_ptr, m_ptr, l_ptr, acc_ptr, scale, N, stride,
    max_keys, lines,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, SEGMENT: gl.constexpr, TILES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Program ((segment, key/value head), sequence) of a batch whose sequences have at most 16 // GROUP new tokens.

    The arguments are those of attention.attention_kernel.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, TILES], [1, 0])
    in_turn()
    pair, sequence = gl.program_id(0), gl.program_id(1)
    g, segment = pair % (N // GROUP), pair // (N // GROUP)
    batch = gl.arange(0, SEGMENT // (TILES * KEYS), gl.SliceLayout(1, FLAT))
    lane = gl.arange(0, TILES * KEYS, gl.SliceLayout(0, FLAT))
    j = batch[:, None] * (TILES * KEYS) + lane[None, :]
    table = key_rows_ptr + sequence.to(gl.int64) * max_keys + segment * SEGMENT
    rows = gl.load(table + j, mask=segment * SEGMENT + j < max_keys, other=0).to(gl.int32)
    first, end = gl.load(bounds_ptr + sequence), gl.load(bounds_ptr + sequence + 1)
    last = gl.load(positions_ptr + end - 1).to(gl.int32)
    count = gl.minimum(last + 1 - segment * SEGMENT, SEGMENT)  # keys of this segment
    if count > 0:
        _attend(
            rows, q_ptr, k_ptr, v_ptr, positions_ptr, o_ptr, m_ptr, l_ptr, acc_ptr, first, end, count, g, segment,
            scale, N, stride, lines, GROUP, WIDTH, KEYS, SEGMENT, TILES, SPLIT,
        )  # fmt: skip
