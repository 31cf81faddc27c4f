"""Plain NumPy versions of rounding.py, written from the specs alone: slow, whole arrays, no Numba, no shared code.

NumPy's FP32 +, -, *, / and sqrt are IEEE, so an oracle built from these functions predicts bits. Inputs are tensors or
arrays; BF16 travels as FP32 that holds BF16 values, except where a name says bits.
"""

import numpy as np
import torch
from torch import Tensor

F32 = np.float32
LOG2E = F32(1.4426950408889634)


def wide(x: Tensor) -> np.ndarray:
    """A BF16 or FP32 tensor as FP32 values."""
    return x.detach().float().numpy()


def bf16(x: np.ndarray) -> Tensor:
    """FP32 -> BF16, nearest even, by integers (finite or infinite input)."""
    u = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    bits = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def fma(a, b, c) -> np.ndarray:
    """fl(a * b + c) in FP32 with one rounding, through FP64 rounded to odd.

    The FP64 product is exact; the FP64 sum is not. Setting its last bit when something was cut off keeps the second
    rounding, to FP32, from seeing a tie that is none.
    """
    with np.errstate(all="ignore"):
        p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
        s = p + c
        part = s - p
        error = (p - (s - part)) + (c - part)
        bits = np.ascontiguousarray(s).view(np.int64)
        toward = np.where((error > 0) == (s > 0), 1, -1)
        odd = np.where((error != 0) & (bits & 1 == 0), bits + np.minimum(toward, 0), bits) | (error != 0)
        return np.where(np.isfinite(s), odd.view(np.float64), s).astype(F32)


def exp2(x: np.ndarray, coefficients) -> np.ndarray:
    """exp2_32: rint, Horner by fma, scaling by a power of two."""
    x = np.asarray(x, F32)
    inside = (x >= -126) & (x < 128)
    safe = np.where(inside, x, F32(0)).astype(F32)
    n = np.rint(safe)
    f = (safe - n).astype(F32)
    q = np.full_like(f, coefficients[-1])
    for c in (*coefficients[-2::-1], 1.0):
        q = fma(f, q, F32(c))
    y = np.ldexp(q, n.astype(int)).astype(F32)
    return np.where(inside, y, np.where(x >= 128, F32(np.inf), np.where(np.isnan(x), x, F32(0)))).astype(F32)


def log(x: np.ndarray, coefficients) -> np.ndarray:
    """log_32 of positive finite values."""
    m, e = np.frexp(np.asarray(x, F32))
    low = m < F32(0.70710678)
    m, e = np.where(low, m * 2, m).astype(F32), (e - low).astype(F32)
    f = (m - F32(1)).astype(F32)
    r = np.full_like(f, coefficients[-1])
    for c in (*coefficients[-2::-1], -0.5):
        r = fma(f, r, F32(c))
    ln2 = float.fromhex("0x1.62e42fefa39efp-1")
    high = F32(float.fromhex("0x1.62e4p-1"))
    t = fma(e, F32(ln2 - float(high)), (f * f).astype(F32) * r)
    return fma(e, high, f + t)


def sigmoid(x: np.ndarray, coefficients) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (F32(1) / (F32(1) + exp2(x * -LOG2E, coefficients))).astype(F32)


def silu(x: np.ndarray, coefficients) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (x / (F32(1) + exp2(x * -LOG2E, coefficients))).astype(F32)


def lane_sum(x: np.ndarray) -> np.ndarray:
    """Lane sum over the last axis, element by element as the spec says it."""
    lanes = np.zeros((*x.shape[:-1], 128), F32)
    with np.errstate(all="ignore"):
        for i in range(x.shape[-1]):
            lanes[..., i % 128] = lanes[..., i % 128] + x[..., i]
        for half in (64, 32, 16, 8, 4, 2, 1):
            lanes[..., :half] = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0].copy()


def slot_sum(x: np.ndarray, axis: int) -> np.ndarray:
    """FP32 sum over an axis, one after another from +0."""
    total = np.zeros_like(np.take(x, 0, axis))
    for i in range(x.shape[axis]):
        total = (total + np.take(x, i, axis)).astype(F32)
    return total
