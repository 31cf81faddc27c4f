"""A second NVFP4 quantiser, in NumPy's FP32 and ml_dtypes' casts, and the inputs on which both must agree.

Written from the execution spec alone: whole arrays, no Numba, nothing of nvfp4.py. Its parts can be exchanged, so that
the mutations put a fault into one line of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from alignment_tests import inputs

F32 = np.float32
MAX = F32(3.4028234663852886e38)
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)


def e4m3(v: np.ndarray) -> np.ndarray:
    """FP32 -> float8_e4m3fn; the clip saturates (ml_dtypes would give NaN)."""
    return np.minimum(v, F32(448)).astype(ml_dtypes.float8_e4m3fn)


def e2m1(y: np.ndarray) -> np.ndarray:
    """FP32 -> codes uint8."""
    return np.clip(y, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def encode_scale(g: np.ndarray) -> np.ndarray:
    s = np.minimum(np.full_like(g, 2688) / g, MAX)
    return np.where((g == 0) | (s == 0), F32(1), s)


@dataclass(frozen=True)
class Oracle:
    """quantize(x FP32 [M, K], g FP32 [M]) -> codes uint8 [M, K], one a byte, scales uint8 [M, K/16], s_dec FP32 [M]."""

    e4m3: Callable = e4m3
    e2m1: Callable = e2m1
    encode_scale: Callable = encode_scale
    clamp: Callable = lambda enc: np.minimum(enc, MAX)

    def quantize(self, x: np.ndarray, g: np.ndarray | None = None):
        with np.errstate(all="ignore"):
            g = np.abs(x).max(1) if g is None else g
            s_enc = self.encode_scale(g)
            s_dec = F32(1) / s_enc
            blocks = x.reshape(len(x), -1, 16)
            factor = s_enc * (F32(1) / F32(6))
            d = self.e4m3(np.minimum(np.abs(blocks).max(2) * factor[:, None], MAX))
            enc = self.clamp(F32(1) / (d.astype(F32) * s_dec[:, None]))
            codes = self.e2m1(blocks * enc[..., None])
        return codes.reshape(x.shape), d.view(np.uint8), s_dec


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """code * block scale in FP64, by ml_dtypes."""
    code = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return code * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, -1)


def powers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """FP32 powers of two with exponents low .. high - 1."""
    return torch.ldexp(torch.ones(shape), inputs.integers(seed, high - low, *shape) + low)


def ties(M: int, K: int) -> Tensor:
    """Every element a tie: outer scale 1 (row amax 2688 stands in the first block), block scales powers of two."""
    tie = torch.from_numpy(TIES)[inputs.integers(1, 7, M, K // 16, 16)]
    tie *= 1 - 2 * inputs.integers(2, 2, M, K // 16, 16)
    tie[..., 0] = 6.0
    x = (tie * powers(3, -5, 8, M, K // 16, 1)).reshape(M, K)
    x[:, :16] = 2688.0
    return x


def midpoints(M: int, K: int) -> Tensor:
    """Block scales at the midpoints of E4M3 (s_enc = 1): six times (m + 1/2) / 8 of a power of two."""
    middle = (inputs.integers(1, 8, M, K // 16, 1) + 8.5) / 8 * powers(2, -5, 8, M, K // 16, 1)
    x = (inputs.normal(3, M, K // 16, 16) * middle).clamp(-6 * middle, 6 * middle)
    x[..., 5:6] = -6 * middle
    x = x.reshape(M, K)
    x[:, :16] = 2688.0
    return x


def beside_ties(M: int, K: int) -> Tensor:
    """One FP32 step below, on or above the ties."""
    x = ties(M, K)
    step = (inputs.integers(4, 3, M, K) - 1).to(torch.int32)
    return (x.view(torch.int32) + step).view(torch.float32)


def any_bits(M: int, K: int) -> Tensor:
    """Finite FP32 of random bits, the exponents of a row around one of its own, so that codes are not all zero."""
    bits = inputs.f32_of_any_bits(1, M * K).view(torch.int32).view(M, K)
    exponent = (inputs.integers(2, 255, M, 1) - inputs.integers(3, 12, M, K)).clamp(0, 253).to(torch.int32)
    return ((bits & -0x7F800001) | (exponent << 23)).view(torch.float32)


def outliers(M: int, K: int) -> Tensor:
    x = inputs.normal(1, M, K)
    x[torch.arange(M), inputs.integers(2, K, M)] = 1e4
    return x


def negative_zeros(M: int, K: int) -> Tensor:
    """Rows of -0 alone, and rows of -0 beside numbers."""
    x = inputs.normal(1, M, K)
    x[inputs.integers(2, 2, M, K) == 0] = -0.0
    x[::2] = -0.0
    return x


def sparse(M: int, K: int) -> Tensor:
    """Whole blocks of zeros beside numbers."""
    return inputs.normal(1, M, K) * (inputs.integers(2, 40, M, K) == 0)


DISTRIBUTIONS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda M, K: inputs.normal(1, M, K),
    "wide": lambda M, K: inputs.normal(1, M, K) * powers(2, -30, 30, M, K),
    "one outlier of 1e4": outliers,
    "tiny": lambda M, K: inputs.normal(1, M, K) * powers(2, -126, -110, M, 1),
    "huge": lambda M, K: inputs.normal(1, M, K).clamp(-1.9, 1.9) * powers(2, 120, 128, M, 1),
    "subnormal": lambda M, K: inputs.normal(1, M, K) * powers(2, -149, -127, M, 1),
    "zeros": torch.zeros,
    "negative zeros": negative_zeros,
    "all ties": ties,
    "beside the ties": beside_ties,
    "one value": lambda M, K: inputs.normal(1, M, 1).expand(M, K).contiguous(),
    "alternating signs": lambda M, K: inputs.normal(1, M, K).abs() * (1 - 2 * (torch.arange(K) % 2)),
    "lognormal channels": lambda M, K: inputs.normal(1, M, K) * torch.exp(2 * inputs.normal(2, 1, K)),
    "E4M3 midpoints": midpoints,
    "any bits": any_bits,
    "sparse": sparse,
}
