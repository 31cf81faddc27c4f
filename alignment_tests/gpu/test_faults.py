"""The table of bad rows, without a GPU: what `check` makes of what kernels leave in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from minitransformer.errors import RowError, in_layer
from minitransformer.ops.gpu import device

HOME = torch.device("cpu")


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """No capture is asked for, and no fault of a check that failed is left."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        device._table(HOME).fill_(device._NO_ROW)
        try:
            yield
        finally:
            device._table(HOME).fill_(device._NO_ROW)


def leave(op: str, row: int) -> None:
    """As a kernel does that was launched now."""
    slots = device.faults(HOME)
    slots[device.slot(op)] = min(row, int(slots[device.slot(op)]))


@without_a_gpu()
def first_layer_first() -> None:
    device.check(HOME)
    for layer, row in ((7, 0), (2, 5), (2, 3), (5, 1)):
        with in_layer(layer):
            leave("router", row)
    leave("logprob", 0)  # outside of layers: after them
    with pytest.raises(RowError, match="router: row 3: a logit") as error:
        device.check(HOME)
    assert (error.value.layer, error.value.rows) == (2, [3])
    device.check(HOME)


@without_a_gpu()
def outside_and_beyond() -> None:
    leave("embedding", 4)
    with pytest.raises(RowError, match="embedding: row 4") as error:
        device.check(HOME)
    assert error.value.layer is None
    with in_layer(10**6):
        leave("rope", 1)
    with pytest.raises(RowError) as error:
        device.check(HOME)
    assert error.value.layer == device._LAYERS - 1


@without_a_gpu()
def padding_forgotten() -> None:
    with in_layer(0):
        leave("router", 9)
    device.check(HOME, rows=9)
    device.check(HOME)


@without_a_gpu()
def whose_layer() -> None:
    """Two layers' faults of one op do not meet, and an op's slot is its own."""
    for layer, op, row in ((4, "router", 2), (3, "router", 6), (3, "rope", 7)):
        with in_layer(layer):
            leave(op, row)
    with pytest.raises(RowError) as error:
        device.check(HOME)
    assert (error.value.op, error.value.layer, error.value.rows) == ("rope", 3, [7])


class Event:
    """torch.cuda.Event of a GPU that ends a step when it is told to, or when someone waits."""

    over = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


@without_a_gpu()
def told_later() -> None:
    """A fault is told to whoever asks after the step, once, and not while the step runs."""
    with mock.patch.object(torch.cuda, "Event", Event):
        before = device.watch(HOME)
        leave("sample", 3)
        after = device.watch(HOME)
        assert not after(False)
        assert before(True)
        with pytest.raises(RowError, match="sample: row 3: the logits"):
            after(True)
        assert after(True)


def test_a_fault_is_told_later_where_nothing_waits():
    told_later()


def test_the_first_layer_is_reported_and_then_all_is_forgotten():
    first_layer_first()


def test_outside_of_layers_and_beyond_the_table():
    outside_and_beyond()


def test_rows_that_pad_a_batch_are_forgotten():
    padding_forgotten()


def test_the_layers_and_the_ops_keep_apart():
    whose_layer()


def test_every_op_has_a_slot_and_every_layers_slots_are_aligned():
    assert len(device.FAULTS) <= device._SLOTS
    places = {device._of_layer(HOME, layer).data_ptr() - device._table(HOME).data_ptr() for layer in range(4)}
    assert places == {0, 64, 128, 192}
