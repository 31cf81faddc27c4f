"""attention/2 on Hopper: one kernel for packed and paged stores, prefill and decode (ops/attention.py has the spec).

The hardware's exp2 and the order of tl.sum over a tile whose rows belong to one warp each are the spec's exp2_hw and
quad_sum. So a tile has at least 16 rows a warp and 64 keys, and nothing else about the schedule matters. A tile's rows
are (token, query head) pairs that share a key/value head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import attention_decode, attention_prefill, device
from minitransformer.ops.gpu.tiles import to_bf16


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
    l = l * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
    return acc, top, l


@triton.jit
def _fold(acc, m, l, acc_s, m_s, l_s):
    """A segment after the ones before; an empty one (-1e30, 0, 0) on either side changes no bit."""
    top = tl.maximum(m, m_s)
    old, new = tl.exp2(m - top), tl.exp2(m_s - top)
    return acc * old[:, None] + acc_s * new[:, None], top, l * old + l_s * new


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


class Schedule(NamedTuple):
    """attention_kernel: rows of a tile (token, head), warps (at most rows / 16: a row belongs to one warp), stages."""

    rows: int
    warps: int
    stages: int


class Prefill(NamedTuple):
    """attention_prefill: tiles of keys and of values that may wait, whether q stays in registers."""

    stages: int
    q_registers: bool


class Decode(NamedTuple):
    """attention_decode: key tiles at a time, one a warp."""

    tiles: int


# Bits do not depend on the choice.
CANDIDATES = (
    Schedule(16, 1, 2), Schedule(16, 1, 3), Schedule(64, 4, 1), Schedule(64, 4, 3), Schedule(128, 8, 3),
    Prefill(4, True), Prefill(4, False), Prefill(3, True), Prefill(2, True), Decode(1), Decode(2), Decode(4),
)  # fmt: skip


def fits(schedule, longest: int, group: int, H: int) -> bool:
    """Whether a schedule takes this many new tokens of a sequence, query heads a key/value head and head size."""
    if isinstance(schedule, Schedule):
        return group <= schedule.rows and schedule.warps * 16 <= schedule.rows
    return H in (64, 128) and (group <= 64 if isinstance(schedule, Prefill) else longest * group <= 16)


def choose(longest: int, group: int, H: int, contiguous: bool) -> Schedule | Prefill | Decode:
    """For the most query tokens of one sequence and the query heads of a key/value head; from times on an H200."""
    for schedule in (Decode(4), Prefill(4, True) if longest * group > 64 else Schedule(64, 4, 1)):
        if fits(schedule, longest, group, H):
            return schedule
    # Row numbers are loaded before rows: more stages only hold more registers.
    return Schedule(128, 8, 3) if contiguous and longest * group > 64 else Schedule(64, 4, 1)


def _kept(batch: Batch, name: str, home: torch.device, make) -> Tensor:
    """int32 numbers of a batch on the GPU, copied once (all layers share them)."""
    kept = batch.__dict__.setdefault("_bounds_on", {})
    if (name, home) not in kept:
        kept[name, home] = torch.tensor(make(), dtype=torch.int32, device=home)
    return kept[name, home]


def _bounds(batch: Batch, home: torch.device) -> Tensor:
    return _kept(batch, "bounds", home, lambda: batch.cu_seqlens)


def _contiguous(batch: Batch, store_rows: int) -> bool:
    """Whether position j of a sequence lies in row cu_seqlens + j: then no row number has to be read. Proved once."""
    if store_rows != batch.cu_seqlens[-1]:
        return False
    if "_contiguous" not in batch.__dict__:
        rows = batch.key_rows_SL
        j = torch.arange(rows.shape[1], device=rows.device)
        starts, lengths = (torch.tensor(x, device=rows.device)[:, None] for x in (batch.cu_seqlens[:-1], batch.kv_lens))
        batch.__dict__["_contiguous"] = bool(((rows == starts + j) | (j >= lengths)).all())
    return batch.__dict__["_contiguous"]


def _prefill(schedule: Prefill, q, k, v, batch: Batch, positions, key_rows, bounds, longest: int, outputs) -> None:
    starts = bounds
    if not _contiguous(batch, k.shape[0]):
        starts = _kept(batch, "starts", q.device, lambda: attention_prefill.starts(batch.kv_lens))
        k, v = attention_prefill.gather(k, v, key_rows, positions, bounds, starts, batch.kv_lens)
    attention_prefill.forward(q, k, v, positions, bounds, starts, longest, outputs, *schedule)


def _tiles(schedule: Schedule | Decode, q, k, v, batch: Batch, positions, key_rows, bounds, longest, outputs) -> None:
    (T, N, H), G, (o, m, l) = q.shape, k.shape[1], outputs
    tokens = (schedule.rows if isinstance(schedule, Schedule) else 16) // (N // G)
    # Few queries with many keys: every segment is a program. The grid is that of the longest table of pages.
    segments = triton.cdiv(key_rows.shape[1], SEGMENT)
    split = segments > 1 and longest <= tokens
    m_s, l_s, acc_s = m, l, m
    if split:
        m_s, l_s = torch.empty(2, segments * T * N, device=q.device)
        acc_s = torch.empty(segments * T * N * H, device=q.device)
    pairs = G * (segments if split else 1)
    common = (
        q, k, v, positions, key_rows, bounds, o, m_s, l_s, acc_s, float(_scale(H)), N, G * H, key_rows.shape[1],
        T * N, N // G, H,
    )  # fmt: skip
    if isinstance(schedule, Decode):
        attention_decode.decode_kernel[(pairs, batch.num_sequences)](
            *common, KEY_TILE, SEGMENT, schedule.tiles, split, num_warps=schedule.tiles, **device.STRICT
        )
    else:
        attention_kernel[(triton.cdiv(longest, tokens), pairs, batch.num_sequences)](
            *common, triton.next_power_of_2(H), schedule.rows, KEY_TILE, SEGMENT, _contiguous(batch, k.shape[0]), split,
            num_warps=schedule.warps, num_stages=schedule.stages, **device.STRICT,
        )  # fmt: skip
    if split:
        fold_kernel[(T * N,)](
            m_s, l_s, acc_s, positions, o, m, l, N, T * N, H, triton.next_power_of_2(H), SEGMENT, 16,
            num_warps=1, **device.STRICT,
        )  # fmt: skip


def forward(
    q_TNH: Tensor, k_RGH: Tensor, v_RGH: Tensor, batch: Batch, schedule: Schedule | Prefill | Decode | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 q [T, N, H], store k, v [rows, G, H] and the batch on one Hopper GPU -> (o BF16, m, l FP32 [T, N]).

    Scratch: for few queries 4 (H + 2) bytes a query head and 1024 keys, for many a copy of the keys and values if they
    lie in pages.
    """
    home = q_TNH.device
    q, k, v = device.take("attention", home, torch.bfloat16, q_TNH, k_RGH, v_RGH)
    positions, key_rows = device.take("attention", home, torch.int64, batch.positions_T, batch.key_rows_SL)
    (T, N, H), G = q.shape, k.shape[1]
    outputs = torch.empty_like(q), *(torch.empty(T, N, device=home) for _ in range(2))
    longest = max((b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)), default=0)
    if longest == 0:
        return outputs
    schedule = schedule or choose(longest, N // G, H, _contiguous(batch, k.shape[0]))
    if not fits(schedule, longest, N // G, H):
        raise ValueError(f"attention: {schedule} does not take {longest} x {N // G} rows of {H}")
    bounds = _bounds(batch, home)
    with torch.cuda.device(home):
        run = _prefill if isinstance(schedule, Prefill) else _tiles
        run(schedule, q, k, v, batch, positions, key_rows, bounds, longest, outputs)
    return outputs
