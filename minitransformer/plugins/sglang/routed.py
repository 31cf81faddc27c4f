"""The experts that each token went to, for SGLang's return_routed_experts."""

from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor

from minitransformer.models.qwen3_moe.layers import Note, no_trace


def noting() -> Note:
    """What the model tells its stages to: nothing, unless the server captures expert ids."""
    capturer = get_global_experts_capturer()
    if capturer is None:
        return no_trace

    def note(stage: str, tensor: Tensor, plan: object = None) -> None:
        if stage.endswith(".expert_ids"):
            room = len(capturer.device_cache.buffer)  # of the tokens that pad a graph there may be more
            capturer.capture(int(stage.split(".")[1]), tensor[:room])

    return note
