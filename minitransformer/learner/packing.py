"""Sequences in, packed batches out, and the way back.

A sequence is a prompt and a completion. The token at position p is scored by the logits of position p - 1, so the
first token has no log-prob, a prompt holds at least one token, and the last token is only a target: it is never fed.
The rows of a pack are thus the rows that a sampler computed to write the same completion.

Legend: T tokens fed in a pack, L scored tokens (targets) in a pack, S sequences in a pack.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.errors import InputError, RowError
from minitransformer.files import shown
from minitransformer.integers import as_list, integer, listed


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from.

    ids             prompt and completion, kept as a list; the completion starts at prompt_len
    prompt_len      at least 1 and less than len(ids)
    advantages      one value for the completion, or one a completion token (ignored by nll)
    old_log_probs   nats, one a completion token, of the policy that sampled it, at the same temperature; or None
    ref_log_probs   nats, one a completion token, of the reference of a KL term; or None
    temperature     the logits are divided by it, as the sampler divided them
    mask            1 or 0 a completion token; 0: no part in the loss, its mean or the metrics (a tool's answer between
                    two turns, whose old_log_probs can be 0). None counts all
    """

    ids: Sequence[int]
    prompt_len: int
    advantages: float | Sequence[float] = 0.0
    old_log_probs: Sequence[float] | None = None
    ref_log_probs: Sequence[float] | None = None
    temperature: float = 1.0
    mask: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        ids = listed(self.ids)
        if ids is not None:  # anything else is refused by pack, which can name the sample
            object.__setattr__(self, "ids", ids)

    @property
    def completion_len(self) -> int:
        return len(self.ids) - self.prompt_len

    def counted(self, where: str) -> Tensor:
        """The mask as bool [completion_len]. where: for errors."""
        mask_L = self.column("mask", where)
        if mask_L is None:
            return torch.ones(self.completion_len, dtype=torch.bool)
        if not ((mask_L == 0) | (mask_L == 1)).all():
            raise InputError(f"{where}: mask is {shown(self.mask)}; give 1 or 0 a completion token")
        return mask_L.bool()

    def column(self, field: str, where: str) -> Tensor | None:
        """A per-token field as FP32 [completion_len], a single value repeated; None stays None. where: for errors."""
        value = getattr(self, field)
        if value is None:
            return None
        try:
            column_L = torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{where}: {field} is {value!r}; give numbers, one a completion token") from None
        if column_L.ndim == 0:
            column_L = column_L.expand(self.completion_len)
        if column_L.shape != (self.completion_len,):
            raise InputError(
                f"{where}: {field} has shape {tuple(column_L.shape)}, the completion has {self.completion_len} tokens; "
                "give one value a completion token"
            )
        if not torch.isfinite(column_L).all():
            raise InputError(f"{where}: {field} holds a value that is not finite; drop the sample or repair it")
        return column_L.contiguous()


@dataclass(frozen=True)
class Pack:
    """One forward pass of the learner.

    batch           the fed tokens; batch.logit_rows_L are the rows that score a completion token
    sequences       S indices of the caller's sequences, ascending
    target_ids_L    int64 [L]: the token that logit row l scores
    bounds          S + 1 bounds of the sequences' targets in L
    """

    batch: Batch
    sequences: tuple[int, ...]
    target_ids_L: Tensor
    bounds: tuple[int, ...]

    def to(self, device: torch.device | str) -> "Pack":
        """The same pack with its tensors on a device."""
        return replace(self, batch=self.batch.to(device), target_ids_L=self.target_ids_L.to(device))

    @contextmanager
    def naming_rows(self, first: int | None = None) -> Iterator[None]:
        """Turns a RowError into an InputError with the sequence and the position.

        Its rows count the batch's tokens, or with `first` rows of the logits, from that one on.
        """
        try:
            yield
        except RowError as error:
            if first is not None:
                error.rows = self.batch.logit_rows_L[[first + row for row in error.rows]].tolist()
            s, what = next(iter(self.batch.faults(error).items()))
            raise InputError(f"sequence {self.sequences[s]}, {what}") from None


