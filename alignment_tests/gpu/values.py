"""What the GPU's laws share: values of every kind, and the comparison of bits."""

import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal

BF16 = torch.bfloat16


def agree(got, want, what: str) -> None:
    """Bits of CUDA tensors against CPU tensors; a failure says how many, how far in ulp, and the first five."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits_equal(a.cpu(), b, f"{what}, output {i}")


def exponents(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    """BF16 of random sign and mantissa, exponent field low .. high - 1 (0: subnormals and zero, 255: infinity, NaN)."""
    h = inputs.integers(seed, 1 << 40, *shape)
    bits = (h & 0x807F) | ((low + (h >> 16) % (high - low)) << 7)
    return (bits - ((bits & 0x8000) << 1)).short().view(BF16)


def specials(seed: int, *shape: int) -> torch.Tensor:
    """Normal values with an infinity, a NaN or a zero in about one of 500 places."""
    x, h = inputs.bf16(seed, *shape), inputs.integers(seed + 1, 2000, *shape)
    for place, value in enumerate((float("inf"), float("-inf"), float("nan"), -0.0)):
        x = torch.where(h == place, torch.tensor(value, dtype=BF16), x)
    return x


# Zeros, cancellation, subnormals, overflow, and what IEEE says of infinity and NaN.
VALUES = {
    "normal": lambda seed, *shape: inputs.bf16(seed, *shape),
    "wide": lambda seed, *shape: exponents(seed, 90, 165, *shape),
    "tiny": lambda seed, *shape: exponents(seed, 0, 64, *shape),
    "finite": lambda seed, *shape: exponents(seed, 0, 255, *shape),
    "special": specials,
    "few values": lambda seed, *shape: (inputs.integers(seed, 5, *shape) - 2).to(BF16),
}
