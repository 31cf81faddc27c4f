"""A trace: the named tensors of a run, row by row, keyed by (request id, position) and so free of batch and packing.

The model calls `note = trace.bind(batch)` once a forward pass, then `note(stage, tensor)` at each arrow of its diagram.
A row that a prefix-cache hit made unnecessary is absent. A row computed twice (preemption) must have the same bits.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitransformer.alignment.difference import StageComparison, StageResult
from minitransformer.alignment.ulp import bits
from minitransformer.batch import Batch
from minitransformer.recipe import Recipe

LAYER_STAGES = (
    "input_norm", "qkv", "q_norm", "k_norm", "q_rope", "k_rope", "attention", "o", "post_norm",
    "router_logits", "expert_ids", "routing_weights", "gate_up", "swiglu", "down", "combine",
)  # fmt: skip
STAGES = ("embedding", *LAYER_STAGES, "final_norm", "logits", "log_prob")
# What a quantising recipe adds in front of a product: its operand's codes and scales.
QUANTISED = {kind: tuple(f"{kind}_{part}" for part in ("codes", "scales", "outer")) for kind in ("gate_up", "down")}
_SPARSE = ("router_logits", "expert_ids", "routing_weights", "combine")  # a dense layer lacks these
_ALL_OF_LAYER = tuple(stage for kind in LAYER_STAGES for stage in (*QUANTISED.get(kind, ()), kind))
_ORDER = ("embedding", *_ALL_OF_LAYER, "final_norm", "logits", "log_prob")

Note = Callable[[str, Tensor], None]


class TraceConflict(RuntimeError):
    """A row was computed a second time with other bits."""


def stage_kind(stage: str) -> tuple[str, int | None]:
    """'layers.3.qkv' -> ('qkv', 3); 'logits' -> ('logits', None)."""
    if stage.startswith("layers."):
        _, layer, kind = stage.split(".", 2)
        return kind, int(layer)
    return stage, None


def stage_order(stage: str) -> tuple[int, int, int]:
    """Sort key: the order in which the model computes the stages; an unknown name comes last."""
    kind, layer = stage_kind(stage)
    step = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    if layer is not None:
        return (1, layer, step)
    return (0 if kind == "embedding" else 2, 0, step)


def stage_names(num_layers: int) -> list[str]:
    """Every stage that a model may have, in order (a dense layer and a BF16 recipe have fewer)."""
    layers = [f"layers.{i}.{kind}" for i in range(num_layers) for kind in _ALL_OF_LAYER]
    return ["embedding", *layers, "final_norm", "logits", "log_prob"]


def stages_of(config: Any, recipe: Recipe) -> list[str]:
    """The stages that a model of this config and recipe has, in order."""
    names = []
    for i, sparse in enumerate(config.sparse_layers):
        own = recipe.for_layer(i)
        absent = set() if sparse else set(_SPARSE)
        if not sparse or own.activations == "bf16":
            absent.update(*QUANTISED.values())
        elif own.activations == "mxfp8":
            absent.update(f"{kind}_outer" for kind in QUANTISED)
        names += [f"layers.{i}.{kind}" for kind in _ALL_OF_LAYER if kind not in absent]
    return ["embedding", *names, "final_norm", "logits", "log_prob"]


class Keys:
    """Numbers the pairs (request id, position) in the order in which they are first seen."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._pairs_N2 = torch.empty((0, 2), dtype=torch.int64)
        for pair in pairs:
            self._number.setdefault(pair, len(self._number))

    def __len__(self) -> int:
        return len(self._number)

    def number(self, pairs: Iterable[tuple[int, int]]) -> Tensor:
        """int64 [R]: the number of each pair, a new one if it is new."""
        return torch.tensor([self._number.setdefault(p, len(self._number)) for p in pairs], dtype=torch.int64)

    def pairs(self) -> Tensor:
        """int64 [N, 2]: request id and position of every number."""
        if len(self._pairs_N2) != len(self._number):
            self._pairs_N2 = torch.tensor(list(self._number), dtype=torch.int64).reshape(-1, 2)
        return self._pairs_N2

    def copy(self) -> "Keys":
        return Keys(self._number)


