"""NVFP4 checkpoints, read: codes, block scales and outer scales as they are stored, everything else in BF16.

Complete by construction, as in weights.py: the config and its list of ignored modules say which tensors must be there,
the headers are compared with that before a value is read, and every tensor is used exactly once. Nothing is merged or
requantised: gate and up keep an outer scale each, because published checkpoints often have two different ones and
taking one of them for both scales the other half by their ratio.

The stored activation scales (`input_scale`, `input_global_scale`) are calibrated constants for runtimes with static
activation scales. The recipes here quantise each token with its own amax, so they may be missing and are not used.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minitransformer import recipe as recipes
from minitransformer.checkpoint_files import TensorFiles, first_few
from minitransformer.devices import require_room
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.nvfp4_config import Quantisation, read_quantisation
from minitransformer.models.qwen3_moe.nvfp4_layout import (
    BLOCK,
    FORMATS,
    PROJECTIONS,
    Format,
    Part,
    experts_prefix,
    parts,
)
from minitransformer.models.qwen3_moe.weights import open_tensors, read_config, stream
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.recipe import Recipe
from minitransformer.tokenizer import load_tokenizer

Experts = dict[int, dict[str, Nvfp4]]


class QuantisedCheckpoint(NamedTuple):
    """A checkpoint with NVFP4 experts, its quantised values already read.

    config       the model's shape
    parameters   (name, BF16 tensor) of every parameter that is not quantised, one at a time
    experts      layer -> {"gate_up": Nvfp4 [E, 2F, D], outer [E, 2] for gate and up; "down": [E, D, F], outer [E]}
    recipe       the recipe that the checkpoint's config states, with "bf16" for the layers that it leaves out
    """

    config: Qwen3MoeConfig
    parameters: Iterator[tuple[str, Tensor]]
    experts: Experts
    recipe: Recipe


def is_quantised(directory: str | os.PathLike) -> bool:
    """Whether the checkpoint's config files say that weights are quantised, in whatever way. Raises InputError."""
    _, hf = read_config(directory, quantised=True)
    return hf.get("quantization_config") is not None or read_quantisation(Path(directory), hf) is not None


def load_quantised(directory: str | os.PathLike) -> QuantisedCheckpoint:
    """Opens an NVFP4 checkpoint of either format, checks it whole and reads its experts. Raises InputError."""
    config, hf = read_config(directory, quantised=True)
    said = read_quantisation(Path(directory), hf)
    if said is None:
        raise InputError(f"{directory}: config.json names no quantisation; `minitransformer quantize` makes NVFP4")
    layers = quantised_layers(directory, config, said)
    files = TensorFiles(directory)
    inside = {i: _names_below(files, experts_prefix(i)) for i in layers}
    rest = files.without(set().union(*inside.values()))
    _refuse_quantised_elsewhere(rest, said)
    elsewhere = {f"layers.{i}.mlp.{projection}.weight" for i in layers for projection in PROJECTIONS}
    checkpoint = open_tensors(config, hf, rest, elsewhere)
    _refuse_forgotten(rest, said)
    for i in layers:
        _check_headers(files, said.format, list(parts(config, i)), inside[i])
    experts = {i: _read_layer(files, said.format, config, i) for i in layers}
    left_out = [(str(i), "bf16") for i, sparse in enumerate(config.sparse_layers) if sparse and i not in layers]
    recipe = recipes.get(said.recipe).with_overrides(left_out, config.num_layers)
    return QuantisedCheckpoint(config, stream(checkpoint), experts, recipe)


