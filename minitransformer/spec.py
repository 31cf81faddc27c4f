"""ExecutionSpec: everything that decides a bit of the forward pass, with a fingerprint.

Learner and sampler compare fingerprints before they compare log-probs. Weights, batch, chunks, pages and threads are
not in it: the first are data, the others must not move a bit, and tests prove that they do not.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.recipe import get

NAME = "mini/1"

# In the order of the diagram; first what lies under every operator. Each is a module of minitransformer.ops.
OPS = (
    "mma", "rounding", "embedding", "rms_norm", "linear", "rope", "kv_store", "attention", "router", "dispatch",
    "grouped_linear", "swiglu", "logprob", "sample",
)  # fmt: skip
# Part of the spec only where a recipe quantises.
QUANTISED_OPS = ("nvfp4", "mxfp8", "quantised_linear")
# Of no forward pass, so in no fingerprint; a learner's checkpoint names them.
UPDATE_OPS = ("adamw",)


class _Model(Protocol):
    config: Any
    rope_table: Tensor


@dataclass(frozen=True)
class ExecutionSpec:
    """Frozen and comparable.

    ops                  (module, its SPEC) for each of OPS, and of QUANTISED_OPS where the recipe uses them
    accumulator          the tensor-core chain under every matrix product
    attention_key_tile   keys a tile of the online softmax
    options              (entry, value): formulas that a config or a recipe chooses
    libraries            (name, version) where a library's version decides bits; none does on the CPU: every
                         transcendental, sum and product is written here, and the rope table is hashed as it is
    """

    ops: tuple[tuple[str, str], ...]
    accumulator: str
    attention_key_tile: int
    options: tuple[tuple[str, Any], ...]
    libraries: tuple[tuple[str, str], ...] = ()
    name: str = NAME

    @classmethod
    def of(cls, model: _Model) -> "ExecutionSpec":
        """The spec that this model's forward pass follows."""
        config, recipe = model.config, getattr(model, "recipe", None) or get("bf16")
        formats = {recipe.for_layer(i).weights for i, sparse in enumerate(config.sparse_layers) if sparse}
        quantised = "nvfp4" in formats
        placement = {"bf16": "fc2-accumulator", "nvfp4": "combine"}
        modules = {op: import_module(f"minitransformer.ops.{op}") for op in OPS + (QUANTISED_OPS if quantised else ())}
        options = {
            "recipe": recipe.key,
            "kv_dtype": "bfloat16",
            "lm_head_output": "float32",
            # Where an expert's weight enters: into FC2's FP32 accumulator before its only rounding, or into the sum.
            "routing_weight": ", ".join(placement[f] for f in sorted(formats)),
            "exp2_table": modules["rounding"].EX2_SHA256,
            "rms_eps": config.rms_eps,
            "top_k": config.top_k,
            "norm_topk_prob": config.norm_topk_prob,
            "rope_table": hashlib.sha256(model.rope_table.contiguous().cpu().numpy().tobytes()).hexdigest(),
        }
        return cls(
            ops=tuple((op, modules[op].SPEC) for op in modules),
            accumulator=modules["mma"].SPEC,
            attention_key_tile=modules["attention"].KEY_TILE,
            options=tuple(sorted(options.items())),
        )

    def entries(self) -> dict[str, Any]:
        """Flat: 'ops.linear' -> 'linear/1', 'options.rms_eps' -> 1e-06, ...; plain JSON values."""
        entries: dict[str, Any] = {
            "name": self.name,
            "accumulator": self.accumulator,
            "attention_key_tile": self.attention_key_tile,
        }
        for group in ("ops", "options", "libraries"):
            entries |= {f"{group}.{key}": value for key, value in getattr(self, group)}
        return entries

    def fingerprint(self) -> str:
        return fingerprint(self.entries())

    def differences(self, other: "ExecutionSpec") -> list[str]:
        return spec_differences(self.entries(), other.entries())

    def require_same(self, other: "ExecutionSpec", who: str = "learner and sampler") -> None:
        """InputError that names each entry on which the two specs differ."""
        unlike = self.differences(other)
        if unlike:
            raise InputError(f"{who} follow different execution specs: {'; '.join(unlike)}")


def update_entries() -> dict[str, str]:
    """What decides the bits of an update beside the model's spec: 'ops.adamw' -> 'adamw/1'."""
    return {f"ops.{op}": import_module(f"minitransformer.ops.{op}").SPEC for op in UPDATE_OPS}


def fingerprint(entries: Mapping[str, Any]) -> str:
    """sha256 (hex) over the entries as canonical JSON: sorted keys, no spaces, floats by their shortest repr."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def spec_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """'entry: a != b' for each entry that differs, sorted by name; one that a side lacks is 'absent'."""
    sides = {n: (a.get(n, "absent"), b.get(n, "absent")) for n in sorted(a.keys() | b.keys())}
    return [f"{name}: {x} != {y}" for name, (x, y) in sides.items() if x != y]
