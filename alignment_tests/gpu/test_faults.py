"""The table of bad rows, without a GPU: what `check` makes of what kernels leave in it."""

import pytest
import torch

from minitransformer.errors import RowError, in_layer
from minitransformer.ops.gpu import device

HOME = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def leave(op: str, row: int) -> None:
    """As a kernel does that was launched now."""
    slots = device.faults(HOME)
    slots[device.slot(op)] = min(row, int(slots[device.slot(op)]))


def test_the_first_layer_is_reported_and_then_all_is_forgotten():
    device.check(HOME)
    for layer, row in ((7, 0), (2, 5), (2, 3), (5, 1)):
        with in_layer(layer):
            leave("router", row)
    leave("logprob", 0)  # outside of layers: after them
    with pytest.raises(RowError, match="router: row 3: a logit") as error:
        device.check(HOME)
    assert (error.value.layer, error.value.rows) == (2, [3])
    device.check(HOME)


def test_outside_of_layers_and_beyond_the_table():
    leave("embedding", 4)
    with pytest.raises(RowError, match="embedding: row 4") as error:
        device.check(HOME)
    assert error.value.layer is None
    with in_layer(10**6):
        leave("rope", 1)
    with pytest.raises(RowError) as error:
        device.check(HOME)
    assert error.value.layer == device._LAYERS - 1


def test_rows_that_pad_a_batch_are_forgotten():
    with in_layer(0):
        leave("router", 9)
    device.check(HOME, rows=9)
    device.check(HOME)


def test_every_op_has_a_slot_and_every_layers_slots_are_aligned():
    assert len(device.FAULTS) <= device._SLOTS
    places = {device._of_layer(HOME, layer).data_ptr() - device._table(HOME).data_ptr() for layer in range(4)}
    assert places == {0, 64, 128, 192}
