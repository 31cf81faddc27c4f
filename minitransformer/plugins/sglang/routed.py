"""The experts that each token went to, for SGLang's return_routed_experts."""

from typing import Any

import torch
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor

from minitransformer.models.qwen3_moe.model import Note, no_trace


def noting() -> Note:
    """What the model tells its stages to: nothing, unless the server captures expert ids."""
    capturer = get_global_experts_capturer()
    if capturer is None:
        return no_trace

    def note(stage: str, tensor: Tensor, plan: object = None) -> None:
        if stage.endswith(".expert_ids"):
            capturer.capture(int(stage.split(".")[1]), tensor)

    return note


def host_cache(original: Any, cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """BaseHostCache.__init__, which pins its memory: not possible on a machine without a GPU."""
    if torch.cuda.is_available():
        return original(cache, num_tokens, num_layers, topk_size, name)
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name
    return None
