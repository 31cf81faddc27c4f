"""Gradients by parameter name: summed over packs and measured. All sums have a fixed order.

sum       BF16 from the model, widened exactly; packs are added in FP32, one rounding each, in pack order
norm      squares (exact) and sums in FP64: over a tensor a lane sum (lane l of 128 adds elements l, l + 128, ...
          in ascending order, then a halving tree), then tensor after tensor in the model's order; square root
clipping  only if the norm exceeds the bound: AdamW takes fl(g * clip), clip = bound / norm in FP64, rounded to FP32
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from minitransformer.ops import gpu
from minitransformer.ops.cpu import f32
from minitransformer.ops.jit import jit


def accumulate(totals: dict[str, Tensor], parameters: Mapping[str, Parameter]) -> None:
    """Adds the gradients of one pack, BF16, to the FP32 totals and takes them off the parameters."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            grad = parameter.grad.float()
            totals[name] = totals[name].add_(grad) if name in totals else grad
            parameter.grad = None


def drop(parameters: Mapping[str, Parameter]) -> None:
    """Leaves no gradient on the parameters."""
    for parameter in parameters.values():
        parameter.grad = None


def measure(
    totals: Mapping[str, Tensor], order: Mapping[str, Parameter], max_norm: float | None
) -> tuple[float, float]:
    """(the global norm, clip): what every gradient is to be multiplied by, 1 unless the norm exceeds max_norm.

    order: the names in the model's order; one without a gradient counts as zeros. Raises FloatingPointError, naming
    the first parameter whose gradient is not finite.
    """
    total, names = 0.0, [name for name in order if name in totals]
    for name, square in zip(names, _squares([totals[name] for name in names]), strict=True):
        # FP64 holds the square of any FP32 and their sum: not finite means that an element is not finite.
        if not math.isfinite(square):
            raise FloatingPointError(f"gradient of {name} is not finite; nothing was updated")
        total += square
    norm = math.sqrt(total)
    return norm, max_norm / norm if max_norm is not None and norm > max_norm else 1.0


def _squares(tensors: list[Tensor]) -> Iterable[float]:
    """The FP64 sum of the squares of each."""
    if tensors and tensors[0].is_cuda:
        return gpu.sum_of_squares.sums_of_squares(tensors)
    return (_sum_of_squares(f32(x).reshape(-1)) for x in tensors)


@jit
def _sum_of_squares(x):
    lanes = np.zeros(128)
    whole = x.size - x.size % 128
    for start in range(0, whole, 128):
        for l in range(128):
            v = np.float64(x[start + l])
            lanes[l] += v * v
    for l in range(x.size - whole):
        v = np.float64(x[whole + l])
        lanes[l] += v * v
    half = 64
    while half:
        for l in range(half):
            lanes[l] += lanes[l + half]
        half //= 2
    return lanes[0]
