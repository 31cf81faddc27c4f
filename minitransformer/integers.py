"""What callers give as a list of integers: lists, tuples, ranges, tensors, NumPy arrays, generators."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from minitransformer.errors import InputError


def listed(value: Any) -> list | None:
    """The elements in order; None for what has none or no order of its own (text, bytes, sets, mappings, numbers).

    Array elements become Python numbers; those of an array of several dimensions, lists.
    """
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist() if value.ndim else None
    ordered = isinstance(value, Sequence | Iterator) and not isinstance(value, str | bytes | bytearray | memoryview)
    return list(value) if ordered else None


def integer(value: Any) -> int | None:
    """A Python integer for any kind of integer (NumPy's, a tensor's single one); None for everything else, bool too."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or value.is_floating_point())):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def as_list(name: str, values: Any) -> list:
    """The elements of a list, tensor, array or generator; InputError for anything else."""
    found = listed(values)
    if found is None:
        raise InputError(f"{name} is {values!r}; give a list")
    return found
