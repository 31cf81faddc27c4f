"""The first repeat of a kind is proven (ops/gpu/repeat.py): what a recording can't see ends the pass.

The layers compute on the CPU, by functions that a watcher is told of as of a kernel's launch.
"""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: ops/gpu can't be imported")

import torch

from minitransformer.errors import InputError
from minitransformer.ops.gpu import device, launch, repeat

ROWS = torch.tensor([1, 3])


def fused(values: list) -> None:
    """out = a + scale b: the stand-in of a kernel. NumPy, since PyTorch's operators are no launches."""
    a, b, out, scale = values
    rows = out.numpy()[ROWS.numpy()] if len(out) > len(a) else out.numpy()
    np.add(a.numpy(), np.float32(scale) * b.numpy(), out=rows)
    if len(out) > len(a):  # a store
        out.numpy()[ROWS.numpy()] = rows


def kernel(*values, told: bool = True, run=fused) -> None:
    if told and launch.watching() is not None:
        launch.watching().launched(run, list(values))
    fused(list(values))


def few(*values) -> None:
    kernel(*values, run=Launch())


class Launch:
    """As cuda.Launch, an object of its own for each launch."""

    kernel = 1

    def __call__(self, values: list) -> None:
        fused(values)


class Layer:
    """Sound: each launch is told, and its tensors are the layer's, the batch's or new."""

    def __init__(self, number: int) -> None:
        rng = torch.Generator().manual_seed(number)
        self.number, self.weight = number, torch.randn(1, 8, generator=rng)

    def __call__(self, x, residual, batch, table, store, note):
        residual = x if residual is None else residual
        h, y, new = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        kernel(x, self.weight, h, 2.0)
        self.between(h, batch)
        if store is not None:
            self.keep(h, store)
        kernel(h, residual, y, 0.5)
        kernel(residual, h, new, 1.0)
        return y, new

    def between(self, h, batch) -> None:
        pass

    def keep(self, h, store) -> None:
        for rows in store:
            kernel(h, h, rows, 0.25)


class NumberOfItsOwn(Layer):
    def between(self, h, batch):
        kernel(h, h, h, float(self.number))


class NumberReadFromAWeight(Layer):
    """On a GPU the read is an operator, which is refused; through NumPy nothing sees it."""

    def between(self, h, batch):
        kernel(h, h, h, float(self.weight.numpy()[0, 0]))


class UntoldLaunch(Layer):
    def between(self, h, batch):
        kernel(h, self.weight, h, 1.0, told=False)


class OtherStore(Layer):
    """Its keys go where no one told of."""

    def keep(self, h, store):
        for rows in store:
            kernel(h, h, rows, 0.25, told=False)


class OtherTensor(Layer):
    """Of the batch: known, so not refused, but each layer has its own."""

    def between(self, h, batch):
        kernel(h, batch.each[self.number], h, 1.0)


FAULTS = (NumberOfItsOwn, NumberReadFromAWeight, UntoldLaunch, OtherStore, OtherTensor)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The CPU for a GPU, in a process that has proven nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(repeat, "ALIGNED", 16)  # what the CPU's memory has
    monkeypatch.setattr(repeat, "_proven", set())
    monkeypatch.delenv(repeat.SWITCH, raising=False)
    device.clear(torch.device("cpu"))
    with torch.no_grad():
        yield


def run(layers: list, run_layer, paged: bool, rows: int = 2) -> list[torch.Tensor]:
    each = torch.arange(16.0 * len(layers)).view(-1, 2, 8)
    batch = SimpleNamespace(store_rows_T=ROWS, each=list(each), all=each)
    x, residual, stores = torch.ones(rows, 8), None, []
    for layer in layers:
        stores.append((torch.zeros(4, 8), torch.zeros(4, 8)) if paged else None)
        x, residual = run_layer(layer, x, residual, batch, torch.zeros(1), stores[-1], None)
    return [x, residual, *(rows for store in stores if store is not None for rows in store)]