def load(model_class: type[nn.Module], directory: str | os.PathLike, device: torch.device) -> nn.Module:
    """model_class(config) with BF16 parameters, quantised experts and tokenizer. InputError, then there is no model.

    Parameters are moved to the device; the experts follow packed, with the first pass.
    """
    checkpoint = load_quantised(directory)
    tokenizer = load_tokenizer(directory, checkpoint.config.vocab_size)
    model = model_class(checkpoint.config)
    for i, experts in checkpoint.experts.items():
        model.layers[i].mlp.set_quantised(checkpoint.recipe.for_layer(i), experts["gate_up"], experts["down"])
    model.recipe, model.tokenizer = checkpoint.recipe, tokenizer
    unfilled = {name: p.detach() for name, p in model.named_parameters()}
    for name, tensor in checkpoint.parameters:
        unfilled.pop(name).copy_(tensor)
    if unfilled:
        raise RuntimeError(f"parameters without a value: {first_few(unfilled)}")
    held = [part for layer in checkpoint.experts.values() for q in layer.values() for part in (q.codes, q.scales)]
    require_room(device, sum(t.nbytes for t in (*held, *model.parameters())), "the weights in NVFP4 and BF16")
    return model.to(device)


def quantised_layers(directory: str | os.PathLike, config: Qwen3MoeConfig, said: Quantisation) -> list[int]:
    """The layers whose experts are quantised by name: all of a layer's experts or none of them."""
    layers = []
    for i in (i for i, sparse in enumerate(config.sparse_layers) if sparse):
        names = [part.module for part in parts(config, i)]
        quantised = [said.quantises(name) for name in names]
        if any(quantised) != all(quantised):
            left_out = [name for name, is_in in zip(names, quantised, strict=True) if not is_in]
            raise InputError(
                f"{directory}: the config leaves {first_few(left_out)} in BF16 but quantises the layer's other "
                "experts; a layer has one number format, so list all of its experts or none"
            )
        layers += [i] if all(quantised) else []
    if not layers:
        raise InputError(
            f"{directory}: the config's targets and ignore list leave every expert in BF16; remove the quantisation"
        )
    return layers


def _names_below(files: TensorFiles, prefix: str) -> set[str]:
    return {name for name in files.files if name.startswith(prefix)}


def _refuse_quantised_elsewhere(files: TensorFiles, said: Quantisation) -> None:
    """Quantised tensors outside the quantised experts: ignored modules, attention, or a KV cache."""
    suffixes = {suffix for form in FORMATS.values() for suffix in form.suffixes if suffix != "weight"}
    for name, dtype in files.dtypes.items():
        module, _, suffix = name.rpartition(".")
        if suffix in ("k_scale", "v_scale"):
            raise InputError(f"{files.directory}: {name} scales a quantised KV cache, which is not supported")
        if dtype not in ("U8", "F8_E4M3") and suffix not in suffixes:
            continue
        entry = said.ignores(module)
        if entry is not None:
            raise InputError(f"{files.directory}: {name} is quantised, but {entry!r} in the config leaves it in BF16")
        if not said.targeted(module):
            raise InputError(f"{files.directory}: {name} is quantised, but no target in the config names it")
        raise InputError(
            f"{files.directory}: {name} is quantised; only experts may be, so quantise again with {module} left out"
        )


def _refuse_forgotten(files: TensorFiles, said: Quantisation) -> None:
    """BF16 weights (of attention, routers, dense layers, lm_head) that the config quantises by name."""
    linear = (name.rpartition(".")[0] for name, shape in files.shapes.items() if len(shape) == 2)
    forgotten = [m for m in linear if not m.endswith("embed_tokens") and said.quantises(m)]
    if forgotten:
        raise InputError(
            f"{files.directory}: {first_few(forgotten)}: the config quantises it by name, but it is stored in BF16 or "
            "FP32 and an engine would look for packed tensors; add it to the config's ignore list"
        )


