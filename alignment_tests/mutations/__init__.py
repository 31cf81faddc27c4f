"""Mutations: faults put back on purpose, each of which the test of its law must catch (architecture.md, rule 11)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from minitransformer.errors import InputError


@dataclass(frozen=True)
class Mutation:
    """One fault.

    name    short, unique: what is broken
    law     the law it breaks
    apply   gives a context manager; inside it the fault is in the code
    check   the test of the law: passes without the fault, raises AssertionError (or InputError) with it
    """

    name: str
    law: str
    apply: Callable[[], AbstractContextManager]
    check: Callable[[], None]


def patched(owner: Any, attribute: str, replacement: Any) -> Callable[[], AbstractContextManager]:
    """An `apply` that replaces one attribute of a module or class and puts it back."""

    @contextmanager
    def apply() -> Iterator[None]:
        with mock.patch.object(owner, attribute, replacement):
            yield

    return apply


def assert_caught(mutation: Mutation) -> None:
    """The law holds as the code stands, and its check fails under the mutation."""
    mutation.check()
    with mutation.apply():
        try:
            mutation.check()
        except (AssertionError, InputError):  # found by the law, or refused aloud by the code itself
            return
    raise AssertionError(f"mutation survived: {mutation.name} (law: {mutation.law})")
