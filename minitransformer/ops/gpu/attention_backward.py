"""attention/1 on Hopper, the gradients of a packed batch (ops/attention.py has the spec); memory is linear in tokens.

Each chain of the spec belongs to one program, so nothing is added by atomics: one kernel walks the queries of a key
tile for dK and dV (all heads of the group, one after another), another the keys of a query tile for dQ. Both make the
scores again, by the forward's own chain, so that p is what the saved m and l were taken from. Tiles start at a multiple
of 16 within the sequence and zero products change no accumulator, so neither tiles nor masks move a bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops.attention import _scale
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.attention import _bounds
from minitransformer.ops.gpu.launch import Window, cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LANES, div, lane_tree
from minitransformer.ops.gpu.tiles import to_bf16


@quick
@triton.jit(do_not_specialize=["T"])
def stats_kernel(
    do_ptr, o_ptr, m_ptr, l_ptr, stats_ptr, T, N: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """stats FP32 [3, N, T]: m, 1 / l and delta = lane sum of dO * O, laid out as the tiles read them."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane, valid = tl.arange(0, LANES)[None, :], line < T * N
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for h0 in tl.static_range(0, HEAD, LANES):
        at, inside = line[:, None] * HEAD + h0 + lane, valid[:, None] & (h0 + lane < HEAD)
        do = tl.load(do_ptr + at, mask=inside, other=0.0).to(tl.float32)
        lanes = tl.where(inside, lanes + do * tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32), lanes)
    out = stats_ptr + (line % N) * T + line // N
    tl.store(out, tl.load(m_ptr + line, mask=valid, other=0.0), mask=valid)
    l = tl.load(l_ptr + line, mask=valid, other=1.0)
    tl.store(out + T * N, div(tl.full((ROWS,), 1.0, tl.float32), l), mask=valid)
    tl.store(out + 2 * T * N, lane_tree(lanes, ROWS), mask=valid)


@triton.jit
def _rows(desc, ptr, row, head, end, stride, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
          TAIL: tl.constexpr):  # fmt: skip
    """[ROWS, WIDTH] of one head from a row on; TAIL: zeros from the sequence's end on, whatever lies there."""
    if TAIL:
        r, h = row + tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
        x = tl.load(ptr + r.to(tl.int64) * stride + head * HEAD + h, mask=(r < end) & (h < HEAD), other=0.0)
    else:
        x = tl.reshape(desc.load([row, head, 0]), (ROWS, WIDTH))
    return x


@triton.jit
def _stats(stats_ptr, row, i, n, head, T, N):
    """m, 1 / l and delta of queries i; zeros past the end, so that p is 0 there."""
    at, plane = stats_ptr + head * T + row + i, T * N
    m = tl.load(at, mask=i < n, other=0.0)
    return m, tl.load(at + plane, mask=i < n, other=0.0), tl.load(at + 2 * plane, mask=i < n, other=0.0)


