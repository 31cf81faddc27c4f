"""What a server with our model says of itself, and whether a learner's model is the same."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from minitransformer.errors import InputError
from minitransformer.spec import spec_differences

PREFIX = "minitransformer/"  # no tensor of a checkpoint has such a name
CUMEM, NCCL_DECIDES = "NCCL_CUMEM_ENABLE", "-2"  # NCCL's own default


def identity(model: Any, form: str | None = None, prefills: int | None = None) -> dict[str, str]:
    """The server's side: strings, because SGLang carries them among the checksums.

    form: of its packed experts. prefills: how many graphs have run so far; None: there are no graphs of prefills.
    """
    spec = model.spec
    packed = [i for i, layer in enumerate(model.layers) if getattr(layer.mlp, "gate_up", 0) is None]
    said = {
        "spec": spec.entries(), "fingerprint": spec.fingerprint(), "weights_version": model.weights_version,
        "config": asdict(model.config), "packed_layers": packed, "format": form, "cumem": cumem(),
        "gpu": gpu(model.device), "prefills_from_graphs": prefills,
    }  # fmt: skip
    return {PREFIX + key: json.dumps(value, sort_keys=True) for key, value in said.items()}


def read_identity(checksums: Mapping[str, str]) -> dict[str, Any] | None:
    """The client's side: what `identity` said, or None if nothing did."""
    said = {key.removeprefix(PREFIX): value for key, value in checksums.items() if key.startswith(PREFIX)}
    return {key: json.loads(value) for key, value in said.items()} or None


def cumem() -> bool:
    """Whether NCCL of this process may share memory by cuMem handles: one without them can't open the other's."""
    return os.environ.get(CUMEM, NCCL_DECIDES).strip() != "0"


def gpu(device: torch.device) -> str | None:
    """The name that a GPU has in every process; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def require_same(model: Any, identity: Mapping[str, Any], url: str) -> None:
    """InputError that names each field of the shape, else each entry of the spec, on which learner and server differ.

    The format of a backward pass is left out: a server has none.
    """
    config = json.loads(json.dumps(asdict(model.config)))
    unlike = spec_differences(config, identity["config"])
    if unlike:
        raise InputError(f"{url}: SGLang's model is not the learner's (learner != SGLang): {'; '.join(unlike)}")
    unlike = spec_differences(_forward(model.spec.entries()), _forward(identity["spec"]))
    if unlike:
        raise InputError(
            f"{url}: learner and SGLang follow different execution specs (learner != SGLang): {'; '.join(unlike)}"
        )


def refuse_for_stock(config: Any) -> None:
    """InputError for a model that SGLang's own class does not follow."""
    dense = [i for i, sparse in enumerate(config.sparse_layers) if not sparse]
    if dense:
        raise InputError(
            f"layer {dense[0]} is dense, but SGLang's own Qwen3-MoE makes every layer sparse and never loads such "
            "weights: a stock SGLang's log-probs of this model mean nothing"
        )
    if config.tie_word_embeddings:
        raise InputError(
            "the embeddings are tied, but SGLang's own Qwen3-MoE has a head of its own and leaves it unloaded: a stock "
            "SGLang's log-probs of this model mean nothing"
        )


def _forward(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: re.sub(r" backward=\S+", "", x) if isinstance(x, str) else x for key, x in entries.items()}
