"""Known answers of whole updates: sha256 of masters, moments, weights and metrics after three of them.

    python -m alignment_tests.goldens.updates          writes updates.json (only after a change of spec)
    python -m alignment_tests.goldens.updates --print  prints the hashes of this machine as JSON

Weights and samples are made by integers (inputs.py): torch's own random numbers follow the vector unit that it picks.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from alignment_tests import inputs
from alignment_tests.goldens import main
from alignment_tests.learner.tiny import tiny_config
from minitransformer.learner import checkpoint
from minitransformer.learner.learner import Learner
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.recipe import get

FILE = Path(__file__).with_name("updates.json")


def learner(device: str, recipe: str = "bf16", **settings) -> Learner:
    model = Qwen3MoeForCausalLM(tiny_config())
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            x = inputs.normal(i, *p.shape, scale=0.125)
            p.copy_(x + 1 if "norm" in name else x)
    model.set_recipe(get(recipe))
    return Learner(model.to(device), **(dict(lr=1e-2, weight_decay=0.1, max_tokens_per_pack=40) | settings))


def samples(seed: int) -> list[Sample]:
    """Four, of 12 to 15 tokens: two packs."""
    ids = [inputs.integers(seed + k, 96, 12 + k).tolist() for k in range(4)]
    old = [-inputs.normal(seed + 50 + k, 9 + k).abs() - 3 for k in range(4)]
    return [Sample(ids[k], 3, 0.5 - k % 3, old[k]) for k in range(4)]


def _updates(device: str, recipe: str, **settings) -> list[Tensor]:
    one, numbers = learner(device, recipe, **settings), []
    for step in range(3):
        one.lr = 1e-2 / (1 + step)
        made = one.update(samples(100 * step))
        numbers += [made.loss, made.grad_norm, made.max_log_prob_gap]
    state = [x for _, x in checkpoint._state(one)] + [p.detach() for p in one.model.parameters()]
    return [torch.tensor(numbers, dtype=torch.float64), *state]


CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "bf16": lambda d: _updates(d, "bf16"),
    "bf16, clipped": lambda d: _updates(d, "bf16", max_grad_norm=0.01),
    "nvfp4_per_token": lambda d: _updates(d, "nvfp4_per_token"),
}


if __name__ == "__main__":
    main(CASES, FILE, "cuda" if "--cuda" in sys.argv else "cpu")
