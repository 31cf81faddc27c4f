"""AdamW's state and step over all trained parameters: the operator (ops/adamw.py) on one parameter after another.

An update ends with four FP32 tensors of a parameter's size: the sum of its gradients, its master and two moments. All
of them are there before the first value is written, and the operator makes none, so no update is half done for want of
memory. Masters and moments are made when they are first needed, since scoring needs none.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from minitransformer.devices import require_room
from minitransformer.errors import InputError
from minitransformer.integers import listed
from minitransformer.learner.arguments import number
from minitransformer.ops.adamw import adamw, check, scalars

FP32 = 4  # bytes


class Optimizer:
    """step: how many were done. moments: name -> (exp_avg, exp_avg_sq), none before they are needed.

    settings: betas, eps and weight_decay by name. Raises InputError, naming it, for one that AdamW refuses.
    """

    def __init__(self, parameters: Mapping[str, Parameter], lr: float, **settings) -> None:
        self.parameters = parameters
        self.settings = {name: _plain(f"optimizer settings: {name}", value) for name, value in settings.items()}
        self.step, self.moments = 0, {}
        self.lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        value = number("optimizer settings: lr", value)
        try:
            check(value, **self.settings)
        except (TypeError, ValueError) as error:
            raise InputError(f"optimizer settings: {error}") from None
        self._lr = value

    @cached_property
    def masters(self) -> dict[str, Tensor]:
        """FP32 copies of the weights by name."""
        return {name: p.detach().float() for name, p in self.parameters.items()}

    def refuse_without_room(self) -> None:
        """InputError, with the numbers, before the first pass of an update whose end its GPU can't hold."""
        held = ("masters" in vars(self)) + 2 * bool(self.moments)
        count = sum(p.numel() for p in self.parameters.values())
        what = f"the update of {count:,} parameters (gradients, masters and moments in FP32)"
        require_room(next(iter(self.parameters.values())).device, FP32 * count * (4 - held), what)

    def make_state(self) -> None:
        """Masters and zero moments where there are none; after an error nothing is changed."""
        masters = self.masters
        if not self.moments:
            self.moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in masters.items()}

    def apply(self, totals: Mapping[str, Tensor], clip: float) -> None:
        """One step by the FP32 sums of the gradients, each times clip, of masters, moments and the model's weights.

        A parameter without a sum (no token reached it) has a zero gradient: its moments must still decay.
        """
        now = scalars(self.step + 1, self.lr, clip=clip, **self.settings)
        for name, parameter in self.parameters.items():
            adamw(parameter.detach(), totals.get(name), self.masters[name], *self.moments[name], now)
        self.step += 1


def _plain(name: str, value: float | Iterable[float]) -> float | tuple[float, ...]:
    several = listed(value)
    return number(name, value) if several is None else tuple(number(name, x) for x in several)
