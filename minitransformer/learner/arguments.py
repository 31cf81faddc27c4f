"""What callers of a learner give, as plain lists; InputError says what is wrong with which sequence or sample."""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Parameter

from minitransformer.errors import InputError
from minitransformer.integers import listed
from minitransformer.learner.packing import Sample


def number(name: str, value: Any) -> float:
    """Python's float of any kind of number (NumPy's, a tensor's single one); what is saved holds no other kind."""
    try:
        if not isinstance(value, str | bytes | bool):  # YAML reads 1e-8 as a text
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise InputError(f"{name} is {value!r}; give a number")


def temperatures(temperature: float | Sequence[float], count: int) -> list[float]:
    """One positive temperature a sequence; 0 (greedy) becomes 1."""
    given = listed(temperature)
    if given is not None and len(given) != count:
        raise InputError(f"{len(given)} temperatures for {count} sequences; give one for all, or one each")
    values = [temperature] * count if given is None else given
    for s, value in enumerate(values):
        try:
            values[s] = float(value)
        except (TypeError, ValueError):
            raise InputError(f"sequence {s}: temperature {value!r}; give a number") from None
        if not 0 <= values[s] < math.inf:
            raise InputError(f"sequence {s}: temperature {value}; give a finite number above 0, or 0 for greedy")
    return [value or 1.0 for value in values]


def request_ids(given: Sequence[int] | None, count: int) -> list[int]:
    """One id a sequence, each once: a trace would mix the rows of two sequences of one name."""
    names = list(range(count)) if given is None else listed(given)
    if names is None or len(set(names)) != count or len(names) != count:
        raise InputError(f"request_ids is {given!r}; give {count} different ids, one a sequence, or None")
    return names


def samples(given: Iterable[Sample]) -> list[Sample]:
    found = listed(given)
    if found is None:
        raise InputError(f"samples is {given!r}; give a list of Sample")
    for s, sample in enumerate(found):
        if not isinstance(sample, Sample):
            raise InputError(f"sample {s} is {sample!r}; give a Sample")
    return found


def split(parameters: dict[str, Parameter], frozen: Sequence[str]) -> tuple[dict[str, Parameter], ...]:
    """(trained, frozen) by name; autograd is told, so that nothing is computed for a frozen parameter."""
    if isinstance(frozen, str):
        raise InputError(f"frozen is a single string, {frozen!r}; give a list of patterns")
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            close = get_close_matches(pattern, parameters, n=3, cutoff=0.0)
            raise InputError(f"frozen pattern {pattern!r} matches no parameter; the closest are {', '.join(close)}")
    held = {name: p for name, p in parameters.items() if any(fnmatchcase(name, pattern) for pattern in frozen)}
    trained = {name: p for name, p in parameters.items() if name not in held}
    if not trained:
        raise InputError("every parameter is frozen; leave at least one to train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    return trained, held