def pack(
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    max_tokens: int,
    vocab_size: int,
    max_positions: int,
) -> list[Pack]:
    """Packs of at most max_tokens fed tokens, by first fit in the given order.

    sequences: ids, prompt and completion together (lists, tensors, arrays, generators); prompt_lens: one a sequence,
    any kind of integers. Within a pack
    the sequences keep their given order, and their index is their request id. A pack follows from the arguments alone.
    Raises InputError, naming the sequence, for bad ids or lengths; then nothing is packed.
    """
    sequences, prompt_lens = as_list("sequences", sequences), as_list("prompt_lens", prompt_lens)
    if len(sequences) == 0:
        raise InputError("no sequences to pack; give at least one")
    if len(sequences) != len(prompt_lens):
        raise InputError(f"{len(sequences)} sequences but {len(prompt_lens)} prompt lengths; give one each")
    checked = [
        _checked(f"sequence {s}", ids, prompt_len, max_tokens, vocab_size, max_positions)
        for s, (ids, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True))
    ]
    members: list[list[int]] = []
    room: list[int] = []
    for s, ids in enumerate(checked):
        fed = len(ids) - 1
        slot = next((p for p, free in enumerate(room) if free >= fed), None)
        if slot is None:
            slot = len(room)
            members.append([])
            room.append(max_tokens)
        members[slot].append(s)
        room[slot] -= fed
    return [_pack(chosen, checked, [int(n) for n in prompt_lens]) for chosen in members]


def unpack(packs: Sequence[Pack], values: Sequence[Tensor]) -> list[Tensor]:
    """values[i] of shape [L_i, ...] of each pack -> one tensor [completion_len, ...] a sequence, in the given order."""
    found = {}
    for one, value_L in zip(packs, values, strict=True):
        for i, s in enumerate(one.sequences):
            found[s] = value_L[one.bounds[i] : one.bounds[i + 1]]
    return [found[s] for s in range(len(found))]


def _pack(chosen: list[int], sequences: list[list[int]], prompt_lens: Sequence[int]) -> Pack:
    batch = Batch.packed([sequences[s][:-1] for s in chosen], request_ids=chosen)
    rows, targets, bounds = [], [], [0]
    for i, s in enumerate(chosen):
        # Targets prompt_len .. n - 1 are scored one row earlier: rows prompt_len - 1 .. n - 2 of the sequence.
        rows.extend(range(batch.cu_seqlens[i] + prompt_lens[s] - 1, batch.cu_seqlens[i + 1]))
        targets.extend(sequences[s][prompt_lens[s] :])
        bounds.append(len(rows))
    return Pack(
        batch=replace(batch, logit_rows_L=torch.tensor(rows, dtype=torch.int64)),
        sequences=tuple(chosen),
        target_ids_L=torch.tensor(targets, dtype=torch.int64),
        bounds=tuple(bounds),
    )


def _checked(where: str, ids, prompt_len: int, max_tokens: int, vocab_size: int, max_positions: int) -> list[int]:
    values = listed(ids)
    ids = [None] if values is None else [integer(i) for i in values]
    if None in ids:
        raise InputError(f"{where}: ids must be integers; tokenize text first")
    if integer(prompt_len) is None:
        raise InputError(f"{where}: prompt length {prompt_len!r}; give an integer")
    n = len(ids)
    if n == 0:
        raise InputError(f"{where} is empty; give a prompt of at least one token and a completion")
    for p, i in enumerate(ids):
        if not 0 <= i < vocab_size:
            raise InputError(f"{where}: id {i} at position {p} is outside the vocabulary of {vocab_size}")
    if prompt_len < 1:
        raise InputError(f"{where}: prompt length {prompt_len}; the first token has no log-prob, so use at least 1")
    if prompt_len >= n:
        raise InputError(f"{where}: {n} tokens with a prompt of {prompt_len} leave no completion to score; drop it")
    if n > max_positions:
        raise InputError(f"{where}: {n} tokens exceed the model's context of {max_positions}; shorten it")
    if n - 1 > max_tokens:
        raise InputError(f"{where}: {n - 1} tokens to feed exceed a pack of {max_tokens}; raise max_tokens_per_pack")
    return ids
