"""attention/2 on Hopper: which kernel takes a batch (ops/attention.py has the spec).

The hardware's exp2 and the order of tl.sum over a tile whose rows belong to one warp each are the spec's exp2_hw and
quad_sum. So a tile has at least 16 rows a warp and 64 keys, and nothing else about a schedule matters. A tile's rows
are (token, query head) pairs that share a key/value head.

attention_prefill  many queries: keys by the copy engine, out of their pages or, where that costs more, of one copy
attention_decode   few queries: one segment of keys a program, then attention_fold
attention_warp     few queries, many segments of keys: the same, by one warp each
attention_cluster  few queries and few segments: several blocks share one
attention_tiles    everything else: any head size, any number of query heads
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import (
    attention_cluster,
    attention_decode,
    attention_fold,
    attention_pages,
    attention_prefill,
    attention_tiles,
    attention_warp,
    device,
)
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on


class Schedule(NamedTuple):
    """attention_kernel: rows of a tile (token, head), warps (at most rows / 16: a row belongs to one warp), stages."""

    rows: int
    warps: int
    stages: int


class Prefill(NamedTuple):
    """attention_prefill: groups of four warps, with 64 rows each, of a program; 2 or 3."""

    groups: int


class Decode(NamedTuple):
    """attention_decode: key tiles at a time, one a warp."""

    tiles: int


class Alone(NamedTuple):
    """attention_warp: half tiles of keys or values that a warp has in shared memory."""

    slots: int


class Cluster(NamedTuple):
    """attention_cluster: blocks that share a segment."""

    blocks: int


RINGS = 7, 5, 4  # of Alone
# Bits do not depend on the choice.
CANDIDATES = (
    Schedule(16, 1, 3), Schedule(64, 4, 1), Schedule(64, 4, 3), Schedule(128, 8, 3),
    Prefill(2), Prefill(3), Decode(2), Decode(4), *map(Alone, RINGS), Cluster(4), Cluster(8),
)  # fmt: skip


def fits(schedule, longest: int, group: int, H: int) -> bool:
    """Whether a schedule takes this many new tokens of a sequence, query heads a key/value head and head size."""
    if isinstance(schedule, Schedule):
        return group <= schedule.rows and schedule.warps * 16 <= schedule.rows
    if isinstance(schedule, Cluster):
        return attention_cluster.fits(longest, group, H, schedule.blocks)
    return H in (64, 128) and (group <= 64 if isinstance(schedule, Prefill) else longest * group <= 16)


def _alone(H: int, programs: int, processors: int) -> Alone:
    """The deepest ring, unless another leaves a tenth fewer places empty while the last programs run."""

    def places(slots: int) -> int:
        at_once = processors * max(1, attention_warp.resident(H, slots))  # none of heads that it doesn't take
        return programs if programs <= at_once else cdiv(programs, at_once) * at_once

    best = min(RINGS, key=places)
    return Alone(best if places(best) < 0.9 * places(RINGS[0]) else RINGS[0])


def choose(
    longest: int, group: int, H: int, contiguous: bool, segments: int = 1, programs: int = 1, processors: int = 132
) -> Schedule | Prefill | Decode | Alone | Cluster:
    """For the most query tokens of one sequence, the query heads of a key/value head, the segments of the longest
    sequence and those of all sequences and key/value heads; processors of the GPU. From times on an H200, which has
    132."""
    # Few programs need their warps each; many share a processor.
    few = Decode(4) if programs <= processors else Decode(2) if programs <= 2 * processors else None
    few = few or _alone(H, programs, processors)
    if segments == 1 and programs <= attention_cluster.FEW:  # of more segments only 8 were timed: slower
        few = Cluster(attention_cluster.blocks_for(H, programs))
    # A tile takes some 1,800 cycles with two groups and 2,300 with three; a processor does one program after another.
    rows, pairs = max(64 // group, 1), programs // segments
    two, three = (cycles * cdiv(cdiv(longest, rows * n) * pairs, processors) for n, cycles in ((2, 18), (3, 23)))
    many = Prefill(2 if two < three else 3)
    for schedule in (few, many if longest * group > 64 else Schedule(64, 4, 1)):
        if fits(schedule, longest, group, H):
            return schedule
    # Row numbers are loaded before rows: more stages only hold more registers.
    return Schedule(128, 8, 3) if contiguous and longest * group > 64 else Schedule(64, 4, 1)


def _kept(batch: Batch, name: str, home: torch.device, make) -> Tensor:
    """int32 numbers of a batch on the GPU, copied once (all layers share them)."""
    kept = batch.__dict__.setdefault("_bounds_on", {})
    if (name, home) not in kept:
        made = torch.tensor(make(), dtype=torch.int32)
        # Pinned, so that the host goes on while the GPU still computes what came before.
        kept[name, home] = made.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else made
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


def _lie_together(schedule: Prefill, batch: Batch, group: int, G: int, H: int, home: torch.device) -> int:
    """How many keys of a page a load brings; 0: pages are copied first."""
    together, tokens = attention_prefill.box(batch.page_size), attention_prefill.ROWS // group * schedule.groups
    new = [b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    # Pieces of work and how many tiles one has on average.
    work = [(cdiv(n, tokens) * G, (kv_len - n // 2) // KEY_TILE) for n, kv_len in zip(new, batch.kv_lens, strict=True)]
    evenly = sum(pieces * tiles for pieces, tiles in work) // device.multiprocessors(home)
    tiles = max(evenly, max(tiles for _, tiles in work))
    return together if attention_prefill.from_pages(together, tiles, sum(batch.kv_lens), G * H) else 0


def _prefill(schedule: Prefill, q, k, v, batch: Batch, positions, key_rows, bounds, longest: int, outputs) -> None:
    (_, N, H), G, home = q.shape, k.shape[1], q.device
    starts, pages = bounds, None
    if not _contiguous(batch, k.shape[0]):
        together = _lie_together(schedule, batch, N // G, G, H, home)
        starts, pages = None, (key_rows, together)
        if not together:
            starts, pages = _kept(batch, "starts", home, lambda: attention_pages.starts(batch.kv_lens)), None
            k, v = attention_pages.gather(k, v, key_rows, positions, bounds, starts, batch.kv_lens)
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))  # the copy engine wants that
    attention_prefill.forward(q, k, v, positions, bounds, starts, pages, longest, outputs, *schedule)


def _tiles(schedule, q, k, v, batch: Batch, positions, key_rows, bounds, longest, outputs) -> None:
    (T, N, H), G, (o, m, l) = q.shape, k.shape[1], outputs
    tokens = (schedule.rows if isinstance(schedule, Schedule) else 16) // (N // G)
    # Few queries with many keys: every segment is a program. The grid is that of the longest table of pages.
    segments = cdiv(key_rows.shape[1], SEGMENT)
    split = segments > 1 and longest <= tokens
    m_s, l_s, acc_s = m, l, m
    if split:
        m_s, l_s = torch.empty(2, segments * T * N, dtype=torch.float32, device=q.device)
        acc_s = torch.empty(segments * T * N * H, dtype=torch.float32, device=q.device)
    pairs = G * (segments if split else 1)
    common = (
        q, k, v, positions, key_rows, bounds, o, m_s, l_s, acc_s, float(_scale(H)), N, G * H, key_rows.shape[1],
        T * N, N // G, H,
    )  # fmt: skip
    if isinstance(schedule, Alone | Cluster):
        parts = o, m_s, l_s, acc_s if split else None
        kernel = attention_warp if isinstance(schedule, Alone) else attention_cluster
        more = (attention_prefill.box(batch.page_size) or 1,) if isinstance(schedule, Alone) else ()
        kernel.launch(*schedule, longest, q, k, v, positions, key_rows, bounds, parts, segments, *more)
    elif isinstance(schedule, Decode):
        attention_decode.decode_kernel[(pairs, batch.num_sequences)](
            *common, KEY_TILE, SEGMENT, schedule.tiles, split,
            num_warps=schedule.tiles, **device.STRICT, **device.EARLY,
        )  # fmt: skip
    else:
        attention_tiles.attention_kernel[(cdiv(longest, tokens), pairs, batch.num_sequences)](
            *common, next_power_of_2(H), schedule.rows, KEY_TILE, SEGMENT, _contiguous(batch, k.shape[0]), split,
            num_warps=schedule.warps, num_stages=schedule.stages, **device.STRICT,
        )  # fmt: skip
    if split:
        attention_fold.fold((m_s, l_s, acc_s), positions, outputs)


def forward(
    q_TNH: Tensor,
    k_RGH: Tensor,
    v_RGH: Tensor,
    batch: Batch,
    schedule: Schedule | Prefill | Decode | Alone | Cluster | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 q [T, N, H], store k, v [rows, G, H] and the batch on one Hopper GPU -> (o BF16, m, l FP32 [T, N]).

    Scratch: for few queries 4 (H + 2) bytes a query head and 1024 keys, for many perhaps a copy of the keys and values
    if they lie in pages.
    """
    home = q_TNH.device
    q, k, v = device.take("attention", home, torch.bfloat16, q_TNH, k_RGH, v_RGH)
    positions, key_rows = device.take("attention", home, torch.int64, batch.positions_T, batch.key_rows_SL)
    (T, N, H), G = q.shape, k.shape[1]
    outputs = torch.empty_like(q), *(torch.empty(T, N, dtype=torch.float32, device=home) for _ in range(2))
    longest = max((b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)), default=0)
    if longest == 0:
        return outputs
    segments = cdiv(key_rows.shape[1], SEGMENT)
    contiguous = _contiguous(batch, k.shape[0])
    if schedule is None:
        programs, processors = segments * G * batch.num_sequences, device.multiprocessors(home)
        schedule = choose(longest, N // G, H, contiguous, segments, programs, processors)
    if not fits(schedule, longest, N // G, H):
        raise ValueError(f"attention: {schedule} does not take {longest} x {N // G} rows of {H}")
    bounds = _bounds(batch, home)
    with on(home):
        run = _prefill if isinstance(schedule, Prefill) else _tiles
        run(schedule, q, k, v, batch, positions, key_rows, bounds, longest, outputs)
    return outputs
