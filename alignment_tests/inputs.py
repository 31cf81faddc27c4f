"""Test inputs from an integer hash: the same bits on every machine and with every version of NumPy and torch."""

import numpy as np
import torch
from torch import Tensor


def _hash(seed: int, n: int) -> np.ndarray:
    """n uint64 of SplitMix64 started from seed."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(0x100000001)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """FP32, roughly standard normal times scale (a power of two keeps it exact): sums of four 16-bit fields."""
    h = _hash(seed, int(np.prod(shape)))
    fields = sum(((h >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return torch.from_numpy(((fields - 2 * 0xFFFF) * (scale / 37837.0)).astype(np.float32)).view(shape)


def bf16(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """BF16, roughly standard normal times scale."""
    return normal(seed, *shape, scale=scale).bfloat16()


def integers(seed: int, high: int, *shape: int) -> Tensor:
    """int64 in 0 .. high - 1."""
    return torch.from_numpy((_hash(seed, int(np.prod(shape))) % np.uint64(high)).astype(np.int64)).view(shape)


def f32_of_any_bits(seed: int, n: int) -> Tensor:
    """FP32 of random bits: every exponent, subnormals, infinities and NaN among them."""
    return torch.from_numpy((_hash(seed, n) >> np.uint64(32)).astype(np.uint32).view(np.float32))