class Noter:
    """What the model, the sampler and the learner see of a trace. Subclasses say what happens to a stage's rows."""

    def __init__(self, stages: Sequence[str] | None = None, keys: Keys | None = None) -> None:
        """stages: patterns such as 'layers.0.*' or 'logits'; None takes every stage."""
        self.patterns = None if stages is None else tuple(stages)
        self.keys = Keys() if keys is None else keys
        self._wanted: dict[str, bool] = {}

    def wants(self, stage: str) -> bool:
        if stage not in self._wanted:
            self._wanted[stage] = self.patterns is None or any(fnmatchcase(stage, p) for p in self.patterns)
        return self._wanted[stage]

    @property
    def only_log_probs(self) -> bool:
        """Nothing of the model itself is wanted, so its steps need not stop for notes."""
        return self.patterns == ("log_prob",)

    def bind(self, batch: Batch) -> Note:
        """Returns note(stage, tensor [T, ...]) for this batch's tokens; 'logits' has the rows of batch.logit_rows_L."""
        bounds = batch.cu_seqlens
        requests = [r for s, r in enumerate(batch.request_ids) for _ in range(bounds[s], bounds[s + 1])]
        keys_T = self.keys.number(zip(requests, batch.positions_T.tolist(), strict=True))
        keys_L = keys_T if batch.logit_rows_L is None else keys_T[batch.logit_rows_L.cpu()]

        def note(stage: str, tensor: Tensor) -> None:
            if not self.wants(stage):
                return
            keys = keys_L if stage == "logits" else keys_T
            if tensor.shape[0] != len(keys):
                raise ValueError(f"stage {stage}: {tensor.shape[0]} rows for {len(keys)} tokens")
            self.take(stage, keys, tensor.detach().cpu())

        return note

    def note_log_probs(self, request_id: int, positions: Sequence[int], values: Tensor | Sequence[float]) -> None:
        """The log-prob of the token AT position p goes into row p - 1, whose logits scored it."""
        if self.wants("log_prob") and len(positions):
            keys = self.keys.number((request_id, int(p) - 1) for p in positions)
            self.take("log_prob", keys, torch.as_tensor(values, dtype=torch.float32).detach().cpu())

    def take(self, stage: str, keys_R: Tensor, rows: Tensor) -> None:
        """rows [R, ...] of one stage; keys_R from self.keys."""
        raise NotImplementedError


class _Rows:
    """One stage's rows in a buffer that doubles, and where each key's row lies (-1: absent)."""

    def __init__(self, like: Tensor) -> None:
        self.used = 0
        self.buffer = like.new_empty((max(16, like.shape[0]), *like.shape[1:]))
        self.row_of = torch.full((0,), -1, dtype=torch.int64)

    def find(self, keys_R: Tensor, known: int) -> Tensor:
        if len(self.row_of) < known:
            fresh = torch.full((max(known, 2 * len(self.row_of)) - len(self.row_of),), -1, dtype=torch.int64)
            self.row_of = torch.cat([self.row_of, fresh])
        return self.row_of[keys_R]

    def append(self, keys_R: Tensor, rows: Tensor) -> None:
        end = self.used + len(keys_R)
        if end > self.buffer.shape[0]:
            grown = self.buffer.new_empty((max(end, 2 * self.buffer.shape[0]), *self.buffer.shape[1:]))
            grown[: self.used] = self.buffer[: self.used]
            self.buffer = grown
        self.buffer[self.used : end] = rows
        self.row_of[keys_R] = torch.arange(self.used, end)
        self.used = end


