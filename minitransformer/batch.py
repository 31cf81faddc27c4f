"""One forward pass's worth of tokens: which ids, at which positions, and where their keys and values live.

The learner's packed batch and the sampler's paged batch are the same object. A packed batch is a paged one whose
key/value store is the batch itself, so attention has a single definition.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError, RowError


@dataclass(frozen=True)
class Batch:
    """S sequences, T query tokens, one after another.

    ids_T, positions_T      int64 [T]; a position is absolute within its own sequence
    cu_seqlens              S + 1 bounds of the sequences' query tokens in T
    kv_lens                 S: keys that the last query of a sequence sees (its position + 1)
    key_rows_SL             int64 [S, max(kv_lens)]: row of the key/value store of absolute position j; -1 past the end
    store_rows_T            int64 [T]: row of the store that takes token t's own key and value
    logit_rows_L            int64 [L]: rows of T whose logits are wanted; None means all
    request_ids             S: names of the sequences in traces
    num_store_rows          rows that the store must have at least
    page_size               rows that lie together: those of positions j with equal j // page_size
    """

    ids_T: Tensor
    positions_T: Tensor
    cu_seqlens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    key_rows_SL: Tensor
    store_rows_T: Tensor
    logit_rows_L: Tensor | None
    request_ids: tuple[int, ...]
    num_store_rows: int
    page_size: int = 1

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on a device; bounds and lengths stay on the host."""
        names = ("ids_T", "positions_T", "key_rows_SL", "store_rows_T", "logit_rows_L")
        moved = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **moved)

    def faults(self, error: RowError) -> dict[int, str]:
        """Whose tokens an operator has refused: sequence of the batch -> 'position P, layer I, op: what'.

        Several positions are not all to blame: attention multiplies a masked value by 0, so that a NaN reaches the
        sequence's earlier rows in its tile of keys too (never another sequence). A GPU tells one row at a time.
        """
        positions: dict[int, list[int]] = {}
        for row in error.rows:
            positions.setdefault(bisect_right(self.cu_seqlens, row) - 1, []).append(int(self.positions_T[row]))
        where = {s: f"position {p[0]}" if len(p) == 1 else f"positions {p[0]} to {p[-1]}" for s, p in positions.items()}
        return {s: f"{text}, {error.reason}" for s, text in where.items()}

    @classmethod
    def packed(cls, sequences: Sequence[Sequence[int]], request_ids: Sequence[int] | None = None) -> "Batch":
        """Whole sequences from position 0; keys and values are the batch's own. ValueError on an empty sequence."""
        lengths = [len(s) for s in sequences]
        _refuse_empty(lengths)
        starts = _bounds(lengths)
        rows = torch.full((len(lengths), max(lengths)), -1, dtype=torch.int64)
        for s, n in enumerate(lengths):
            rows[s, :n] = torch.arange(starts[s], starts[s + 1])
        return cls(
            ids_T=torch.tensor([i for s in sequences for i in s], dtype=torch.int64),
            positions_T=torch.cat([torch.arange(n) for n in lengths]),
            cu_seqlens=starts,
            kv_lens=tuple(lengths),
            key_rows_SL=rows,
            store_rows_T=torch.arange(starts[-1]),
            logit_rows_L=None,
            request_ids=_names(request_ids, len(lengths)),
            num_store_rows=starts[-1],
        )

    @classmethod
    def paged(
        cls,
        new_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        logit_rows: Sequence[int] | None = None,
        request_ids: Sequence[int] | None = None,
    ) -> "Batch":
        """New tokens new_ids[s] at positions starts[s].. of sequences whose keys live in pages page_tables[s]."""
        lengths = [len(ids) for ids in new_ids]
        _refuse_empty(lengths)
        kv_lens = [start + n for start, n in zip(starts, lengths, strict=True)]
        needed, longest = [-(-kv_len // page_size) for kv_len in kv_lens], max(kv_lens)
        tables_SP = np.zeros((len(lengths), max(needed)), np.int64)
        for s, count in enumerate(needed):
            tables_SP[s, :count] = page_tables[s][:count]
        rows_SL = tables_SP[:, :, None] * page_size + np.arange(min(page_size, longest))
        rows_SL = rows_SL.reshape(len(lengths), -1)[:, :longest]
        rows_SL = np.where(np.arange(longest) < np.array(kv_lens)[:, None], rows_SL, -1)
        spans = [slice(a, b) for a, b in zip(starts, kv_lens, strict=True)]
        return cls(
            ids_T=torch.tensor([i for ids in new_ids for i in ids], dtype=torch.int64),
            positions_T=torch.from_numpy(np.concatenate([np.arange(x.start, x.stop) for x in spans])),
            cu_seqlens=_bounds(lengths),
            kv_lens=tuple(kv_lens),
            key_rows_SL=torch.from_numpy(rows_SL),
            store_rows_T=torch.from_numpy(np.concatenate([rows_SL[s, span] for s, span in enumerate(spans)])),
            logit_rows_L=None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
            request_ids=_names(request_ids, len(lengths)),
            num_store_rows=int(rows_SL.max()) + 1,
            page_size=page_size,
        )


def _refuse_empty(lengths: Sequence[int]) -> None:
    if not lengths or 0 in lengths:
        raise ValueError("Batch: a batch has at least one sequence, and every sequence at least one token")


def _names(request_ids: Sequence[int] | None, count: int) -> tuple[int, ...]:
    names = tuple(range(count) if request_ids is None else request_ids)
    if len(names) != count:
        raise InputError(f"{len(names)} request ids for {count} sequences: give one each, or None for 0, 1, ...")
    return names


def _bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return tuple(bounds)
