"""The errors that this package raises on purpose."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LAYER: ContextVar[int | None] = ContextVar("layer", default=None)  # for messages alone; no value depends on it


class InputError(ValueError):
    """Bad input from a user: one line that says what was wrong, where, and what to do. The CLI exits with status 2."""


class RowError(InputError):
    """An operator refuses rows of its input for their values; the other rows are good.

    op      the operator
    rows    ascending, at least one: tokens of the batch, or rows of the logits (logprob)
    what    what is wrong with them
    layer   of the model; None outside of layers (default: the one whose operators run now, see in_layer)
    """

    def __init__(self, op: str, rows: Iterable[int], what: str, layer: int | None = None) -> None:
        self.op, self.rows, self.what = op, [int(row) for row in rows], what
        self.layer = LAYER.get() if layer is None else layer
        super().__init__(f"{op}: row {self.rows[0]}: {what}")

    @property
    def reason(self) -> str:
        """All but the rows, whose numbers mean nothing outside of their batch."""
        return f"{self.op}: {self.what}" if self.layer is None else f"layer {self.layer}, {self.op}: {self.what}"


@contextmanager
def in_layer(layer: int) -> Iterator[None]:
    """Names the layer in what is refused inside."""
    before = LAYER.set(layer)
    try:
        yield
    finally:
        LAYER.reset(before)


class UnsupportedDevice(RuntimeError):
    """A tensor lies on a device for which an operator has no kernel; nothing falls back silently."""