@triton.jit
def _queries(
    dk, dv, k, v, q_desc, do_desc, q_ptr, do_ptr, stats_ptr, i0, j, n, row0, head, T, N, scale,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Adds one tile of queries of one head to dK and dV; keys are the rows of every product."""
    i = i0 + tl.arange(0, QUERIES)
    q = _rows(q_desc, q_ptr, row0 + i0, head, row0 + n, N * HEAD, HEAD, WIDTH, QUERIES, TAIL)
    do = _rows(do_desc, do_ptr, row0 + i0, head, row0 + n, N * HEAD, HEAD, WIDTH, QUERIES, TAIL)
    m, inverse, delta = _stats(stats_ptr, row0, i, n, head, T, N)
    keep = j[:, None] <= i[None, :]
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - m[None, :]) * inverse[None, :]
    if MASKED:
        p = tl.where(keep, p, 0.0)
    dv = tl.dot(p.to(tl.bfloat16), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    if MASKED:  # dP may be NaN where p is 0
        ds = tl.where(keep, ds, 0.0)
    return tl.dot(ds.to(tl.bfloat16), q, dk), dv


@quick
@triton.jit(do_not_specialize=["T"])
def dkv_kernel(
    q_desc, do_desc, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, bounds_ptr, dk_ptr, dv_ptr, scale, unit, T, N, G,
    GROUP: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (key/value head, sequence, tile of keys); the tiles with the most queries start first."""
    g, sequence, j0 = tl.program_id(0), tl.program_id(1), tl.program_id(2) * KEYS
    row0 = tl.load(bounds_ptr + sequence)
    n = tl.load(bounds_ptr + sequence + 1) - row0
    if j0 >= n:
        return
    j, h = j0 + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    k = _rows(k_ptr, k_ptr, row0 + j0, g, row0 + n, G * HEAD, HEAD, WIDTH, KEYS, True)
    v = _rows(v_ptr, v_ptr, row0 + j0, g, row0 + n, G * HEAD, HEAD, WIDTH, KEYS, True)
    dk, dv = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    last = n // QUERIES * QUERIES  # queries from here on do not fill a tile
    for head in range(g * GROUP, (g + 1) * GROUP):
        for i0 in range(j0, tl.minimum(j0 + KEYS, last), QUERIES):  # some queries see only some of the keys
            dk, dv = _queries(dk, dv, k, v, q_desc, do_desc, q_ptr, do_ptr, stats_ptr, i0, j, n, row0, head, T, N,
                              scale, HEAD, WIDTH, QUERIES, True, False)  # fmt: skip
        for i0 in range(j0 + KEYS, last, QUERIES):
            dk, dv = _queries(dk, dv, k, v, q_desc, do_desc, q_ptr, do_ptr, stats_ptr, i0, j, n, row0, head, T, N,
                              scale, HEAD, WIDTH, QUERIES, False, False)  # fmt: skip
        for i0 in range(tl.maximum(j0, last), n, QUERIES):
            dk, dv = _queries(dk, dv, k, v, q_desc, do_desc, q_ptr, do_ptr, stats_ptr, i0, j, n, row0, head, T, N,
                              scale, HEAD, WIDTH, QUERIES, True, True)  # fmt: skip
    at = (row0 + j[:, None]).to(tl.int64) * (G * HEAD) + g * HEAD + h[None, :]
    inside = (j < n)[:, None] & (h < HEAD)[None, :]
    tl.store(dk_ptr + at, to_bf16(dk * unit), mask=inside)
    tl.store(dv_ptr + at, to_bf16(dv), mask=inside)


@triton.jit
def _keys(
    dq, q, do, m, inverse, delta, k_desc, v_desc, k_ptr, v_ptr, j0, i, n, row0, g, G, scale,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to dQ."""
    j = j0 + tl.arange(0, KEYS)
    k = _rows(k_desc, k_ptr, row0 + j0, g, row0 + n, G * HEAD, HEAD, WIDTH, KEYS, TAIL)
    v = _rows(v_desc, v_ptr, row0 + j0, g, row0 + n, G * HEAD, HEAD, WIDTH, KEYS, TAIL)
    s, dp = tl.dot(q, tl.trans(k)), tl.dot(do, tl.trans(v))
    ds = (tl.exp2(s * scale - m[:, None]) * inverse[:, None]) * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(j[None, :] <= i[:, None], ds, 0.0)
    return tl.dot(ds.to(tl.bfloat16), k, dq)


@quick
@triton.jit(do_not_specialize=["T"])
def dq_kernel(
    k_desc, v_desc, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, bounds_ptr, dq_ptr, scale, unit, T, N, G,
    GROUP: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence, tile of queries); late queries see the most keys and start first."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    i0, g = (tl.num_programs(2) - 1 - tl.program_id(2)) * QUERIES, head // GROUP
    row0 = tl.load(bounds_ptr + sequence)
    n = tl.load(bounds_ptr + sequence + 1) - row0
    if i0 >= n:
        return
    i, h = i0 + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    q = _rows(q_ptr, q_ptr, row0 + i0, head, row0 + n, N * HEAD, HEAD, WIDTH, QUERIES, True)
    do = _rows(do_ptr, do_ptr, row0 + i0, head, row0 + n, N * HEAD, HEAD, WIDTH, QUERIES, True)
    m, inverse, delta = _stats(stats_ptr, row0, i, n, head, T, N)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    whole = (i0 + 1) // KEYS * KEYS  # keys that every row sees
    seen = tl.minimum(i0 + QUERIES, n)
    last = tl.maximum(whole, seen // KEYS * KEYS)  # a tile of keys from here on may pass the sequence's end
    for j0 in range(0, whole, KEYS):
        dq = _keys(dq, q, do, m, inverse, delta, k_desc, v_desc, k_ptr, v_ptr, j0, i, n, row0, g, G, scale,
                   HEAD, WIDTH, KEYS, False, False)  # fmt: skip
    for j0 in range(whole, last, KEYS):
        dq = _keys(dq, q, do, m, inverse, delta, k_desc, v_desc, k_ptr, v_ptr, j0, i, n, row0, g, G, scale,
                   HEAD, WIDTH, KEYS, True, False)  # fmt: skip
    for j0 in range(last, seen, KEYS):
        dq = _keys(dq, q, do, m, inverse, delta, k_desc, v_desc, k_ptr, v_ptr, j0, i, n, row0, g, G, scale,
                   HEAD, WIDTH, KEYS, True, True)  # fmt: skip
    at = (row0 + i[:, None]).to(tl.int64) * (N * HEAD) + head * HEAD + h[None, :]
    tl.store(dq_ptr + at, to_bf16(dq * unit), mask=(i < n)[:, None] & (h < HEAD)[None, :])


class Schedule(NamedTuple):
    """The tile that a program owns, the tile that it walks over, warps, stages; moves no bit."""

    own: int
    walk: int
    warps: int
    stages: int


DKV_CANDIDATES = (
    Schedule(64, 64, 4, 2), Schedule(64, 32, 4, 3), Schedule(128, 64, 8, 2), Schedule(128, 64, 8, 3),
    Schedule(128, 32, 8, 3), Schedule(128, 32, 8, 4), Schedule(64, 32, 4, 2),
)  # fmt: skip
DQ_CANDIDATES = (
    Schedule(64, 64, 4, 2), Schedule(64, 32, 4, 3), Schedule(128, 64, 8, 2), Schedule(128, 64, 8, 3),
    Schedule(128, 128, 8, 2), Schedule(64, 128, 4, 2),
)  # fmt: skip


def choose(longest: int) -> tuple[Schedule, Schedule]:
    """(for dK and dV, for dQ), by the longest sequence of the batch; the fastest on an H200 at 4 x 4096 tokens."""
    return Schedule(64, 64, 4, 2), Schedule(64, 64, 4, 2) if longest <= 64 else Schedule(128, 64, 8, 3)


def _descriptor(x_TNH: Tensor, rows: int, width: int) -> Window:
    return Window(x_TNH, (rows, 1, width))


def backward(
    do_TNH: Tensor, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, o_TNH: Tensor, m_TN: Tensor, l_TN: Tensor,
    batch: Batch, schedules: tuple[Schedule, Schedule] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dO, q, o [T, N, H], k, v [T, G, H] BF16, m, l [T, N] FP32 of a packed batch -> dQ, dK, dV BF16."""
    home = q_TNH.device
    do, q, k, v, o = device.take("attention", home, torch.bfloat16, do_TNH, q_TNH, k_TGH, v_TGH, o_TNH)
    m, l = device.take("attention", home, torch.float32, m_TN, l_TN)
    (T, N, H), G = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    longest = max((b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)), default=0)
    if longest == 0 or dq.numel() == 0:
        return dq, dk, dv
    for_kv, for_q = schedules or choose(longest)
    width, sequences, bounds = next_power_of_2(H), batch.num_sequences, _bounds(batch, home)
    stats = torch.empty(3, N, T, dtype=torch.float32, device=home)
    numbers, shape = (float(_scale(H)), float(H**-0.5), T, N, G), (N // G, H, width)
    with on(home):
        rows = max(1, 1024 // LANES.value)
        stats_kernel[(cdiv(T * N, rows),)](do, o, m, l, stats, T, N, H, rows, num_warps=4, **device.ROWS)
        dkv_kernel[(G, sequences, cdiv(longest, for_kv.own))](
            _descriptor(q, for_kv.walk, width), _descriptor(do, for_kv.walk, width), q, k, v, do, stats, bounds, dk, dv,
            *numbers, *shape, for_kv.own, for_kv.walk, num_warps=for_kv.warps, num_stages=for_kv.stages,
            **device.STRICT,
        )  # fmt: skip
        dq_kernel[(N, sequences, cdiv(longest, for_q.own))](
            _descriptor(k, for_q.walk, width), _descriptor(v, for_q.walk, width), q, k, v, do, stats, bounds, dq,
            *numbers, *shape, for_q.own, for_q.walk, num_warps=for_q.warps, num_stages=for_q.stages,
            **device.STRICT,
        )  # fmt: skip
    return dq, dk, dv
