"""The errors that this package raises on purpose."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input from a user: one line that says what was wrong, where, and what to do. The CLI exits with status 2."""


class RowError(InputError):
    """An operator refuses rows of its input for their values; the other rows are good.

    op      the operator
    rows    ascending, at least one: tokens of the batch, or rows of the logits (logprob)
    what    what is wrong with them
    layer   of the model; None outside of layers, and where a GPU finds the fault after the layer has run
    """

    def __init__(self, op: str, rows: Iterable[int], what: str) -> None:
        self.op, self.rows, self.what, self.layer = op, [int(row) for row in rows], what, None
        super().__init__(f"{op}: row {self.rows[0]}: {what}")

    @property
    def reason(self) -> str:
        """All but the rows, whose numbers mean nothing outside of their batch."""
        return f"{self.op}: {self.what}" if self.layer is None else f"layer {self.layer}, {self.op}: {self.what}"


@contextmanager
def in_layer(layer: int) -> Iterator[None]:
    """Names the layer in a RowError."""
    try:
        yield
    except RowError as error:
        error.layer = layer
        raise


class UnsupportedDevice(RuntimeError):
    """A tensor lies on a device for which an operator has no kernel; nothing falls back silently."""
