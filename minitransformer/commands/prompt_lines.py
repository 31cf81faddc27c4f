"""Errors of requests and sequences, told by the line of the file that each stands on."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minitransformer.errors import InputError
from minitransformer.files import tell

if TYPE_CHECKING:
    from minitransformer.sampler.sequence import Completion


@contextmanager
def naming_prompts(path: str, lines: Sequence[int]) -> Iterator[None]:
    """The sampler says prompts[0], the learner sequence 0; a user of the command line knows the file and its lines."""
    try:
        yield
    except InputError as error:
        found = re.fullmatch(r"(prompts\[|sequence )(\d+)\]?(.*)", str(error))
        if not found:
            raise
        what = f"{path}:{lines[int(found[2])]}: {'the prompt' if found[1] == 'prompts[' else 'the sequence'}{found[3]}"
        raise InputError(what) from None


def report_failed(path: str, lines: Sequence[int], completions: "Sequence[Completion]") -> bool:
    """One line on stderr for each request that failed, named by the line of its prompt; whether there is one."""
    failed = [(line, c.error) for line, c in zip(lines, completions, strict=True) if c.error is not None]
    for line, what in failed:
        tell(f"error: {path}:{line}: {what}")
    return bool(failed)
