"""What a command does now, on stderr, so that stdout is for results."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from minitransformer.files import tell


class Silent:
    def __call__(self, text: str, total: int | None = None) -> None:
        """Names what is being done now; total: number of `advance` calls to come."""

    def advance(self) -> None:
        """One more is done."""


class Lines(Silent):
    """A line for each part that begins, with the seconds so far."""

    def __init__(self) -> None:
        self.text, self.began = "", time.monotonic()

    def __call__(self, text: str, total: int | None = None) -> None:
        if text != self.text:
            tell(f"{time.monotonic() - self.began:7.1f} s  {text}")
        self.text = text


@contextmanager
def progress(lines: bool = False) -> Iterator[Silent]:
    """A progress line on stderr, on a terminal only, gone when it is done. lines: elsewhere a line for each part."""
    if not sys.stderr.isatty():
        yield Lines() if lines else Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[count]}")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:

        class Shown(Silent):
            task, now, total, done = None, None, None, 0

            def __call__(self, text: str, total: int | None = None) -> None:
                if (text, total) == self.now:  # begun already
                    return
                if self.task is not None:
                    bar.remove_task(self.task)
                self.now, self.total, self.done = (text, total), total, 0
                self.task = bar.add_task(text, total=total, count="")

            def advance(self) -> None:
                self.done += 1
                bar.update(self.task, advance=1, count=f"{self.done}/{self.total}")

        yield Shown()