def _check_headers(files: TensorFiles, form: Format, layer: list[Part], here: set[str]) -> None:
    """Exactly the tensors of these parts, in type and shape; the activation scales may all be missing."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    required: set[str] = set()
    for part in layer:
        headers = part.headers(form)
        expected |= headers
        required |= set(list(headers)[:-1])
    missing, extra = required - here, here - expected.keys()
    static = expected.keys() - required
    if static & here and static - here and not missing:
        raise InputError(
            f"{files.directory}: {first_few(static - here)} missing, other experts of the layer have one; store an "
            "activation scale for all or for none"
        )
    if missing or extra:
        raise InputError(f"{files.directory}: {_explain(files, form, missing, extra)}")
    for key, (dtype, shape) in expected.items():
        # A scalar may be stored as [] or [1]: both formats are seen with both.
        found = files.shapes.get(key)
        if found is None or (found in ((), (1,)) and shape in ((), (1,)) and files.dtypes[key] == dtype):
            continue
        if (files.dtypes[key], found) != (dtype, shape):
            raise InputError(
                f"{files.directory}/{files.files[key]}: {key} is {files.dtypes[key]} {list(found)}; the config asks "
                f"for {dtype} {list(shape)}"
            )


def _explain(files: TensorFiles, form: Format, missing: set[str], extra: set[str]) -> str:
    """One line about the tensors that are missing or too many, as close to the cause as the names allow."""
    other = next(f for f in FORMATS.values() if f is not form)
    foreign = {name for name in extra if name.rpartition(".")[2] == other.outer}
    for name in sorted(foreign):
        module = name.rpartition(".")[0]
        if f"{module}.{form.outer}" not in missing:
            return (
                f"{module} has two outer scales, {form.outer} and {other.outer} (one is the inverse of the other); "
                f"keep {form.outer}"
            )
    if foreign:
        return f"the config says {form.name}, but {first_few(foreign)} has a name of {other.name}; correct the config"
    scales = {n for n in missing if n.rpartition(".")[2] in (form.scales, form.outer)}
    modules = {n.rpartition(".")[0] for n in scales}
    dense = {m for m in modules if files.dtypes.get(f"{m}.weight") in ("BF16", "F32")}
    if dense:
        return (
            f"{first_few(dense)}: the config quantises it, but its weight is stored in BF16 or FP32; add it to the "
            "config's ignore list if it is meant to be"
        )
    packed = {n for n in scales if f"{n.rpartition('.')[0]}.{form.codes}" in files.files}
    if packed:
        return f"{first_few(packed)} is missing beside a packed weight; without its scales a weight has no value"
    said = [
        f"{len(names)} {word} ({first_few(names)})"
        for names, word in ((missing, "missing"), (extra, "not in the model"))
        if names
    ]
    return f"the quantised tensors do not fit config.json: {'; '.join(said)}"


def _read_layer(files: TensorFiles, form: Format, config: Qwen3MoeConfig, layer: int) -> dict[str, Nvfp4]:
    D, F, E = config.hidden_size, config.expert_size, config.num_experts
    read = {
        name: Nvfp4(
            torch.empty(E, N, K // 2, dtype=torch.uint8), torch.empty(E, N, K // BLOCK, dtype=torch.uint8),
            torch.zeros(outer, dtype=torch.float32),
        )
        for name, N, K, outer in (("gate_up", 2 * F, D, (E, 2)), ("down", D, F, (E,)))
    }  # fmt: skip
    for part in parts(config, layer):
        codes, scales, outer, _ = part.headers(form)
        into = read[part.projection]
        into.codes[part.expert, part.rows] = files[codes]
        into.scales[part.expert, part.rows] = _block_scales(files, scales)
        into.outer.view(E, -1)[part.expert, part.column] = _outer_scale(files, form, outer)
    return read


def _block_scales(files: TensorFiles, key: str) -> Tensor:
    bits = files[key].view(torch.uint8)
    # E4M3 has no infinity; 0x7f and 0xff are its NaN. A negative scale (or -0) would turn the signs of a block.
    bad = ((bits & 0x7F) == 0x7F) | (bits > 0x7F)
    if bad.any():
        index = bad.nonzero()[0].tolist()
        value = bits.view(torch.float8_e4m3fn)[tuple(index)].item()
        raise InputError(
            f"{files.directory}/{files.files[key]}: {key}{index} is {value}, not a block scale (finite, no sign)"
        )
    return bits


def _outer_scale(files: TensorFiles, form: Format, key: str) -> float:
    stored = np.float32(files[key].reshape(-1).numpy()[0])
    # A float holds every FP32 exactly, so the assignment to FP32 keeps the bits.
    return float(form.read_scale(f"{files.directory}/{files.files[key]}: {key}", stored))
