"""miniTransformer: a compact Qwen3-MoE whose learner and sampler run the same operators, bit for bit.

    from minitransformer import Learner, Qwen3MoeForCausalLM, Sampler, SamplingParams
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Loaded on first use: `minitransformer --help` and the recipes must not wait for torch.
_EXPORTS = {
    "Batch": "minitransformer.batch",
    "ExecutionSpec": "minitransformer.spec",
    "InputError": "minitransformer.errors",
    "Learner": "minitransformer.learner.learner",
    "Qwen3MoeConfig": "minitransformer.models.qwen3_moe.config",
    "Qwen3MoeForCausalLM": "minitransformer.models.qwen3_moe.model",
    "Recipe": "minitransformer.recipe",
    "Sampler": "minitransformer.sampler.sampler",
    "SamplingParams": "minitransformer.sampler.sequence",
    "Trace": "minitransformer.alignment.trace",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'minitransformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
