"""How far apart two tensors are: in differing bits, and in units in the last place (ulp).

The distance of two floats is the number of representable values between them plus one, found on a monotone integer
map of their bits: a number with the sign bit clear maps to its bits, one with the sign bit set to minus the rest of
its bits. So +0 and -0 are 0 ulp apart, although their bits differ: count bits with `differing`, never with ulp == 0.
"""

import torch
from torch import Tensor

# One side is NaN and the other is not: no number of steps leads from one to the other.
NAN_ULP = 2**62

_INTEGER_OF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def bits(x: Tensor) -> Tensor:
    """The same storage as integers of the same width; integers are returned as they are."""
    if x.dtype in _INTEGERS:
        return x
    if x.dtype not in _INTEGER_OF:
        raise TypeError(f"no bit view for {x.dtype}; bfloat16, float16, float32 and integers have one")
    return x.view(_INTEGER_OF[x.dtype])


def differing(a: Tensor, b: Tensor) -> Tensor:
    """bool, the shape of a: where the bits differ (so +0 and -0 differ, and a NaN equals a NaN of the same bits)."""
    _check(a, b)
    return bits(a) != bits(b)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """int64, the shape of a: |map(a) - map(b)| for floats, |a - b| for integers.

    a, b    the same shape and dtype: bfloat16, float16, float32 or integers; TypeError or ValueError otherwise
    NaN     against a NaN: the distance of their bits (0 if equal); against a number or an infinity: NAN_ULP
    """
    _check(a, b)
    if a.dtype in _INTEGERS:
        return (a.to(torch.int64) - b.to(torch.int64)).abs()
    distance = (_monotone(a) - _monotone(b)).abs()
    return distance.masked_fill(a.isnan() != b.isnan(), NAN_ULP)


def _monotone(x: Tensor) -> Tensor:
    wide = bits(x).to(torch.int64)
    magnitude = wide & (0x7FFF if x.element_size() == 2 else 0x7FFFFFFF)
    return torch.where(wide < 0, -magnitude, magnitude)


def _check(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise TypeError(f"bits of {a.dtype} and {b.dtype} cannot be compared")
    if a.shape != b.shape:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
