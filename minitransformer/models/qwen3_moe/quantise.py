"""Writes an NVFP4 checkpoint from a BF16 one: a layer at a time, whole or not at all, with the error of each layer.

The quantiser is ops/nvfp4.py with one outer scale an expert (gate and up share it), so the written codes, block scales
and outer scales are bit for bit those of a BF16 checkpoint that is quantised while it is loaded. Router, norms,
embedding, attention, dense layers and lm_head are copied in BF16.

Readers with static activation scales need an `input_scale`, and nothing was calibrated here. Written is a bound for
BF16 weights and unrounded norms: RMSNorm's output is at most sqrt(D) times its largest weight; a row of gate or up is
at most sqrt(D) times the length of its weights times the norm's, and |silu(g) u| <= |g| |u|. A norm rounded to BF16
can exceed it by an ulp, and quantised operands, whose rows may be longer, by more; real tokens stay far
below, so such readers lose resolution on quiet tokens. Recipes that quantise per token do not look at it.
"""

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitransformer.checkpoint_files import replacing_directory, write_json, write_sharded
from minitransformer.errors import InputError
from minitransformer.files import named
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.layout import Piece, pieces
from minitransformer.models.qwen3_moe.nvfp4_config import (
    ALGORITHMS,
    HF_QUANT_CONFIG,
    quantisation_files,
    read_quantisation,
)
from minitransformer.models.qwen3_moe.nvfp4_layout import FLT_MAX, MODELOPT, PROJECTIONS, Format, parts
from minitransformer.models.qwen3_moe.weights import read, read_config
from minitransformer.ops import nvfp4
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.recipe import Recipe
from minitransformer.tokenizer import TOKENIZER_FILES

GROUP = 8  # experts whose error is computed at once, in FP64


@dataclass(frozen=True)
class QuantisationError:
    """What one weight of one layer lost: with w the BF16 weight and q its dequantised value,

    relative_l2  |q - w| / |w| in the Euclidean norm;  snr_db  -20 log10 of it;  mae  mean |q - w|
    zero_codes   share of codes 0 and -0;  zero_scales  share of blocks whose scale is 0
    zero_values  share of elements with q = 0, by code or by scale
    """

    layer: int
    projection: str
    relative_l2: float
    snr_db: float
    mae: float
    zero_codes: float
    zero_scales: float
    zero_values: float


@dataclass
class _Bounds:
    """Bounds of |activation|, in exact arithmetic, of the layer that is being written (module docstring)."""

    config: Qwen3MoeConfig
    norm: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float32))

    def of(self, projection: str, weight: Tensor) -> list[float]:
        """One bound an expert, of the input of this projection."""
        root, F = math.sqrt(self.config.hidden_size), self.config.expert_size
        if projection == "gate_up":
            bound = [root * float(self.norm.abs().max())] * weight.shape[0]
            # Reaches of gate and up: the longest row product, for the input of `down` that comes next.
            reach = torch.stack([(expert.float() * self.norm.float()).norm(dim=-1) * root for expert in weight])
            self.next = [float((r[:F] * r[F:]).max()) for r in reach]
            return bound
        return self.next


def check_writable(recipe: Recipe, config: Qwen3MoeConfig) -> list[int]:
    """The layers that stay BF16, or an InputError when no checkpoint can say what the recipe means."""
    if recipe.name not in ALGORITHMS.values():
        stated = " or ".join(ALGORITHMS.values())
        raise InputError(
            f"recipe {recipe.name}: a checkpoint can't state it; write {stated} "
            + (
                "and choose the activations when loading (the stored weights are the same)"
                if recipe.weight_scale == "expert"
                else "(the formats have one outer scale a tensor)"
            )
        )
    recipe.check_overrides(i for i, sparse in enumerate(config.sparse_layers) if sparse)
    names = {i: recipe.for_layer(i).name for i, sparse in enumerate(config.sparse_layers) if sparse}
    for i, name in names.items():
        if name not in (recipe.name, "bf16"):
            raise InputError(f"layer {i}: {name} beside {recipe.name}; a checkpoint has one number format and bf16")
    if all(name == "bf16" for name in names.values()):
        raise InputError("nothing to quantise: every layer is dense or is left in bf16")
    return [i for i, name in names.items() if name == "bf16"]


