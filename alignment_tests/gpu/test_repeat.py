"""A layer's launches made again (ops/gpu/repeat.py) are those that the other layers would have made themselves."""

import ast
import importlib
import inspect
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to launch")

import torch
import triton
import triton.language as tl

from alignment_tests.gpu import fake_driver
from minitransformer.ops.gpu import cuda, device, launch, library, repeat

pytestmark = pytest.mark.skipif(triton.__version__ not in launch.VERSIONS, reason="this Triton has no short way")
HIDDEN = torch.zeros(5, 64)  # one a layer, of which known_of says nothing


@launch.quick
@triton.jit
def add_kernel(a_ptr, b_ptr, rows_ptr, faults_ptr, out_ptr, n, D: tl.constexpr):
    i = tl.arange(0, D)
    tl.store(out_ptr + i, tl.load(a_ptr + i) + tl.load(b_ptr + i) + tl.load(rows_ptr) + tl.load(faults_ptr), mask=i < n)


class Layer:
    """x, residual -> two sums, over memory of its own; extra: something between the launches."""

    def __init__(self, number: int, width: int = 64, extra=None) -> None:
        self.number, self.extra = number, extra
        self.weight, self.other = torch.zeros(width), torch.zeros(4, width)

    def __call__(self, x, residual, batch, table, store, note):
        residual = x if residual is None else residual
        faults, (k, v) = device.faults(x.device), store
        h, (m, l) = torch.empty_like(x), torch.empty(2, 64).unbind()
        add_kernel[(1,)](x, self.weight, batch.rows, faults, h, 64, 64)
        add_kernel[(1,)](h, self.other.view(-1), table, faults, k, 48, 64)
        if self.extra is not None:
            m = self.extra(self, m)
        add_kernel[(1,)](k, v, batch.rows, faults, m, 48, 64)
        y, new = torch.empty_like(x), torch.empty_like(x)
        add_kernel[(1,)](m, residual, batch.rows, faults, l, 64, 64)
        add_kernel[(1,)](l, residual, batch.rows, faults, new, 64, 64)
        add_kernel[(1,)](new, h, batch.rows, faults, y, 64, 64)
        return y, new


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(repeat, "ALIGNED", 64)  # what the CPU's memory has
    monkeypatch.setattr(repeat, "_prove", lambda *args: None)  # test_repeat_proof.py
    add_kernel.run.known.clear(), add_kernel.device_caches.clear()  # which launch by another test's driver
    with fake_driver.installed() as fake, torch.no_grad():
        yield fake


def launches(driver, layers, run, stores) -> list[tuple]:
    """Every launch with its addresses as names: of a layer's tensors, or by order of appearance in a layer."""
    batch, table, x, residual = SimpleNamespace(rows=torch.zeros(64)), torch.zeros(64), torch.zeros(64), None
    known = {batch.rows.data_ptr(): "rows", table.data_ptr(): "table", device.faults(x.device).data_ptr(): "faults"}
    for i, (layer, store) in enumerate(zip(layers, stores, strict=True)):
        tensors = {"weight": layer.weight, "other": layer.other, "k": store[0], "v": store[1], "hidden": HIDDEN[i]}
        known |= {tensor.data_ptr(): f"{name} {i}" for name, tensor in tensors.items()}
    found = []
    for i, (layer, store) in enumerate(zip(layers, stores, strict=True)):
        driver.launches.clear()
        names = dict(known)
        names[x.data_ptr()] = "x"
        if residual is not None:
            names[residual.data_ptr()] = "residual"
        x, residual = run(layer, x, residual, batch, table, store, None)
        names |= {x.data_ptr(): "y", residual.data_ptr(): "new"}
        for code, (*how, a, b, c, d, e, n, size) in driver.launches:
            seen = [names.setdefault(int(at), f"memory {len(names)}") for at in (a, b, c, d, e)]
            found.append((i, code, how, seen, n, size))
    return found


def known_of(layer) -> tuple[tuple, list]:
    return (layer.extra,), [layer.weight, layer.other]


def both(driver, layers, count=None) -> tuple[list, list, repeat.Layers]:
    stores = [(torch.zeros(64), torch.zeros(64)) for _ in layers]
    for _ in range(2):  # the second time every key is known
        plain = launches(driver, layers, lambda layer, *args: layer(*args), stores)
    assert len(plain) == (count or 6 * len(layers))
    again = repeat.Layers(known_of)
    return plain, launches(driver, layers, again, stores), again


def test_the_launches_are_those_of_the_layers(driver):
    plain, repeated, again = both(driver, [Layer(i) for i in range(5)])
    assert repeated == plain and [one.refused for one in again.recordings.values()] == [None]


def test_layers_of_two_kinds_have_a_recording_each(driver):
    plain, repeated, again = both(driver, [Layer(i, width=128 if i % 2 else 64) for i in range(5)])
    assert repeated == plain and len(again.recordings) == 2


class Products:
    """Two products by a library, with a square matrix."""

    def __init__(self, number: int) -> None:
        self.weight, self.extra = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)), None
        self.other = torch.zeros(1)

    def __call__(self, x, residual, batch, table, store, note):
        return torch.mm(x, self.weight.t()), torch.mm(x if residual is None else residual, self.weight)


