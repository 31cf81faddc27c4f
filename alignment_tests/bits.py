"""Equality on bits, with a failure that says how many, how far and where."""

import torch
from torch import Tensor

from minitransformer.alignment.ulp import ulp_distance

_INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The same tensor seen as integers, so that -0 differs from +0 and a NaN equals itself."""
    return x.detach().contiguous().view(_INTEGER[x.dtype]) if x.dtype in _INTEGER else x.detach()


def assert_bits_equal(got: Tensor, want: Tensor, what: str = "") -> None:
    """Fails unless both tensors have the same dtype, shape and bits."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: got {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    )
    differ = bits(got) != bits(want)
    if differ.any():
        where = differ.nonzero()[:5].tolist()
        pairs = [(i, got[tuple(i)].item(), want[tuple(i)].item()) for i in where]
        far = ulp_distance(got, want).max().item()
        raise AssertionError(f"{what}: {int(differ.sum())} of {got.numel()} differ, up to {far} ulp; first {pairs}")
