"""Tiny random checkpoints in the Hugging Face layout, written out by hand, without the loader's own tables."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment_tests.inputs import bf16
from minitransformer.errors import InputError

V, D, N, G, H, I, F, E = 40, 64, 4, 2, 16, 48, 32, 12


def hf_config(**changes) -> dict:
    """config.json of a tiny model with a dense layer in the middle; a value of None removes the key."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "eos_token_id": 7, "head_dim": H, "hidden_act": "silu", "hidden_size": D,
        "intermediate_size": I, "max_position_embeddings": 64, "mlp_only_layers": [1], "moe_intermediate_size": F,
        "norm_topk_prob": True, "num_attention_heads": N, "num_experts": E, "num_experts_per_tok": 3,
        "num_hidden_layers": 3, "num_key_value_heads": G, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": V,
    }  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def hf_tensors(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """The BF16 tensors of such a model, one tensor an expert and projection; all of them different."""
    d, f = config["hidden_size"], config["moe_intermediate_size"]
    heads, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {at + "q_proj.weight": (heads, d), at + "k_proj.weight": (kv, d), at + "v_proj.weight": (kv, d)}
        shapes |= {at + "o_proj.weight": (d, heads)}
        shapes |= {at + n: (config["head_dim"],) for n in ("q_norm.weight", "k_norm.weight")}
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        sparse = i not in config["mlp_only_layers"]
        width = f if sparse else config["intermediate_size"]
        for e in [f"experts.{e}." for e in range(config["num_experts"])] if sparse else [""]:
            shapes |= {f"{mlp}{e}gate_proj.weight": (width, d), f"{mlp}{e}up_proj.weight": (width, d)}
            shapes |= {f"{mlp}{e}down_proj.weight": (d, width)}
        if sparse:
            shapes[mlp + "gate.weight"] = (config["num_experts"], d)
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    tensors = {}
    for n, (key, shape) in enumerate(shapes.items()):
        noise = bf16(1000 * seed + n, *shape, scale=2.0**-3)
        tensors[key] = (1 + noise.float()).bfloat16() if "norm" in key else noise
    return tensors


def fused(tensors: dict[str, Tensor], layers: tuple[int, ...], experts: int) -> dict[str, Tensor]:
    """The same weights with the experts of these layers fused as transformers 5 does: [E, 2F, D], gate rows first."""
    tensors = dict(tensors)
    for i in layers:
        at = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{e}.{n}_proj.weight") for e in range(experts)])
            for n in ("gate", "up", "down")
        )
        tensors |= {at + "gate_up_proj": torch.cat([gate, up], 1), at + "down_proj": down}
    return tensors


def write(directory: Path, config: dict, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """config.json and model.safetensors, or that many shards with an index, into a directory that may exist."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    place = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(place.values()):
        save_file({n: tensors[n] for n in names if place[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return directory


def refused(call: Callable[[], object], *words: str) -> str:
    """The message of the InputError that the call must raise: one line that holds all of these words."""
    try:
        call()
    except InputError as error:
        message = str(error)
        assert "\n" not in message, f"more than one line: {message}"
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"
        return message
    raise AssertionError("the input was accepted")