def repeated(layers: list, paged: bool, kinds=lambda layer: (), rows: int = 2) -> list[torch.Tensor]:
    known_of = lambda layer: (kinds(layer), [layer.weight])  # noqa: E731
    return run(layers, repeat.Layers(known_of), paged, rows)


def plain(layers: list, paged: bool) -> list[torch.Tensor]:
    return run(layers, lambda layer, *args: layer(*args), paged)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("how", ["first", "check", "off"])
def test_sound_layers_pass(how, paged, monkeypatch):
    monkeypatch.setenv(repeat.SWITCH, how)
    calls, own = [], Layer.__call__
    layers = [Layer(i) for i in range(5)]
    want = plain(layers, paged)
    monkeypatch.setattr(Layer, "__call__", lambda self, *args: (calls.append(self.number), own(self, *args))[1])
    assert all(map(torch.equal, repeated(layers, paged), want))
    # The first layer has no residual, the second is watched; the third is repeated and proven.
    assert calls == {"first": [0, 1, 2], "check": [0, 1, 2, 3, 4], "off": [0, 1, 2, 3, 4]}[how]
    calls.clear()
    repeated(layers, paged)
    assert calls == {"first": [0, 1], "check": [0, 1, 2, 3, 4], "off": [0, 1, 2, 3, 4]}[how]


# Another store is there with pages only.
@pytest.mark.parametrize(
    ("fault", "paged"), [(f, paged) for f in FAULTS for paged in (True, False) if paged or f is not OtherStore]
)
def test_what_a_recording_cannot_see_is_found(fault, paged):
    with pytest.raises(RuntimeError, match="other bits than the layer itself: .*MINITRANSFORMER_REPEAT=off"):
        repeated([fault(i) for i in range(5)], paged)


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_proof_it_would_be_wrong(fault, monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(repeat, "_prove", lambda *args: None)
    layers = [fault(i) for i in range(5)]
    assert not all(map(torch.equal, repeated(layers, True), plain(layers, True)))


class OtherKernelOfMany(Layer):
    """Two rows and three are served by different kernels, of which that of three has a number of the layer's own."""

    def between(self, h, batch):
        few(h, h, h, 1.0) if len(h) == 2 else kernel(h, h, h, float(self.number))


def test_other_kernels_of_a_kind_are_proven_too():
    """The kind is the layers'; how many tokens a pass has chooses kernels."""
    layers = [OtherKernelOfMany(i) for i in range(4)]
    repeated(layers, False)
    with pytest.raises(RuntimeError, match="other bits"):
        repeated(layers, False, rows=3)
    repeated(layers, False)


def test_a_kind_that_says_too_little_is_found():
    with pytest.raises(RuntimeError, match="output, residual"):
        repeated([Layer(0), Layer(1), NumberOfItsOwn(2), Layer(3)], False)
    layers = [Layer(0), Layer(1), NumberOfItsOwn(2), Layer(3), Layer(4)]
    assert all(map(torch.equal, repeated(layers, False, lambda layer: (type(layer),)), plain(layers, False)))


def test_a_later_layer_is_found_by_checking_every_one(monkeypatch):
    layers = [Layer(0), Layer(1), Layer(2), NumberOfItsOwn(3)]
    repeated(layers, False)  # the proven one was sound
    monkeypatch.setenv(repeat.SWITCH, "check")
    with pytest.raises(RuntimeError, match="other bits"):
        repeated(layers, False)


def test_a_bad_row_is_left_to_its_own_error():
    """Rows that depend on it may be memory that nobody wrote."""
    table = device._table(torch.device("cpu"))
    table[0, 0] = 7
    repeated([UntoldLaunch(i) for i in range(3)], False)
    device.clear(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="other bits"):  # nothing was taken for proven
        repeated([UntoldLaunch(i) for i in range(3)], False)


def test_another_word_in_the_switch(monkeypatch):
    monkeypatch.setenv(repeat.SWITCH, "yes")
    with pytest.raises(InputError, match="MINITRANSFORMER_REPEAT is 'yes'; set it to first, check or off"):
        repeated([Layer(0)], False)
