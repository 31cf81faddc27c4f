"""Gradients against finite differences in FP64 of the same formula."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Half a step of BF16's 8 significant bits, relative: what the one rounding at the end of a backward may cost.
BF16_ROUNDING = 2.0**-8


def finite_differences(loss: Callable[[np.ndarray], float], x: np.ndarray, step: float = 2.0**-17) -> np.ndarray:
    """d loss / d x in FP64 by central differences (error about step^2 and 1e-16 / step, both near 1e-10)."""
    x = x.astype(np.float64)
    out = np.empty_like(x)
    for i in np.ndindex(*x.shape):
        kept = x[i]
        x[i] = kept + step
        above = loss(x)
        x[i] = kept - step
        out[i] = (above - loss(x)) / (2 * step)
        x[i] = kept
    return out


def assert_gradient(got: Tensor, want: np.ndarray, what: str, fp32: float = 2e-6) -> None:
    """got is within one rounding of its dtype, and FP32 arithmetic's error relative to the largest value, of want.

    fp32: the allowance for the FP32 arithmetic before the last rounding (cancellation makes it relative to the
    largest entry): some ten operations of 2^-24 each.
    """
    rounding = BF16_ROUNDING if got.dtype == torch.bfloat16 else 0.0
    error = np.abs(got.double().numpy() - want)
    allowed = 1.001 * rounding * np.abs(want) + fp32 * np.abs(want).max() + 1e-9
    worst = np.unravel_index((error - allowed).argmax(), error.shape)
    assert (error <= allowed).all(), f"{what}: {got[worst]} instead of {want[worst]} at {worst}"
