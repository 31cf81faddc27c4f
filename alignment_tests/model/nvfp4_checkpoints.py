"""NVFP4 checkpoints in both formats, by hand: names, config fields and values without the loader's tables."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment_tests.inputs import integers
from alignment_tests.model.checkpoints import hf_config, hf_tensors, refused, write
from minitransformer.models.qwen3_moe import quantise
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
from minitransformer.models.qwen3_moe.weights_nvfp4 import load_quantised
from minitransformer.recipe import get

FORMS = ("modelopt", "compressed-tensors")
SUFFIXES = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Stored = dict[str, tuple[Tensor, Tensor, np.float32]]  # module -> codes, block scales, the DECODE scale that is meant


def config_of(form: str, ignore: tuple[str, ...] = (), **changes) -> dict:
    """config.json with the quantization_config that tools of each kind publish, attention and routers left out."""
    if form == "modelopt":
        tensor = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        said = {
            "config_groups": {"group_0": {"input_activations": tensor, "weights": tensor, "targets": ["Linear"]}},
            "ignore": ["lm_head", "*.self_attn*", "model.layers.*.mlp.gate", "model.layers.1*", *ignore],
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.35.0"},
            "quant_method": "modelopt",
        }
    else:
        args = {
            "actorder": None, "block_structure": None, "group_size": 16, "num_bits": 4, "observer": "minmax",
            "observer_kwargs": {}, "strategy": "tensor_group", "symmetric": True, "type": "float",
        }  # fmt: skip
        said = {
            "config_groups": {
                "group_0": {
                    "input_activations": args | {"dynamic": "local"},
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": args | {"dynamic": False},
                }
            },
            "format": "nvfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:model.layers.1.mlp.*", *ignore],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    return hf_config(**changes) | {"quantization_config": said}


def outer_scale(form: str, expert: int, projection: str) -> tuple[np.float32, np.float32]:
    """(stored, decode) scales, all different; gate's and up's are not equal, as in published checkpoints."""
    n = np.float32(3 * expert + ("gate", "up", "down").index(projection) + 1)
    if form == "modelopt":
        return (decode := n * np.float32(3.85e-5) / np.float32(7)), decode
    stored = np.float32(26880) / n
    return stored, np.float32(1) / stored


def nvfp4_tensors(config: dict, form: str, layers=(0, 2), outer=outer_scale) -> tuple[dict[str, Tensor], Stored]:
    """The tensors of a checkpoint whose experts in these layers have random codes and scales, and what they mean."""
    tensors, meant = hf_tensors(config), {}
    for i in layers:
        for e in range(config["num_experts"]):
            for p in ("gate", "up", "down"):
                module = f"model.layers.{i}.mlp.experts.{e}.{p}_proj"
                N, K = tensors.pop(module + ".weight").shape
                seed = 1000 * i + 10 * e + len(p)
                codes = integers(seed, 256, N, K // 2).to(torch.uint8)
                scales = integers(seed + 5, 0x7F, N, K // 16).to(torch.uint8)  # 0 to 448, zeros among them
                stored, decode = outer(form, e, p)
                put(tensors, form, module, codes, scales, stored)
                meant[module] = codes, scales, decode
    return tensors, meant


def put(tensors: dict[str, Tensor], form: str, module: str, codes: Tensor, scales: Tensor, stored: np.float32) -> None:
    scalar = torch.tensor(stored) if form == "modelopt" else torch.tensor([stored])
    values = codes, scales.view(torch.float8_e4m3fn), scalar, torch.ones_like(scalar)
    tensors |= {f"{module}.{suffix}": value for suffix, value in zip(SUFFIXES[form], values, strict=True)}


def written(directory: Path, form: str, **options) -> tuple[Path, dict, Stored]:
    """A checkpoint on disk, its config.json and what its experts mean."""
    config = config_of(form)
    tensors, meant = nvfp4_tensors(config, form, **options)
    return write(directory / form, config, tensors), config, meant


def value(codes: Tensor, scales: Tensor, decode: np.float32) -> Tensor:
    """FP32 [N, K]: code * block scale * outer scale in FP64, where it is exact, rounded once. Low nibble first."""
    packed = codes.numpy()
    unpacked = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    block = scales.view(torch.float8_e4m3fn).double().numpy().repeat(16, -1)
    return torch.from_numpy((_E2M1[unpacked] * block * np.float64(decode)).astype(np.float32))


def bf16_checkpoint(directory: Path, **changes) -> Path:
    config = hf_config(**changes)
    return write(directory / "bf16", config, hf_tensors(config))


def quantised(directory: Path, form: str, recipe="nvfp4_per_token", overrides=(), **options) -> Path:
    """directory/form, written by `quantise` from the BF16 checkpoint directory/bf16 (made if it is not there)."""
    source = directory / "bf16" if (directory / "bf16").exists() else bf16_checkpoint(directory)
    chosen = get(recipe).with_overrides(overrides, 3)
    quantise.quantise(source, directory / form, chosen, FORMATS[form], **options)
    return directory / form


def refuse(directory, form, change, *words, config=None):
    """Loading must refuse the checkpoint after change(tensors)."""
    config = config or config_of(form)
    tensors, _ = nvfp4_tensors(config, form)
    change(tensors)
    path = write(directory / form, config, tensors)
    said = refused(lambda: load_quantised(path), str(path), *words)
    assert refused(lambda: Qwen3MoeForCausalLM.from_pretrained(path)) == said
    return said
