"""The operands of a proof show what a library may do otherwise: split K, flush subnormals, round a NaN its own way."""

import pytest
import torch

from minitransformer.ops import linear
from minitransformer.tuning import proof

BF16, FP32 = torch.bfloat16, torch.float32


def split_sum(x, w, parts: int) -> torch.Tensor:
    """The product in `parts` chains over K, added in FP32: what a split-K kernel computes."""
    step = x.shape[1] // parts // 16 * 16
    bounds = [*range(0, step * parts, step), x.shape[1]]
    pieces = [linear.forward(x[:, a:b], w[:, a:b], FP32) for a, b in zip(bounds, bounds[1:], strict=False)]
    return sum(pieces[1:], pieces[0]).to(BF16)


@pytest.mark.parametrize("kind", [*proof.KINDS, "mixed"])
def test_the_seed_decides_the_operands(kind):
    first, again, other = (proof.operands(kind, 9, 30, 64, seed, "cpu") for seed in (1, 1, 2))
    assert all(bool((proof.differing(a, b) == 0).all()) for a, b in zip(first, again, strict=True))
    assert all(bool(proof.differing(a, b).any()) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("K", [576, 768, 2048])
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_split_sum_shows_in_nearly_every_output(parts, K):
    x, w = proof.operands("absorbing", 15, 64, K, parts, "cpu")
    wrong = proof.differing(split_sum(x, w, parts), linear.forward(x, w))
    assert wrong.float().mean() > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_a_split_sum_shows_in_the_first_row_of_mixed_operands(seed):
    x, w = proof.operands("mixed", 1, 64, 2048, seed, "cpu")
    assert proof.first_difference(split_sum(x, w, 2), linear.forward(x, w)) is not None


def test_another_nan_shows():
    for kind in ("special", "mixed"):
        y = linear.forward(*proof.operands(kind, 21, 64, 256, 3, "cpu"))
        nan = y != y
        assert 0 < int(nan.sum()) < y.numel()
        theirs = torch.where(nan, torch.tensor(0x7FC0, dtype=torch.int16).view(BF16), y)
        found = proof.first_difference(theirs, y)
        assert (found.got, found.want, found.count) == (0x7FC0, 0x7FFF, int(nan.sum()))


def test_flushed_subnormals_show():
    x, w = proof.operands("tiny", 8, 64, 256, 3, "cpu")
    kept = linear.forward(x, w, FP32)
    flushed = torch.where(kept.abs() < 2.0**-126, torch.zeros(()), kept)
    assert proof.first_difference(flushed, kept) is not None


def test_tiny_operands_reach_the_least_exponent_of_a_step():
    """Where the largest exponent of the operands lies below -133, the floor of hopper-k16-f25/2 decides."""
    x, w = proof.operands("tiny", 8, 64, 256, 3, "cpu")
    exponents = [torch.frexp(v.float())[1].clamp(min=-125) - 1 for v in (x, w)]
    top = (exponents[0][:, None, :] + exponents[1][None, :, :]).unflatten(-1, (-1, 16)).amax(-1)
    assert (top < -133).float().mean() > 0.05 and (top >= -133).float().mean() > 0.05


def test_the_first_difference_is_named_by_row_and_column():
    a = torch.arange(12.0).view(3, 4)
    b = a.clone()
    assert proof.first_difference(a, b) is None
    b[1, 2], b[2, 0] = -6.0, 9.0
    found = proof.first_difference(a, b)
    assert (found.row, found.column, found.count, found.of) == (1, 2, 2, 12)
    assert str(found) == "row 1, column 2: 0x40c00000 where the spec says 0xc0c00000 (2 of 12 elements differ)"


def test_zeros_of_two_signs_differ_and_nans_of_one_pattern_do_not():
    a = torch.tensor([[0.0, float("nan")]], dtype=BF16)
    assert proof.first_difference(a, a.clone()) is None
    assert proof.first_difference(torch.tensor([[-0.0, float("nan")]], dtype=BF16), a).column == 0


def test_other_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        proof.first_difference(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="cannot be compared"):
        proof.first_difference(torch.zeros(2, 3), torch.zeros(2, 3, dtype=BF16))
