"""Inputs of the self-checks, and one case on both sides.

An FP32 NaN has another sign on each machine, so what gives FP32 by arithmetic gets NUMBERS. No input is one that an
operator refuses: a GPU would tell so at its next check.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitransformer.ops import dispatch
from minitransformer.tuning import proof

BF16, FP32 = torch.bfloat16, torch.float32
NUMBERS = ("absorbing", "wide", "normal", "tiny")
COUNTS = (130, 1, 64, 63, 65, 0, 129, 16, 15, 17, 4, 0)  # rows of experts


class Pair(NamedTuple):
    """Outputs of a case by the GPU and by the CPU, both on the CPU."""

    what: str
    got: list[Tensor]
    want: list[Tensor]


CHECKS: dict[str, Callable[[torch.device], Iterator[Pair]]] = {}


def check(name: str) -> Callable:
    def keep(function):
        CHECKS[name] = function
        return function

    return keep


def moved(x: Any, home: torch.device) -> Any:
    """Tensors, and what holds them, on a device."""
    if hasattr(x, "to"):
        return x.to(home)
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return tuple(moved(y, home) for y in x)
    return type(x)(*(moved(getattr(x, f.name), home) for f in fields(x))) if is_dataclass(x) else x


def outputs(x: Any) -> list[Tensor]:
    """The tensors of a result, on the CPU."""
    if isinstance(x, Tensor):
        return [x.cpu()]
    if is_dataclass(x):
        x = [getattr(x, f.name) for f in fields(x)]
    if isinstance(x, tuple | list):
        return list(itertools.chain.from_iterable(map(outputs, x)))
    return [] if x is None else [torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)]


def on_gpu(run: Callable, operands: tuple, home: torch.device) -> list[Tensor]:
    return outputs(run(*moved(operands, home)))


def both(what: str, home: torch.device, run: Callable, *operands: Any, joined: Callable | None = None) -> Pair:
    """run on both sides. joined: a kernel for GPUs alone that does the same there."""
    there = joined if joined and home.type == "cuda" else run
    return Pair(what, on_gpu(there, operands, home), outputs(run(*operands)))


def values(seed: int, *shape: int, kinds: tuple[str, ...] = proof.MIXED, left: bool = True) -> Tensor:
    """BF16 with rows of these kinds in turn."""
    gen, x = torch.Generator().manual_seed(seed), torch.empty(shape, dtype=BF16).view(-1, shape[-1])
    for i, kind in enumerate(kinds[: len(x)]):
        part = x[i :: len(kinds)]
        part.copy_(proof.operand(kind, len(part), shape[-1], gen, left))
    return x.view(shape)


numbers = partial(values, kinds=NUMBERS)
normal = partial(values, kinds=("normal",))


def integers(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def wide_fp32(x: Tensor) -> Tensor:
    """FP32 that is no BF16."""
    return x.float() * 1.0009765625


def uneven_plan(top_k: int = 4) -> dispatch.Plan:
    ids = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    return dispatch.plan(ids[order].view(-1, top_k), len(COUNTS))
