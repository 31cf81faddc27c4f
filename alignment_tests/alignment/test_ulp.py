"""ulp.py: the distance counts representable values, and bits are counted apart from it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.alignment.ulp import NAN_ULP, bits, differing, ulp_distance

BF16, F32 = torch.bfloat16, torch.float32


def one(value, dtype):
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_zeros_of_both_signs_are_no_distance_apart_but_differ(dtype):
    plus, minus = one(0.0, dtype), one(-0.0, dtype)
    assert ulp_distance(plus, minus).item() == 0
    assert differing(plus, minus).item()


@pytest.mark.parametrize(("dtype", "step"), [(BF16, 2**-7), (F32, 2**-23)])
def test_known_distances(dtype, step):
    assert ulp_distance(one(1.0, dtype), one(1.0 + step, dtype)).item() == 1
    # Below 1 the steps are half as wide.
    assert ulp_distance(one(1.0, dtype), one(1.0 - step, dtype)).item() == 2
    assert ulp_distance(one(1.0, dtype), one(2.0, dtype)).item() == round(1 / step)


def test_across_zero_and_up_to_infinity():
    tiny = torch.tensor([1], dtype=torch.int32).view(F32)
    assert ulp_distance(tiny, -tiny).item() == 2
    assert ulp_distance(one(torch.finfo(F32).max, F32), one(float("inf"), F32)).item() == 1


def test_nan_is_far_from_every_number():
    nan, number = one(float("nan"), F32), one(1.0, F32)
    assert ulp_distance(nan, number).item() == NAN_ULP == ulp_distance(number, nan).item()
    assert ulp_distance(nan, nan).item() == 0 and not differing(nan, nan).item()
    other = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(F32)
    assert differing(nan, other).item() and 0 < ulp_distance(nan, other).item() < NAN_ULP


def test_integers_and_refusals():
    assert ulp_distance(torch.tensor([3, -4]), torch.tensor([5, 4])).tolist() == [2, 8]
    with pytest.raises(TypeError):
        ulp_distance(one(1.0, BF16), one(1.0, F32))
    with pytest.raises(ValueError):
        ulp_distance(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError):
        bits(torch.zeros(1, dtype=torch.complex64))


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_steps_of_nextafter(x, y):
    """The distance of two BF16 numbers is the number of steps that a walk over all values takes."""
    pair = torch.tensor([x, y], dtype=torch.int32).to(torch.uint16).view(BF16)
    a, b = pair[:1], pair[1:]
    if a.isnan() or b.isnan():
        return
    every = torch.arange(-0x7F80, 0x7F81)  # -infinity to +infinity in order; one zero
    values = torch.where(every < 0, -every | 0x8000, every).to(torch.int32).to(torch.uint16).view(BF16).float()
    assert (values[1:] > values[:-1]).all()
    steps = torch.searchsorted(values, b.float()) - torch.searchsorted(values, a.float())
    assert ulp_distance(a, b).item() == abs(steps.item())