def test_a_librarys_products_take_the_other_layers_matrix_as_it_lay(driver):
    layers, again = [Products(i) for i in range(5)], repeat.Layers(known_of)
    batch, want, got = SimpleNamespace(), (torch.ones(3, 8), None), (torch.ones(3, 8), None)
    for layer in layers:
        want = layer(*want, batch, torch.zeros(1), None, None)
        got = again(layer, *got, batch, torch.zeros(1), None, None)
        assert all(map(torch.equal, got, want))
    assert [one.refused for one in again.recordings.values()] == [None]


def four_bytes_off(layer):
    layer.weight = torch.zeros(65)[1:]


def sixteen_bytes_off(layer):
    """Kernels of ours take it as it is, libraries don't."""
    layer.weight = torch.zeros(68)[4:]


def elsewhere(layer):
    layer.weight = torch.zeros(64, device="meta")


@pytest.mark.parametrize("moves", [four_bytes_off, sixteen_bytes_off, elsewhere])
def test_a_tensor_that_lies_otherwise_is_another_kind(driver, moves):
    layers = [Layer(i) for i in range(5)]
    moves(layers[3])
    plain, repeated, again = both(driver, layers)
    assert repeated == plain and len(again.recordings) == 2


def test_what_libraries_ask_of_an_address_is_asked_here():
    assert repeat.ALIGNED == library.ALIGNED


def test_two_weights_of_one_memory_are_not_told_apart(driver):
    layers = [Layer(i) for i in range(5)]
    layers[1].weight = layers[1].other[0]
    plain, repeated, again = both(driver, layers)
    assert repeated == plain and [bool(one.refused) for one in again.recordings.values()] == [True]


def twice(layer, m):
    add_kernel[(2,)](m, m, m, m, m, 64, 64)
    return m


def test_layers_that_differ_in_more_than_tensors_have_a_recording_each(driver):
    layers = [Layer(i, extra=twice if i > 2 else None) for i in range(5)]
    plain, repeated, again = both(driver, layers, 6 * 5 + 2)
    assert repeated == plain and len(again.recordings) == 2


def test_a_thread_that_is_watched_tells_nothing_of_another(driver):
    """Nor does another that is watched at the same time take its launches."""
    seen, inside, go_on = [], threading.Event(), threading.Event()

    def waits(layer, m):
        if threading.current_thread() is not threading.main_thread() and launch.watching() is not None:
            inside.set(), go_on.wait(20)
        return m

    def other():
        with torch.no_grad():
            seen.append(both(driver, [Layer(i, extra=waits) for i in range(3)])[2])

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    with repeat.Recording() as mine:
        Layer(0)(torch.zeros(64), torch.zeros(64), SimpleNamespace(rows=torch.zeros(64)), torch.zeros(64),
                 (torch.zeros(64), torch.zeros(64)), None)  # fmt: skip
    go_on.set(), thread.join(20)
    assert len(mine.calls) == 6 and [len(one.calls) for one in seen[0].recordings.values()] == [6]


def zeroed(layer, m):
    return m.zero_()


def made_of_zeros(layer, m):
    return torch.zeros(64)


def read(layer, m):
    m[0].item()
    return m


def from_the_host(layer, m):
    """New memory, of which PyTorch's schema says that it is a view."""
    return torch.tensor([float(layer.number)] * 64)


def hidden(layer, m):
    return HIDDEN[layer.number]


def copied(layer, m):
    return torch.empty(64, 2)[:, 0].contiguous()


EXTRAS = (zeroed, made_of_zeros, read, from_the_host, hidden, copied)


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_a_recording_cannot_know_is_refused(driver, extra):
    plain, repeated, again = both(driver, [Layer(i, extra=extra) for i in range(5)])
    assert repeated == plain and all(one.refused for one in again.recordings.values())


def launched_in(text: str) -> set[str]:
    """Names of what a text launches, `name[grid](...)`."""
    names = (ast.unparse(n.func.value) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and
             isinstance(n.func, ast.Subscript))  # fmt: skip
    return {name.rsplit(".", 1)[-1] for name in names if name.endswith("_kernel")}


def test_every_launch_of_a_forward_pass_tells_its_watcher():
    """A kernel without `quick` would be missing from a recording, and only the proof would find it."""
    folder, seen = Path(repeat.__file__).parent, 0
    for path in sorted(folder.glob("*.py")):
        module = importlib.import_module(f"minitransformer.ops.gpu.{path.stem}")
        for name in launched_in(path.read_text()):
            kernel = getattr(module, name, None)
            if kernel is not None and "backward" not in f"{path.stem} {name}":
                seen += 1
                assert isinstance(kernel.run, launch.Quick), f"{path.stem}.{name}"
    assert seen > 25, seen
    code = [path.name for path in folder.glob("*.py") if "cuLaunchKernel" in path.read_text()]
    assert code == ["cuda.py"] and "watching().launched" in inspect.getsource(cuda.launch)


def test_without_the_refusal_a_hidden_tensor_would_be_another_layers(driver, monkeypatch):
    monkeypatch.setattr(repeat.Recording, "refuse", lambda self, why: None)
    plain, repeated, _ = both(driver, [Layer(i, extra=hidden) for i in range(5)])
    assert repeated != plain
