"""attention/1 on Hopper: one kernel for packed and paged stores, prefill and decode (ops/attention.py has the spec).

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
from minitransformer.ops.attention import KEY_TILE, _scale
from minitransformer.ops.gpu import device
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
def attention_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, key_rows_ptr, bounds_ptr, o_ptr, m_ptr, l_ptr, scale, N, stride, max_keys,
    GROUP: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, key/value head, sequence). q, o [T, N, HEAD]; k, v rows of `stride` elements."""
    TOKENS: tl.constexpr = ROWS // GROUP
    # Late queries see the most keys: they start first.
    block, g, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row0, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    first = row0 + block * TOKENS
    if first >= end:
        return
    i, h = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    valid = (i < TOKENS * GROUP) & (first + i // GROUP < end)
    token = tl.where(valid, first + i // GROUP, first)  # spare rows repeat the first token and are not stored
    line = token.to(tl.int64) * N + g * GROUP + i % GROUP
    position = tl.load(positions_ptr + token).to(tl.int32)
    begin = tl.load(positions_ptr + first).to(tl.int32)
    last = tl.load(positions_ptr + tl.minimum(first + TOKENS, end) - 1).to(tl.int32)
    q = tl.load(q_ptr + line[:, None] * HEAD + h[None, :], mask=(h < HEAD)[None, :], other=0.0)
    k_head, v_head = k_ptr + g * HEAD, v_ptr + g * HEAD
    rows_ptr = key_rows_ptr + sequence.to(tl.int64) * max_keys
    m, l = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    whole = (begin + 1) // KEYS * KEYS  # tiles that every row sees in full
    for j0 in range(0, whole, KEYS):
        acc, m, l = _keys(q, acc, m, l, k_head, v_head, rows_ptr, j0, position, last, row0, stride, scale,
                          HEAD, WIDTH, KEYS, False, CONTIGUOUS)  # fmt: skip
    for j0 in range(whole, last + 1, KEYS):
        acc, m, l = _keys(q, acc, m, l, k_head, v_head, rows_ptr, j0, position, last, row0, stride, scale,
                          HEAD, WIDTH, KEYS, True, CONTIGUOUS)  # fmt: skip
    o = to_bf16(tl.math.div_rn(acc, tl.broadcast_to(l[:, None], (ROWS, WIDTH))))
    tl.store(o_ptr + line[:, None] * HEAD + h[None, :], o, mask=valid[:, None] & (h < HEAD)[None, :])
    tl.store(m_ptr + line, m, mask=valid)
    tl.store(l_ptr + line, l, mask=valid)


class Schedule(NamedTuple):
    """Rows of a tile (token, head), warps (at most rows / 16: a row belongs to one warp), stages; moves no bit."""

    rows: int
    warps: int
    stages: int


CANDIDATES = (
    Schedule(16, 1, 2), Schedule(16, 1, 3), Schedule(16, 1, 4), Schedule(64, 4, 1), Schedule(64, 4, 2),
    Schedule(64, 4, 3), Schedule(128, 4, 2), Schedule(128, 8, 2), Schedule(128, 8, 3),
)  # fmt: skip


def choose(longest: int, group: int, contiguous: bool) -> Schedule:
    """For the most query tokens of one sequence and the query heads of a key/value head; from times on an H200."""
    # One warp for 16 rows would hold 64 keys of 128 in registers and spill; four load faster besides.
    if longest * group <= 64:
        return Schedule(64, 4, 2)
    # Row numbers are loaded before rows: more stages only hold more registers.
    return Schedule(128, 8, 3) if contiguous else Schedule(64, 4, 1)


def _bounds(batch: Batch, home: torch.device) -> Tensor:
    """cu_seqlens as int32 on the GPU, copied once a batch (all layers share it)."""
    kept = batch.__dict__.setdefault("_bounds_on", {})
    if home not in kept:
        kept[home] = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=home)
    return kept[home]


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


def forward(
    q_TNH: Tensor, k_RGH: Tensor, v_RGH: Tensor, batch: Batch, schedule: Schedule | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 q [T, N, H], store k, v [rows, G, H] and the batch on one Hopper GPU -> (o BF16, m, l FP32 [T, N])."""
    home = q_TNH.device
    q, k, v = device.take("attention", home, torch.bfloat16, q_TNH, k_RGH, v_RGH)
    positions, key_rows = device.take("attention", home, torch.int64, batch.positions_T, batch.key_rows_SL)
    (T, N, H), G = q.shape, k.shape[1]
    o, m, l = torch.empty_like(q), *(torch.empty(T, N, device=home) for _ in range(2))
    longest = max((b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)), default=0)
    if longest == 0:
        return o, m, l
    contiguous = _contiguous(batch, k.shape[0])
    schedule = schedule or choose(longest, N // G, contiguous)
    tokens = schedule.rows // (N // G)
    if tokens == 0 or schedule.warps * 16 > schedule.rows:
        raise ValueError(f"attention: {schedule} does not take {N // G} query heads a key/value head")
    with torch.cuda.device(home):
        attention_kernel[(triton.cdiv(longest, tokens), G, batch.num_sequences)](
            q, k, v, positions, key_rows, _bounds(batch, home), o, m, l, float(_scale(H)), N, G * H,
            key_rows.shape[1], N // G, H, triton.next_power_of_2(H), schedule.rows, KEY_TILE,
            contiguous, num_warps=schedule.warps, num_stages=schedule.stages, **device.STRICT,
        )  # fmt: skip
    return o, m, l
