"""How the layers of a forward pass are run, one after another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minitransformer.ops import gpu
from minitransformer.weights_stamp import parts

AGAIN = dict(use_reentrant=False, preserve_rng_state=False)  # no operator draws numbers


def runner(recompute: bool, repeat: bool) -> Callable[..., Any]:
    """run(layer, *args) -> layer(*args). recompute: again in the backward pass, from the inputs alone. repeat: a pass
    on a GPU without a trace; without gradients a layer's launches then serve the layers like it (ops/gpu/repeat.py)."""
    if recompute:
        return partial(checkpoint, **AGAIN)
    if repeat and not torch.is_grad_enabled():
        return gpu.repeat.Layers(kind_and_tensors)
    return lambda layer, *args: layer(*args)


def kind_and_tensors(layer: Any) -> tuple[tuple, list[Tensor]]:
    """(what decides beside tensors' shapes which kernels a layer launches, the weights that its kernels read)."""
    tensors, formats = parts(layer)
    kind = tuple((type(one), getattr(one, "recipe", None)) for one in formats)
    return kind, [*tensors, *(t for one in formats for t in one.operands(layer.mlp, tensors[0].device))]
