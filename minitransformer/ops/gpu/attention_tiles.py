"""attention/2 for any head size, packed or paged, and the fold of segments that were programs of their own."""

import triton
import triton.language as tl

from minitransformer.ops.gpu.launch import quick
from minitransformer.ops.gpu.tiles import in_turn, to_bf16


@triton.jit
def _keys(
    q, acc, m, l, k_ptr, v_ptr, rows_ptr, j0, position, last, row0, stride, scale,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """One tile of KEYS absolute positions from j0. k_ptr and v_ptr stand at the head's first element."""
    j, h = j0 + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    if CONTIGUOUS:
        row = row0 + j
    elif MASKED:
        row = tl.load(rows_ptr + j, mask=j <= last, other=0)
    else:
        row = tl.load(rows_ptr + j)
    k_at = k_ptr + row[None, :].to(tl.int64) * stride + h[:, None]
    v_at = v_ptr + row[:, None].to(tl.int64) * stride + h[None, :]
    # Keys past the block's last query are zeros: what lies in the store there may be NaN.
    if MASKED or HEAD != WIDTH:
        k = tl.load(k_at, mask=(j[None, :] <= last) & (h[:, None] < HEAD), other=0.0)
        v = tl.load(v_at, mask=(j[:, None] <= last) & (h[None, :] < HEAD), other=0.0)
    else:
        k, v = tl.load(k_at), tl.load(v_at)
    s = tl.dot(q, k) * scale
    if MASKED:
        s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    # The quad sum of the spec: each warp owns whole rows (`fits`), so tl.sum has one order whatever the schedule.
    l = l * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
    return acc, top, l


@triton.jit
def _fold(acc, m, l, acc_s, m_s, l_s):
    """A segment after those before; an empty one (-1e30, 0, 0) on either side changes no bit: no chain ends in -0."""
    top = tl.maximum(m, m_s)
    old, new = tl.exp2(m - top), tl.exp2(m_s - top)
    return acc * old[:, None] + acc_s * new[:, None], top, l * old + l_s * new


@quick
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, key_rows_ptr, bounds_ptr, o_ptr, m_ptr, l_ptr, acc_ptr, scale, N, stride,
    max_keys, lines,
    GROUP: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SEGMENT: tl.constexpr, CONTIGUOUS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, key/value head, sequence). q, o [T, N, HEAD]; k, v rows of `stride` elements.

    SPLIT: the second number counts (segment, key/value head); the segment's own m, l [segments, lines] and acc
    [segments, lines, HEAD] are written, lines = T * N, for fold_kernel.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    # Late queries see the most keys: they start first.
    block, pair, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, segment = pair % (N // GROUP), pair // (N // GROUP)
    row0, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    first = row0 + block * TOKENS
    if first >= end:
        return
    last = tl.load(positions_ptr + tl.minimum(first + TOKENS, end) - 1).to(tl.int32)
    if last < segment * SEGMENT:
        return
    i, h = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    valid = (i < TOKENS * GROUP) & (first + i // GROUP < end)
    token = tl.where(valid, first + i // GROUP, first)  # spare rows repeat the first token and are not stored
    line = token.to(tl.int64) * N + g * GROUP + i % GROUP
    position = tl.load(positions_ptr + token).to(tl.int32)
    begin = tl.load(positions_ptr + first).to(tl.int32)
    q = tl.load(q_ptr + line[:, None] * HEAD + h[None, :], mask=(h < HEAD)[None, :], other=0.0)
    k_head, v_head = k_ptr + g * HEAD, v_ptr + g * HEAD
    rows_ptr = key_rows_ptr + sequence.to(tl.int64) * max_keys
    m, l = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    stop = last + 1
    if SPLIT:
        stop = tl.minimum(stop, (segment + 1) * SEGMENT)
    for s0 in range(segment * SEGMENT, stop, SEGMENT):
        m_s, l_s = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
        acc_s = tl.zeros((ROWS, WIDTH), tl.float32)
        whole = tl.minimum(
            tl.maximum((begin + 1) // KEYS * KEYS, s0), s0 + SEGMENT
        )  # tiles that every row sees in full
        for j0 in range(s0, whole, KEYS):
            acc_s, m_s, l_s = _keys(q, acc_s, m_s, l_s, k_head, v_head, rows_ptr, j0, position, last, row0, stride,
                                    scale, HEAD, WIDTH, KEYS, False, CONTIGUOUS)  # fmt: skip
        for j0 in range(whole, tl.minimum(last + 1, s0 + SEGMENT), KEYS):
            acc_s, m_s, l_s = _keys(q, acc_s, m_s, l_s, k_head, v_head, rows_ptr, j0, position, last, row0, stride,
                                    scale, HEAD, WIDTH, KEYS, True, CONTIGUOUS)  # fmt: skip
        if SPLIT:
            acc, m, l = acc_s, m_s, l_s
        else:
            acc, m, l = _fold(acc, m, l, acc_s, m_s, l_s)
    if SPLIT:
        line += segment.to(tl.int64) * lines
        tl.store(acc_ptr + line[:, None] * HEAD + h[None, :], acc, mask=valid[:, None] & (h < HEAD)[None, :])
    else:
        o = to_bf16(tl.math.div_rn(acc, tl.broadcast_to(l[:, None], (ROWS, WIDTH))))
        tl.store(o_ptr + line[:, None] * HEAD + h[None, :], o, mask=valid[:, None] & (h < HEAD)[None, :])
    tl.store(m_ptr + line, m, mask=valid)
    tl.store(l_ptr + line, l, mask=valid)


@quick
@triton.jit
def fold_kernel(
    m_s_ptr, l_s_ptr, acc_s_ptr, positions_ptr, o_ptr, m_ptr, l_ptr, N, lines,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, SEGMENT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program line: one query row; its segments in ascending order, AHEAD of them loaded before they are folded."""
    line, h = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    count = tl.load(positions_ptr + line // N).to(tl.int32) // SEGMENT + 1
    m, l = tl.full((1,), -1e30, tl.float32), tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, WIDTH), tl.float32)
    one = tl.arange(0, 1)
    in_turn()  # the position is older than the kernel in front, which writes the segments
    for s0 in range(0, count, AHEAD):
        parts = ()
        for i in tl.static_range(AHEAD):
            at = (s0 + i).to(tl.int64) * lines + line + one
            there = s0 + i + one < count
            m_s = tl.load(m_s_ptr + at, mask=there, other=-1e30)
            l_s = tl.load(l_s_ptr + at, mask=there, other=0.0)
            inside = there[:, None] & (h < HEAD)[None, :]
            acc_s = tl.load(acc_s_ptr + at[:, None] * HEAD + h[None, :], mask=inside, other=0.0)
            parts = parts + ((acc_s, m_s, l_s),)
        for i in tl.static_range(AHEAD):
            acc, m, l = _fold(acc, m, l, parts[i][0], parts[i][1], parts[i][2])
    o = to_bf16(tl.math.div_rn(acc, tl.broadcast_to(l[:, None], (1, WIDTH))))
    tl.store(o_ptr + line * HEAD + h[None, :], o, mask=(h < HEAD)[None, :])
    tl.store(m_ptr + line + one, m)
    tl.store(l_ptr + line + one, l)
