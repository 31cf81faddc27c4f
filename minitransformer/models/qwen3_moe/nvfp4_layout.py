"""How NVFP4 experts lie in the two public checkpoint formats: names, types, shapes, and which scale is which.

Per expert and projection (gate, up, down; N rows, K columns), under `model.layers.{i}.mlp.experts.{e}.{p}_proj.`:

                  ModelOpt                          compressed-tensors
    codes         weight          U8 [N, K/2]       weight_packed        U8 [N, K/2]     even element in the low nibble
    block scales  weight_scale    F8_E4M3 [N, K/16] weight_scale         F8_E4M3 [N, K/16]              rows in order
    outer scale   weight_scale_2  F32 []            weight_global_scale  F32 [1]
    activations   input_scale     F32 []            input_global_scale   F32 [1]              ignored per token; W4A4

ModelOpt stores DECODE scales, amax / 2688; compressed-tensors stores ENCODE scales, 2688 / amax, and its readers take
1 / stored. Names and shapes are those that SGLang (modelopt_quant.py), vLLM (modelopt.py,
compressed_tensors_moe_w4a4_nvfp4.py) and TensorRT-LLM allocate when they load.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig

BLOCK = 16
PROJECTIONS = ("gate_up", "down")
FLT_MAX = np.float32(np.finfo(np.float32).max)
# A decode scale of 16 means a weight of 43,008, and an encode scale below 1/16 means the same: no model has such
# weights, but a scale of the other kind looks like that (for an amax of 1: 2688 instead of 0.00037).
LARGEST_DECODE_SCALE = np.float32(16)


@dataclass(frozen=True)
class Format:
    """The suffixes of one format's tensors, the shape of its scalars, and whether they are encode scales."""

    name: str
    codes: str
    scales: str
    outer: str
    activation: str
    scalar: tuple[int, ...]
    encode: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        return self.codes, self.scales, self.outer, self.activation

    def read_scale(self, key: str, stored: np.float32) -> np.float32:
        """The decode scale that a stored outer scale means. InputError names a scale of the wrong kind or sign."""
        decode = decode_of(stored) if self.encode else stored
        if not (np.isfinite(stored) and stored > 0 and np.isfinite(decode)):
            raise InputError(f"{key} is {stored}, which is no scale; a finite number above 0 belongs there")
        if decode > LARGEST_DECODE_SCALE:
            ours, other = ("an encode scale 2688 / amax", "a decode scale amax / 2688")[:: 1 if self.encode else -1]
            raise InputError(
                f"{key} = {stored} looks like {other} but {self.name} stores {ours} (taken as such, weights would "
                f"reach {decode * np.float32(2688):.4g}); write its inverse, or name the format that the file is in"
            )
        return decode

    def stored_scale(self, key: str, decode: np.float32) -> np.float32:
        """What to store so that a reader gets this decode scale back bit for bit. InputError where nothing does, and
        for a scale that read_scale would refuse."""
        if decode > LARGEST_DECODE_SCALE:
            raise InputError(
                f"{key}: its expert's weights reach {decode * np.float32(2688):.4g}; readers take an outer scale above "
                f"{LARGEST_DECODE_SCALE:g} (weights above {LARGEST_DECODE_SCALE * np.float32(2688):g}) for an inverse; "
                "leave its layer in bf16 (--layers I=bf16)"
            )
        return encode_of(key, decode) if self.encode else decode


MODELOPT = Format("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", (), False)
COMPRESSED_TENSORS = Format(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", (1,), True
)
FORMATS = {f.name: f for f in (MODELOPT, COMPRESSED_TENSORS)}


def decode_of(encode: np.float32) -> np.float32:
    """fl(1 / encode), as readers of compressed-tensors take it."""
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        return np.float32(1) / np.float32(encode)


def encode_of(key: str, decode: np.float32) -> np.float32:
    """The FP32 encode scale e with fl(1 / e) == decode.

    It exists for every decode scale that our quantiser makes, since those are such inverses: fl(1/fl(1/fl(1/x))) is
    fl(1/x) for every x (all 2^23 significands are tested). Of arbitrary FP32 numbers every seventh has none; then
    InputError, because a neighbour would change every weight.
    """
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(np.float32(1) / np.float32(decode), FLT_MAX)
    if decode_of(encode) != decode:
        raise InputError(
            f"{key}: no FP32 encode scale has the inverse {decode!s}, so compressed-tensors can't hold it exactly; "
            "write modelopt"
        )
    return encode


class Part(NamedTuple):
    """One projection of one expert, stored under `module`: rows of parameter `projection` of its layer."""

    module: str
    projection: str
    expert: int
    rows: slice
    column: int
    shape: tuple[int, int]

    def headers(self, form: Format) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored name -> (safetensors type, shape), the activation scale last."""
        N, K = self.shape
        values = ("U8", (N, K // 2)), ("F8_E4M3", (N, K // BLOCK)), ("F32", form.scalar), ("F32", form.scalar)
        return {f"{self.module}.{suffix}": value for suffix, value in zip(form.suffixes, values, strict=True)}


def experts_prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts."


def parts(config: Qwen3MoeConfig, layer: int) -> Iterator[Part]:
    """Gate, up and down of every expert of a layer; gate is the first half of gate_up's rows, up the second."""
    D, F = config.hidden_size, config.expert_size
    for e in range(config.num_experts):
        at = f"{experts_prefix(layer)}{e}."
        yield Part(at + "gate_proj", "gate_up", e, slice(0, F), 0, (F, D))
        yield Part(at + "up_proj", "gate_up", e, slice(F, 2 * F), 1, (F, D))
        yield Part(at + "down_proj", "down", e, slice(0, D), 0, (D, F))
