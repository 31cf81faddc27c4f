"""Calls of the operators' torch.autograd.Functions."""

from typing import Any

import torch


class _Nothing:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps nothing."""

    mark_non_differentiable = save_for_backward


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args). Without gradients its forward alone: PyTorch takes 5 us to get there."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_Nothing(), *args)
