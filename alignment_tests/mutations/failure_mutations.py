"""Faults of how a refused row is handled, put back one by one: whose it is, who goes on, what is kept of it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment_tests import test_cli_failures
from alignment_tests.mutations import Mutation, patched
from alignment_tests.sampler import test_bad_rows
from minitransformer.batch import Batch
from minitransformer.commands import prompt_lines
from minitransformer.errors import InputError, RowError
from minitransformer.learner.packing import Pack
from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.scheduler import Scheduler
from minitransformer.sampler.sequence import Sequence

FAILS, PAGES = "a failure is one request's own, or nobody's", "no page is leaked or owned twice"
FAULTS = Batch.faults


def bad_row() -> None:
    test_bad_rows.fails_alone("nvfp4_per_token", 0, "gate_up")


def align() -> None:
    with tempfile.TemporaryDirectory() as directory:
        test_cli_failures.align_compares_the_others(Path(directory))


def blamed_on_the_first(self: Batch, error: RowError) -> dict[int, str]:
    return {0: next(iter(FAULTS(self, error).values()))}


def blamed_on_all(self: Batch, error: RowError) -> dict[int, str]:
    """A step that an operator refuses ends every request in it."""
    return dict.fromkeys(range(self.num_sequences), f"position 0, {error.reason}")


def counted_within_its_sequence(self: Batch, error: RowError) -> dict[int, str]:
    """Right only while the prompt is read in one chunk: the row's distance from its sequence's first row."""
    [s] = FAULTS(self, error)
    return {s: f"position {error.rows[0] - self.cu_seqlens[s]}, {error.reason}"}


def failed_with_its_pages(self: Scheduler, sequence: Sequence) -> None:
    self.running.remove(sequence)


@contextmanager
def named_by_the_batch(self: Pack, first: int | None = None) -> Iterator[None]:
    """The learner says which token of the pack it was, and nobody knows whose."""
    try:
        yield
    except RowError as error:
        raise InputError(f"sequence 0, position {error.rows[0]}, {error.reason}") from None


MUTATIONS = [
    Mutation("a refused row is blamed on the batch's first request", FAILS,
             patched(Batch, "faults", blamed_on_the_first), bad_row),
    Mutation("a refused row ends every request of the step", FAILS, patched(Batch, "faults", blamed_on_all), bad_row),
    Mutation("a refused row's position is counted from its chunk", FAILS,
             patched(Batch, "faults", counted_within_its_sequence), bad_row),
    Mutation("a failed request keeps its pages", PAGES, patched(Scheduler, "fail", failed_with_its_pages), bad_row),
    Mutation("a failed request does not count on the command line", FAILS,
             patched(prompt_lines, "report_failed", lambda *args: False), align),
    Mutation("poisoned pages stay in the prefix cache", "ignores the prefix cache",
             patched(PagePool, "discard", PagePool.release), test_bad_rows.poisoned_pages),
    Mutation("a refused row of the learner is named by its place in the pack", FAILS,
             patched(Pack, "naming_rows", named_by_the_batch), test_bad_rows.refuses_and_names),
]  # fmt: skip
