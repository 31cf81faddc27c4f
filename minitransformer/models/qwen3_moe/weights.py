"""Checkpoints in the Hugging Face layout to and from our parameters, complete by construction.

The config alone says which parameters exist and of which stored tensors each is made (layout.py). Loading compares
that with what the files hold before it reads a value: every tensor is used exactly once, every parameter is filled
exactly once, or an InputError names the difference.

Experts come per expert (`experts.{e}.gate_proj.weight`) or fused as transformers 5 keeps them in memory
(`experts.gate_up_proj` [E, 2F, D], gate rows first; `experts.down_proj` [E, D, F]). Where D = 2F or D = F the shape
cannot show a transposed fused tensor; it is then accepted only if config.json declares its writer, transformers_version
5 or later, whose model defines these keys and their orientation. BF16 is kept bit for bit; FP32 is rounded once, to the
nearest BF16, ties to even (but an FP32 router beside BF16 weights is refused); so are other types.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitransformer.alignment.ulp import differing
from minitransformer.checkpoint_files import (
    INDEX,
    SINGLE,
    TensorFiles,
    first_few,
    read_json,
    read_json_if_there,
    replacing_directory,
    write_json,
    write_sharded,
)  # fmt: skip
from minitransformer.devices import room_on
from minitransformer.errors import InputError
from minitransformer.files import named
from minitransformer.models.qwen3_moe import layout
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.layout import EMBEDDING, HEAD, Piece, parameter_shapes, piece_shape, pieces
from minitransformer.tokenizer import TOKENIZER_FILES, load_tokenizer

# Every file that a save may write; a directory that holds others is never replaced.
CHECKPOINT_FILES = "config.json", "generation_config.json", SINGLE, "model-*-of-*.safetensors", INDEX, *TOKENIZER_FILES


def read_config(directory: str | os.PathLike, quantised: bool = False) -> tuple[Qwen3MoeConfig, Mapping[str, Any]]:
    """The config of a checkpoint directory, and config.json as it stands. Raises InputError.

    quantised: config.json may have a quantization_config (nvfp4_layout.py reads it); else that is an error.
    """
    directory = named(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; a checkpoint is a local directory with config.json in it")
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory}: no config.json; is this a checkpoint?")
    hf = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    extra = read_json_if_there(generation, {})
    if not isinstance(extra, Mapping):
        raise InputError(f"{generation}: expected an object with keys")
    shape = hf
    if quantised and isinstance(hf, Mapping):
        shape = {key: value for key, value in hf.items() if key != "quantization_config"}
    try:
        return Qwen3MoeConfig.from_hf(shape, extra), hf
    except InputError as error:
        raise InputError(f"{directory}/{error}") from None


def load(model_class: type[nn.Module], directory: str | os.PathLike, device: torch.device) -> nn.Module:
    """model_class(config) with the checkpoint's weights and tokenizer. Raises InputError, then there is no model."""
    from minitransformer.models.qwen3_moe import weights_nvfp4  # which builds on this file
    if weights_nvfp4.is_quantised(directory):
        return weights_nvfp4.load(model_class, directory, device)
    checkpoint = _open(directory)
    tokenizer = load_tokenizer(directory, checkpoint.config.vocab_size)
    with room_on(device, layout.parameter_bytes(checkpoint.config), "the weights in BF16"):
        model = model_class(checkpoint.config)
    _fill_all(_parameters(model), checkpoint)
    model.tokenizer = tokenizer
    return model


def load_into(model: nn.Module, directory: str | os.PathLike) -> None:
    """Overwrite every parameter of a model in place (same storage, any device) with a checkpoint of the same config.

    InputError: before the first write for what the headers show; a non-finite value leaves it partly overwritten.
    """
    checkpoint = _open(directory)
    for field in fields(checkpoint.config):
        ours, theirs = getattr(model.config, field.name), getattr(checkpoint.config, field.name)
        if ours != theirs and field.name != "eos_token_ids":
            raise InputError(f"{directory}: {field.name} is {theirs} in the checkpoint but {ours} in the model")
    parameters = _parameters(model)
    model.weights_version += 1  # before the first write: caches of the old weights' keys and values are stale from here
    _fill_all(parameters, checkpoint)


