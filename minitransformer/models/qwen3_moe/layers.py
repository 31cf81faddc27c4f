"""How the layers of a forward pass are run, one after another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as everywhere
from torch.utils.checkpoint import checkpoint

from minitransformer.ops import dispatch, gpu
from minitransformer.weights_stamp import modules_of, parts

AGAIN = dict(use_reentrant=False, preserve_rng_state=False)  # no operator draws numbers
Note = Callable[..., None]  # takes a stage's name and its tensor, and the plan where rows are in dispatch order


def no_trace(stage: str, tensor: Tensor, plan: dispatch.Plan | None = None) -> None:
    """The note of a run that keeps no trace."""


def runner(recompute: bool, repeat: bool) -> Callable[..., Any]:
    """run(layer, *args) -> layer(*args). recompute: again in the backward pass, from the inputs alone. repeat: a pass
    on a GPU without a trace; without gradients a layer's launches then serve the layers like it (ops/gpu/repeat.py)."""
    if recompute:
        return partial(checkpoint, **AGAIN)
    if repeat and not torch.is_grad_enabled():
        return gpu.repeat.Layers(kind_and_tensors)
    return lambda layer, *args: layer(*args)


def kind_and_tensors(layer: Any) -> tuple[tuple, list[Tensor]] | None:
    """(what decides beside tensors' shapes which kernels a layer launches, the weights that its kernels read); None
    for a layer that does more than its modules' classes say: launches alone would leave out hooks."""
    inside = modules_of(layer)
    facts = [one.__dict__ for one in inside]
    hooked = any([d["_forward_hooks"] or d["_forward_pre_hooks"] or "forward" in d for d in facts])
    if hooked or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return None
    tensors, formats = parts(inside)
    configs = {id(d["config"]): d["config"] for d in facts if "config" in d}  # an id may be reused
    own = layer.eps, *map(type, inside), *configs.values()
    kind = *own, *((type(one), getattr(one, "recipe", None)) for one in formats)
    return kind, [*tensors, *(t for one in formats for t in one.operands(layer.mlp, tensors[0].device))]