def quantise(
    directory: str | os.PathLike,
    out: str | os.PathLike,
    recipe: Recipe,
    form: Format = MODELOPT,
    on_layer: Callable[[int], None] = lambda layer: None,
    max_shard_bytes: int = 4 * 10**9,
) -> list[QuantisationError]:
    """Writes `out`, an NVFP4 checkpoint of a BF16 checkpoint, and returns what each quantised weight lost.

    recipe: nvfp4_per_token or w4a16, its overrides may leave layers in bf16. on_layer is called as a layer is done.
    Raises InputError for a bad checkpoint, an `out` that is not empty, or a recipe that the format can't state; then
    nothing is written.
    """
    out = named(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty directory; choose another place")
    config, hf = read_config(directory, quantised=True)
    if hf.get("quantization_config") is not None or read_quantisation(Path(directory), hf) is not None:
        raise InputError(f"{directory}: is quantised already; quantise the BF16 checkpoint that it was made from")
    bf16_layers = check_writable(recipe, config)
    config, parameters = read(directory)
    errors: list[QuantisationError] = []
    inline, separate = quantisation_files(form, recipe.name, config, bf16_layers)
    with replacing_directory(out, ()) as new:
        # What the source says beyond the model's shape (its writer, token ids) is kept.
        write_json(new / "config.json", dict(hf) | config.to_hf() | {"quantization_config": inline})
        if separate is not None:
            write_json(new / HF_QUANT_CONFIG, separate)
        for name in ("generation_config.json", *TOKENIZER_FILES):
            if (Path(directory) / name).is_file():
                shutil.copyfile(Path(directory) / name, new / name)
        stored = _tensors(config, parameters, frozenset(bf16_layers), form, errors, on_layer)
        write_sharded(new, stored, max_shard_bytes)
    return errors


def _tensors(
    config: Qwen3MoeConfig,
    parameters: Iterable[tuple[str, Tensor]],
    bf16_layers: frozenset[int],
    form: Format,
    errors: list[QuantisationError],
    on_layer: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of every parameter in turn; fills `errors`."""
    stored: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces(config):
        stored[piece.parameter].append(piece)
    bounds = _Bounds(config)
    for name, tensor in parameters:
        words = name.split(".")  # layers.{i}.mlp.gate_up.weight
        layer = int(words[1]) if words[0] == "layers" else -1
        if layer >= 0 and words[2] == "post_norm":
            bounds.norm = tensor
        if layer >= 0 and config.sparse_layers[layer] and words[-2] in PROJECTIONS and layer not in bf16_layers:
            q = quantise_experts(tensor)
            errors.append(_measure(layer, words[-2], tensor, q))
            yield from expert_tensors(config, layer, words[-2], q, form, bounds.of(words[-2], tensor))
        else:
            yield from ((piece.key, tensor[piece.index]) for piece in stored[name])
        if layer >= 0 and words[-2] == "down":
            on_layer(layer)


def quantise_experts(weight: Tensor) -> Nvfp4:
    """BF16 [E, N, K] -> Nvfp4 with one outer scale an expert, as a BF16 checkpoint is quantised on load."""
    return nvfp4.quantize(weight, "expert")


def expert_tensors(
    config: Qwen3MoeConfig, layer: int, projection: str, q: Nvfp4, form: Format, activation: list[float]
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one layer's gate_up or down. activation: the largest |input| of each expert.

    InputError when an outer scale can't be stored so that it reads back with the same bits.
    """
    columns = q.outer.reshape(config.num_experts, -1)
    for part in parts(config, layer):
        if part.projection != projection:
            continue
        decode = columns[part.expert, min(part.column, columns.shape[1] - 1)].numpy()[()]
        codes, scales, outer, static = part.headers(form)
        yield codes, q.codes[part.expert, part.rows]
        yield scales, q.scales[part.expert, part.rows].view(torch.float8_e4m3fn)
        yield outer, _scalar(form.stored_scale(outer, decode), form)
        top, amax = np.float32(2688), np.float32(min(activation[part.expert], float(FLT_MAX))) or np.float32(2688)
        yield static, _scalar(top / amax if form.encode else amax / top, form)


def _scalar(value: np.float32, form: Format) -> Tensor:
    return torch.tensor(value, dtype=torch.float32).reshape(form.scalar)


@torch.no_grad()
def _measure(layer: int, projection: str, weight: Tensor, q: Nvfp4) -> QuantisationError:
    squares = signal = absolute = 0.0
    codes = zeros = 0
    for begin in range(0, weight.shape[0], GROUP):
        some = slice(begin, begin + GROUP)
        group = Nvfp4(q.codes[some], q.scales[some], q.outer[some])
        exact = weight[some].double()
        decoded = nvfp4.dequantize(group)
        zeros += int((decoded == 0).sum())
        codes += int((nvfp4.unpack(group.codes) & 7 == 0).sum())
        difference = decoded.double() - exact
        squares += float(difference.square().sum())
        signal += float(exact.square().sum())
        absolute += float(difference.abs().sum())
    relative = math.sqrt(squares / signal) if signal else 0.0
    return QuantisationError(
        layer,
        projection,
        relative,
        -20 * math.log10(relative) if relative else math.inf,
        absolute / weight.numel(),
        codes / weight.numel(),
        int((q.scales == 0).sum()) / q.scales.numel(),
        zeros / weight.numel(),
    )
