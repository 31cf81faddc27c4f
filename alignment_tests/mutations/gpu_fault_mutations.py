"""Faults of the table in which GPU kernels leave bad rows, put back one by one; on the CPU, without a kernel."""

import torch
from torch import Tensor

from alignment_tests.gpu import test_faults
from alignment_tests.mutations import Mutation, patched
from minitransformer.errors import RowError
from minitransformer.ops.gpu import device

FAILS, AGAIN = "a failure is one request's own, or nobody's", "a fault is reported once"
NO_ROW = device._NO_ROW
CHECK = device.check


def one_row_for_all_layers(home: torch.device) -> Tensor:
    return device._of_layer(home, 0)


def before_layer_0(home: torch.device) -> Tensor:
    """Outside of layers is taken for the layer 0."""
    layer = device.LAYER.get()
    return device._of_layer(home, 0 if layer is None else min(layer, device._LAYERS - 1))


def beyond_is_outside(home: torch.device) -> Tensor:
    layer = device.LAYER.get()
    return device._of_layer(home, device._LAYERS if layer is None else min(layer, device._LAYERS))


def never_emptied(home: torch.device, rows: int = NO_ROW) -> None:
    table = device._table(home)
    held = table.clone()
    try:
        CHECK(home, rows)
    finally:
        table.copy_(held)


def padding_counts(home: torch.device, rows: int = NO_ROW) -> None:
    CHECK(home)


def padding_stays(home: torch.device, rows: int = NO_ROW) -> None:
    """Emptied only where a fault is reported: the next batch gets the rows that padded this one."""
    held = device._table(home).clone()
    CHECK(home, rows)
    device._table(home).copy_(held)


def last_layer_first(home: torch.device, rows: int = NO_ROW) -> None:
    found = device._table(home).tolist()
    device._table(home).fill_(NO_ROW)
    for layer, slots in reversed(list(enumerate(found))):
        for (op, text), row in zip(device.FAULTS.items(), slots, strict=False):
            if row < rows:
                raise RowError(op, [row], text, None if layer == device._LAYERS else layer)


def asked_at_once(home: torch.device):
    """Looks at the table while the step still runs."""
    device.check(home)
    return lambda wait: True


MUTATIONS = [
    Mutation("a step that nobody waits for is not looked at", AGAIN,
             patched(device, "watch", lambda home: lambda wait: True), test_faults.told_later),
    Mutation("a step is looked at while it runs", AGAIN, patched(device, "watch", asked_at_once),
             test_faults.told_later),
    Mutation("one row of the table for all layers", FAILS, patched(device, "faults", one_row_for_all_layers),
             test_faults.first_layer_first),
    Mutation("a slot shared by all ops", FAILS, patched(device, "slot", lambda op: 0), test_faults.whose_layer),
    Mutation("outside of layers is layer 0", FAILS, patched(device, "faults", before_layer_0),
             test_faults.outside_and_beyond),
    Mutation("a layer beyond the table is outside", FAILS, patched(device, "faults", beyond_is_outside),
             test_faults.outside_and_beyond),
    Mutation("the last layer is reported", FAILS, patched(device, "check", last_layer_first),
             test_faults.first_layer_first),
    Mutation("reported faults stay", AGAIN, patched(device, "check", never_emptied), test_faults.first_layer_first),
    Mutation("rows that pad a batch count", FAILS, patched(device, "check", padding_counts),
             test_faults.padding_forgotten),
    Mutation("rows that pad a batch stay", AGAIN, patched(device, "check", padding_stays),
             test_faults.padding_forgotten),
]  # fmt: skip