def read(directory: str | os.PathLike) -> tuple[Qwen3MoeConfig, Iterator[tuple[str, Tensor]]]:
    """The config, and an iterator over (parameter name, BF16 tensor) that holds one parameter at a time.

    InputError: names, shapes and types of the whole checkpoint before this returns; values while iterating.
    """
    checkpoint = _open(directory)
    return checkpoint.config, stream(checkpoint)


def stream(checkpoint: "Checkpoint") -> Iterator[tuple[str, Tensor]]:
    """(parameter name, BF16 tensor) of an open checkpoint, one at a time. Raises InputError on non-finite values."""
    shapes = parameter_shapes(checkpoint.config)
    for name, parts in checkpoint.plan.items():
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        _fill(tensor, parts, checkpoint.files)
        yield name, tensor


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters, proven to be exactly those that its config asks for."""
    shapes = parameter_shapes(model.config)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = {name: tuple(p.shape) for name, p in parameters.items() if p.dtype == torch.bfloat16}
    if found != shapes:
        if any(getattr(getattr(layer, "mlp", None), "gate_up", 0) is None for layer in getattr(model, "layers", ())):
            raise InputError("the experts exist only in NVFP4; their BF16 weights can't be read, written or trained")
        wrong = {n for n in shapes.keys() | parameters.keys() if shapes.get(n) != found.get(n)}
        raise InputError(f"the model's BF16 parameters are not those of its config; look at {first_few(wrong)}")
    return parameters


class Checkpoint(NamedTuple):
    """An open checkpoint whose headers were proven to fit; plan: parameter name -> its pieces."""

    config: Qwen3MoeConfig
    files: TensorFiles
    plan: dict[str, list[Piece]]


def _open(directory: str | os.PathLike) -> Checkpoint:
    config, hf = read_config(directory)
    return open_tensors(config, hf, TensorFiles(directory))


def open_tensors(
    config: Qwen3MoeConfig, hf: Mapping[str, Any], files: TensorFiles, elsewhere: Collection[str] = ()
) -> Checkpoint:
    """The plan of all parameters but those `elsewhere`; InputError unless the headers hold exactly their tensors."""
    directory = files.directory
    fused = frozenset(
        i for i in range(config.num_layers) if f"model.layers.{i}.mlp.experts.gate_up_proj" in files.files
    )
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if name not in elsewhere}
    plan: dict[str, list[Piece]] = {name: [] for name in shapes}
    expected: dict[str, tuple[int, ...]] = {}
    for piece in pieces(config, fused):
        if piece.parameter in elsewhere:
            continue
        plan[piece.parameter].append(piece)
        expected[piece.key] = piece_shape(shapes[piece.parameter], piece.index)
    if config.tie_word_embeddings and HEAD in files.files:
        expected[HEAD] = expected[EMBEDDING]
    _compare(files, expected, config)
    if fused:
        _refuse_undeclared_layout(directory, config, hf)
    tied = config.tie_word_embeddings and HEAD in files.files
    if tied and (files[HEAD].dtype != files[EMBEDDING].dtype or differing(files[HEAD], files[EMBEDDING]).any()):
        raise InputError(
            f"{directory}: config.json ties the embeddings, but {HEAD} and {EMBEDDING} differ; set "
            f"tie_word_embeddings to false or remove {HEAD}"
        )
    return Checkpoint(config, files, plan)


def _compare(files: TensorFiles, expected: dict[str, tuple[int, ...]], config: Qwen3MoeConfig) -> None:
    missing, extra = expected.keys() - files.files.keys(), files.files.keys() - expected.keys()
    if missing or extra:
        found = ((missing, "missing"), (extra, "not in the model"))
        said = [f"{len(names)} {word} ({first_few(names)})" for names, word in found if names]
        hint = " (config.json: tie_word_embeddings = false)" if missing == {HEAD} else ""
        raise InputError(f"{files.directory}: tensors do not fit config.json{hint}: {'; '.join(said)}")
    for key, shape in expected.items():
        if files.shapes[key] != shape:
            raise InputError(
                f"{files.directory}/{files.files[key]}: {key} has the shape {list(files.shapes[key])}; config.json "
                f"asks for {list(shape)}"
            )
        if files.dtypes[key] not in ("BF16", "F32"):
            raise InputError(
                f"{files.directory}/{files.files[key]}: {key} is stored as {files.dtypes[key]}; only BF16 and F32 are "
                "read, so convert the checkpoint to BF16"
            )


def _refuse_undeclared_layout(directory: str | os.PathLike, config: Qwen3MoeConfig, hf: Mapping[str, Any]) -> None:
    D, F = config.hidden_size, config.expert_size
    writer = str(hf.get("transformers_version") or "")
    major = writer.split(".")[0]
    if D in (F, 2 * F) and not (major.isdecimal() and int(major) >= 5):
        raise InputError(
            f"{directory}: with hidden_size = {D} and moe_intermediate_size = {F} the shape of the fused experts "
            f"can't show whether they are transposed, and config.json declares no writer that fixes it "
            f"(transformers_version = {writer!r}, 5 or later does); store one tensor an expert"
        )


@torch.no_grad()
def _fill_all(parameters: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    for name, parts in checkpoint.plan.items():
        _fill(parameters[name], parts, checkpoint.files)


def _fill(parameter: Tensor, parts: list[Piece], files: TensorFiles) -> None:
    """Copy the pieces into the parameter; proves that they cover it exactly once."""
    covered = 0
    for piece in parts:
        stored = files[piece.key]
        value = stored.to(torch.bfloat16)  # FP32: rounded here, once, to nearest even
        _refuse_non_finite(f"{files.directory}/{files.files[piece.key]}: {piece.key}", stored, value)
        if piece.key.endswith("mlp.gate.weight") and "BF16" in files.dtypes.values() and (value != stored).any():
            raise InputError(
                f"{files.directory}/{files.files[piece.key]}: {piece.key} is an FP32 router in a BF16 checkpoint and "
                "would be rounded here; store it in BF16 if that is meant"
            )
        parameter[piece.index].copy_(value)
        covered += value.numel()
    # Pieces are ascending and disjoint by construction, so the count proves that none is left out.
    if covered != parameter.numel():
        raise RuntimeError(f"{parts} do not cover a parameter of shape {list(parameter.shape)}")


def _refuse_non_finite(where: str, stored: Tensor, value: Tensor) -> None:
    low, high = torch.aminmax(value)  # both are NaN when any value is
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return
    flat = int((~torch.isfinite(value)).flatten().nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), value.shape)]
    raise InputError(
        f"{where}{index} is {stored.flatten()[flat].item()}, not a finite BF16 number; such weights are refused"
    )


def save(model: nn.Module, directory: str | os.PathLike, max_shard_bytes: int = 4 * 10**9) -> None:
    """Write model.config, parameters and tokenizer as transformers does: per-expert keys, BF16.

    An existing checkpoint is replaced as a whole; a directory that holds anything else is refused with InputError, as
    are non-finite weights and experts that exist only in NVFP4. On any error nothing is left behind or changed.
    """
    parameters = _parameters(model)
    tensors = [(p.key, parameters[p.parameter][p.index]) for p in pieces(model.config)]
    for key, tensor in tensors:
        _refuse_non_finite(key, tensor, tensor)
    with replacing_directory(directory, CHECKPOINT_FILES) as new:
        write_json(new / "config.json", model.config.to_hf())
        if model.config.eos_token_ids:
            write_json(new / "generation_config.json", {"eos_token_id": list(model.config.eos_token_ids)})
        tokenizer = getattr(model, "tokenizer", None)
        for name, content in (tokenizer.files if tokenizer else {}).items():
            (new / name).write_bytes(content)
        write_sharded(new, tensors, max_shard_bytes)
