"""Our model for a checkpoint directory, its memory allocated and nothing loaded yet: SGLang brings the tensors."""

from pathlib import Path

import torch

from minitransformer import recipe as recipes
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_config import Quantisation, read_quantisation
from minitransformer.models.qwen3_moe.nvfp4_layout import BLOCK, Format
from minitransformer.models.qwen3_moe.weights import read_config
from minitransformer.models.qwen3_moe.weights_nvfp4 import quantised_layers
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.weights_stamp import parts


def build(directory: str, recipe: str | None, device: torch.device) -> tuple[Qwen3MoeForCausalLM, Format | None]:
    """-> (the model on the device, the names of its quantised tensors or None). InputError as from_pretrained.

    recipe: number format of the experts, which beats the checkpoint's own; None keeps that.
    """
    config, hf = read_config(directory, quantised=True)
    said = read_quantisation(Path(directory), hf)
    with torch.device("cpu"):  # SGLang has set a default device; the rope table is made on the CPU, whatever it is
        model = Qwen3MoeForCausalLM(config)
    model = model.to_empty(device=device).requires_grad_(False)
    if said is not None:
        _make_quantised(model, directory, said, device)
    if recipe is not None:
        model.set_recipe(recipe)
    return model, None if said is None else said.format


def require_capturable(model: Qwen3MoeForCausalLM) -> None:
    """InputError for a recipe under which the rows that pad a CUDA graph would move the others' bits."""
    if not all(one.capturable for one in parts(model)[1]):
        raise InputError(
            f"CUDA graphs are not supported with the recipe {model.recipe.name}: its scale is of the whole batch, "
            "padding included; start the server with --cuda-graph-backend-decode disabled"
        )


def _make_quantised(model: Qwen3MoeForCausalLM, directory: str, said: Quantisation, device: torch.device) -> None:
    config = model.config
    layers = quantised_layers(directory, config, said)
    left_out = [(str(i), "bf16") for i, sparse in enumerate(config.sparse_layers) if sparse and i not in layers]
    model.recipe = recipes.get(said.recipe).with_overrides(left_out, config.num_layers)
    E, D, F = config.num_experts, config.hidden_size, config.expert_size

    def empty(N: int, K: int, *outer: int) -> Nvfp4:
        codes, scales = (torch.zeros(E, N, K // k, dtype=torch.uint8, device=device) for k in (2, BLOCK))
        return Nvfp4(codes, scales, torch.zeros(E, *outer, dtype=torch.float32, device=device))

    for i in layers:
        model.layers[i].mlp.set_quantised(model.recipe.for_layer(i), empty(2 * F, D, 2), empty(D, F))
