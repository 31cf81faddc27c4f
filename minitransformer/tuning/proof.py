"""Operands on which another order of a sum, another rounding or another NaN shows, and the first element that differs.

A library may split K for one number of rows and not for the next, and on ordinary values a split moves one BF16 result
in a hundred. `absorbing` operands move nearly all: a large product at the first k and its negative at the last hide the
small ones between, each truncated on its own; a sum in two parts keeps them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("normal", "absorbing", "wide", "tiny", "finite", "special")
_FIELDS = {"wide": (90, 165), "tiny": (0, 64), "finite": (0, 255)}  # exponent fields, first and past the last
# All of them in one matrix, row by row; the first row shows a split sum.
MIXED = ("absorbing", "special", "absorbing", "wide", "normal", "tiny", "finite")
_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first element, row by row, whose bits are not the reference's."""

    row: int
    column: int
    got: int
    want: int
    count: int
    of: int

    def __str__(self) -> str:
        return (
            f"row {self.row}, column {self.column}: 0x{self.got:04x} where the spec says 0x{self.want:04x} "
            f"({self.count:,} of {self.of:,} elements differ)"
        )


def operand(kind: str, rows: int, depth: int, gen: torch.Generator, left: bool) -> Tensor:
    """BF16 [rows, depth] of one of KINDS, or 'mixed', on the generator's device; left: x and not the weight."""
    home, shape = gen.device, (rows, depth)
    if kind == "mixed":
        x = torch.empty(shape, dtype=torch.bfloat16, device=home)
        for i, one in enumerate(MIXED[:rows]):
            part = x[i :: len(MIXED)]
            part.copy_(operand(one, len(part), depth, gen, left))
        return x
    if kind in _FIELDS:
        low, high = _FIELDS[kind]
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=gen, device=home, dtype=torch.int16) & ~0x7F80
        field = torch.randint(low, high, shape, generator=gen, device=home, dtype=torch.int16)
        return (bits | (field << 7)).view(torch.bfloat16)
    x = torch.randn(shape, generator=gen, device=home, dtype=torch.bfloat16)
    if kind == "absorbing" and depth > 1:
        size = 2.0 ** (9 + torch.arange(rows, device=home) % 5)
        x[:, 0], x[:, -1] = size, size if left else -size
    elif kind == "special":
        # A row has one of an infinity, a NaN or a -0 on average, so many outputs meet one or two, and some none.
        place = torch.randint(0, 4 * depth, shape, generator=gen, device=home)
        for i, value in enumerate((torch.inf, -torch.inf, torch.nan, -0.0)):
            x.masked_fill_(place == i, value)
    return x


def operands(kind: str, M: int, N: int, K: int, seed: int, device="cuda") -> tuple[Tensor, Tensor]:
    """x [M, K] and w [N, K] BF16."""
    gen = torch.Generator(device).manual_seed(seed)
    return operand(kind, M, K, gen, True), operand(kind, N, K, gen, False)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_INTEGERS[x.dtype]) if x.dtype in _INTEGERS else x


def differing(got: Tensor, want: Tensor) -> Tensor:
    """Where the bits of two tensors of one shape, of floats or integers, differ."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise ValueError(f"{got.dtype} {tuple(got.shape)} cannot be compared with {want.dtype} {tuple(want.shape)}")
    return _bits(got) != _bits(want)


def first_difference(got: Tensor, want: Tensor) -> Difference | None:
    """None if [rows, ...] have the same bits; a row's elements count as its columns, whatever their shape."""
    wrong = differing(got, want)
    count = int(wrong.sum())
    if count == 0:
        return None
    place = int(wrong.reshape(-1).to(torch.uint8).argmax())
    columns = wrong[:1].numel() if wrong.dim() else 1
    mask = (1 << 8 * got.dtype.itemsize) - 1
    bits = [int(_bits(x).reshape(-1)[place]) & mask for x in (got, want)]
    return Difference(*divmod(place, columns), *bits, count, wrong.numel())