class Trace(Noter):
    """Keeps every row. strict: a row that comes back with other bits raises TraceConflict; otherwise the first bits
    stay and `conflicts()` tells what differed.

    spec      dict form of the ExecutionSpec that made the trace (entry -> value), or {}
    requests  request id -> {"prompt_ids": [...], "token_ids": [...]}, filled by whoever ran the requests
    unverified  why the bits of the GPU that made it are not known to be the spec's, or None
    """

    def __init__(self, stages: Sequence[str] | None = None, strict: bool = True, spec: dict | None = None) -> None:
        super().__init__(stages)
        self.strict, self.unverified = strict, None
        self.spec: dict = dict(spec or {})
        self.requests: dict[int, dict[str, list[int]]] = {}
        self._stages: dict[str, _Rows] = {}
        self._again: dict[str, dict[int, StageComparison]] = {}  # by request

    @property
    def stages(self) -> list[str]:
        return sorted(self._stages, key=stage_order)

    def take(self, stage: str, keys_R: Tensor, rows: Tensor) -> None:
        if stage not in self._stages:
            self._stages[stage] = _Rows(rows)
        held = self._stages[stage]
        at_R = held.find(keys_R, len(self.keys))
        new_R = at_R < 0
        if bool(new_R.all()):
            held.append(keys_R, rows)
            return
        self._check_again(stage, keys_R[~new_R], held.buffer[at_R[~new_R]], rows[~new_R])
        if bool(new_R.any()):
            held.append(keys_R[new_R], rows[new_R])

    def _check_again(self, stage: str, keys_R: Tensor, before: Tensor, now: Tensor) -> None:
        if self.strict and not torch.equal(bits(before), bits(now)):
            raise TraceConflict(f"stage {stage}: a row computed again has other bits")
        again, pairs_R2 = self._again.setdefault(stage, {}), self.keys.pairs()[keys_R]
        for request in pairs_R2[:, 0].unique().tolist():
            own = pairs_R2[:, 0] == request
            again.setdefault(request, StageComparison(stage)).add(pairs_R2[own], before[own], now[own])

    def conflicts(self, requests: Collection[int] | None = None) -> list[StageResult]:
        """Per stage: the rows that were computed more than once, first bits against later ones.

        requests: only theirs. In one that failed a NaN may have reached earlier rows (Batch.faults): no conflict."""
        found = []
        for stage in sorted(self._again, key=stage_order):
            total = StageComparison(stage)
            for one in (c for r, c in self._again[stage].items() if requests is None or r in requests):
                total.merge(one)
            found += [total.result()] if total.rows else []
        return found

    def find(self, stage: str, keys_R: Tensor) -> Tensor:
        """int64 [R]: the row in `rows(stage)` of each key, -1 where the trace lacks it."""
        if stage not in self._stages or not len(keys_R):
            return torch.full((len(keys_R),), -1, dtype=torch.int64)
        return self._stages[stage].find(keys_R, max(len(self.keys), int(keys_R.max()) + 1))

    def rows(self, stage: str) -> Tensor:
        """[rows, ...] of a stage, in the order of arrival."""
        return self._stages[stage].buffer[: self._stages[stage].used]

    def row_keys(self, stage: str) -> Tensor:
        """int64 [rows]: the keys of rows(stage)."""
        held = self._stages[stage]
        keys_R = (held.row_of >= 0).nonzero().flatten()
        return keys_R[held.row_of[keys_R].argsort()]

    def row(self, stage: str, request_id: int, position: int) -> Tensor | None:
        """One row, or None."""
        at = int(self.find(stage, self.keys.number([(request_id, position)])))
        return None if at < 0 else self.rows(stage)[at]

    def save(self, path: str | Path) -> None:
        """One safetensors file, written under a temporary name and renamed (trace_file.py says what is in it)."""
        from minitransformer.alignment.trace_file import save_trace

        save_trace(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Reads a file that `save` wrote; InputError if it is anything else."""
        from minitransformer.alignment.trace_file import load_trace

        return load_trace(Path(path))
