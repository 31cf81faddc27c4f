"""The short way of a launch (ops/gpu/launch.py) runs the code that Triton would run, with the same arguments."""

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to launch")

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from alignment_tests.gpu import fake_driver
from minitransformer.ops.gpu import cuda, launch
from minitransformer.ops.gpu.tiles import in_turn

pytestmark = pytest.mark.skipif(triton.__version__ not in launch.VERSIONS, reason="this Triton has no short way")


def copy(x_ptr, y_ptr, n, shift, factor, FLAG: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i * shift, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * factor if FLAG else x, mask=i < n)


def windows(x_desc, y_desc, y_ptr, n, ROWS: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :], x_desc.load([n, 0]))
    y_desc.store([n, 0], x_desc.load([0, 0]))


def in_order(x_ptr, y_ptr):
    in_turn()
    tl.store(y_ptr, tl.load(x_ptr))


@pytest.fixture
def driver():
    with fake_driver.installed() as fake:
        yield fake


def calls() -> list[tuple[tuple, dict]]:
    """Arguments that differ from the first ones in one thing that decides the code, or in none."""
    x, y = torch.zeros(256), torch.zeros(256)
    first = (x, y, 48, 64, 2.0, True, 128)
    others = [
        {}, {2: 80}, {4: 3.0},  # the same code
        {0: x[1:]}, {1: y[2:]}, {0: x[4:]}, {0: x.bfloat16()}, {1: y.half()}, {0: torch.nn.Parameter(x)},
        {2: 1}, {2: 47}, {3: 1}, {3: 3}, {3: 0}, {2: 1 << 40}, {2: -16}, {2: True}, {3: False}, {4: 2},
        {5: False}, {5: 1}, {5: 0}, {6: 64}, {1: None},
    ]  # fmt: skip
    found = [(tuple(change.get(i, value) for i, value in enumerate(first)), {"num_warps": 4}) for change in others]
    return [*found, (first, {"num_warps": 8}), (first, {"num_warps": 4, "enable_fp_fusion": False})]


def launched(driver, kernel, args, options) -> tuple:
    """The code and its arguments, or what was refused."""
    driver.launches.clear()
    try:
        kernel[(3, 2)](*args, **options)
    except Exception as error:
        return ("refused", type(error).__name__)
    [found] = driver.launches
    return found


def differences(driver, short: JITFunction) -> list[int]:
    """The calls that Triton's own way launches otherwise; each is made twice, so that its key is known."""
    own, wrong = JITFunction(copy), []
    for _ in range(2):
        for i, (args, options) in enumerate(calls()):
            if launched(driver, short, args, options) != launched(driver, own, args, options):
                wrong.append(i)
    return wrong


def test_the_short_way_launches_what_triton_would(driver):
    kernel = launch.quick(triton.jit(copy))
    assert differences(driver, kernel) == []
    before, kernel.run.triton_run = kernel.run.triton_run, None  # to call it would fail
    for args, options in calls()[:12]:
        kernel[(1,)](*args, **options)
    kernel.run.triton_run = before


# A part of a key, and what is left of it: types of all arguments, constants, options, then an entry an argument.
FORGETFUL = {
    "alignment": lambda i, e: e[:2] if i > 3 and isinstance(e, tuple) else e,
    "dtype": lambda i, e: e[1:] if i > 3 and isinstance(e, tuple) else e,
    "integers that are 1": lambda i, e: 0 if i > 3 and e == 1 else e,
    "multiples of 16": lambda i, e: 0 if i > 3 and e == 16 else e,
    "constants": lambda i, e: () if i == 2 else e,
    "options": lambda i, e: e[0] if isinstance(e, tuple) and e[:1] == ("num_warps",) else e,
}


@pytest.mark.parametrize("forgets", FORGETFUL)
def test_a_key_that_forgets_is_seen(driver, monkeypatch, forgets):
    kernel, honest, weaker = launch.quick(triton.jit(copy)), launch.Quick.key_of, FORGETFUL[forgets]

    def key_of(self, gpu, args, options):
        key, values = honest(self, gpu, args, options)
        return (key if key is None else tuple(map(weaker, itertools.count(), key))), values

    monkeypatch.setattr(launch.Quick, "key_of", key_of)
    assert differences(driver, kernel)


def test_true_and_1_are_two_constants():
    kernel = launch.quick(triton.jit(copy))
    x = torch.zeros(256)
    keys = {kernel.run.key_of(0, (x, x, 48, 64, 2.0, flag, 128), {})[0] for flag in (True, 1, False, 0)}
    assert len(keys) == 4


def test_windows_are_the_maps_that_triton_makes_and_made_once(driver):
    kernel, own = launch.quick(triton.jit(windows)), JITFunction(windows)
    x, y = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(512, 64, dtype=torch.bfloat16)
    for rows, operands in [(64, (x, y)), (64, (y, x)), (32, (x, y)), (64, (x[128:], y)), (64, (x, y))]:
        short = tuple(launch.Window(tensor, (rows, 64)) for tensor in operands)
        want = launched(driver, own, (*(w.descriptor() for w in short), y, 16, rows), {})
        for _ in range(2):
            assert launched(driver, kernel, (*short, y, 16, rows), {}) == want
    before = driver.maps
    kernel[(1,)](launch.Window(x, (64, 64)), launch.Window(y, (64, 64)), y, 16, 64)
    assert driver.maps == before


def test_who_watches_launches_sees_all_of_them(driver):
    kernel, seen = launch.quick(triton.jit(copy)), []
    args, options = calls()[0]
    for _ in range(2):
        kernel[(1,)](*args, **options)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        triton_run, kernel.run.triton_run = kernel.run.triton_run, lambda *a, **k: seen.append("Triton")
        kernel[(1,)](*args, **options)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
        kernel.run.triton_run = triton_run
    assert seen == ["Triton"]


def test_a_kernel_that_never_waits_is_not_launched_early(driver):
    (args, options), early = calls()[0], launch.quick(triton.jit(in_order))
    early[(1,)](*args[:2], launch_pdl=True)
    with pytest.raises(RuntimeError, match="copy is launched early and never waits"):
        launch.quick(triton.jit(copy))[(1,)](*args, **options, launch_pdl=True)


@pytest.mark.parametrize(("n", "by"), [(0, 4), (1, 4), (4, 4), (5, 4), (10**6 + 1, 128)])
def test_integers_are_tritons(n, by):
    assert launch.cdiv(n, by) == triton.cdiv(n, by)
    assert launch.next_power_of_2(n) == triton.next_power_of_2(n)


@pytest.mark.parametrize(("versions", "code", "status", "found"), [
    (("_v2", "_v3"), 0, 1, (77, 88)), (("",), 0, 1, (77, None)), ((), 0, 1, None), (("_v2",), 901, 1, None),
    (("_v2",), 0, 0, None),
])  # fmt: skip
def test_a_capture_has_a_number_of_its_own(versions, code, status, found, monkeypatch):
    """None where the driver doesn't know the question or refuses it, or the stream is in no capture."""
    def ask(stream, state, identity, graph, *rest):
        state._obj.value, identity._obj.value = status, 77
        if versions != ("",):
            graph._obj.value = 88
        return code

    driver = SimpleNamespace(**{f"cuStreamGetCaptureInfo{version}": ask for version in versions})
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    assert cuda.capture(3) == found


def test_a_graph_tells_that_it_is_gone(monkeypatch):
    """The driver calls what it was given, with what it was given, when it frees the object that the graph keeps."""
    kept, codes = {}, {"create": 0, "retain": 0}

    def create(made, argument, call, count, flags):
        made._obj.value, kept["end"] = 99, (call, argument)
        assert (count, flags) == (1, 1)
        return codes["create"]

    def retain(graph, made, count, flags):
        assert (graph.value, made.value, count, flags) == (88, 99, 1, 1)
        return codes["retain"]

    driver = SimpleNamespace(cuUserObjectCreate=create, cuGraphRetainUserObject=retain)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    first, second = cuda.end_of(88), cuda.end_of(88)
    assert not first() and not second()
    call, argument = kept["end"]
    call(argument)
    assert second() and second() and not first()
    assert not cuda.end_of(None)()
    for name in codes:  # who doesn't watch says that it isn't gone
        codes[name] = 1
        assert not cuda.end_of(88)()
        codes[name] = 0
    monkeypatch.setattr(cuda, "_driver", SimpleNamespace)
    assert not cuda.end_of(88)()


def test_a_thread_gets_a_context_before_its_first_launch(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    home = torch.device("cuda", 0)
    for threads in (1, 2):
        with ThreadPoolExecutor(1) as fresh:
            for _ in range(3):
                fresh.submit(launch.on, home).result()
        assert asked == [home] * threads


def test_a_launch_in_cpp_is_made_again_with_what_has_changed(monkeypatch):
    """As a repeated layer makes it (ops/gpu/repeat.py): the driver gets what a launch of its own would give it."""
    seen = []

    def given(config, function, pointers, extra):
        config = config._obj
        read = [ctypes.cast(at, ctypes.POINTER(kind)).contents.value for at, kind in zip(pointers, kinds, strict=True)]
        how = config.x, config.threads, config.shared, config.stream, config.count
        seen.append((function, how, [(config.attributes[i].id, config.attributes[i].value) for i in range(2)], read))
        return 0

    kinds = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    monkeypatch.setattr(cuda, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    x, y, told = torch.zeros(4), torch.zeros(4), []
    launch.watch(SimpleNamespace(launched=lambda *call: told.append(call)))
    try:
        cuda.launch(5, 3, 64, 96, (x, y, 11, 0.5, None), True)
    finally:
        launch.watch(None)
    ((run, arguments),) = told
    assert seen == [(5, (3, 64, 96, 7, 1), [(6, 1), (0, 0)], [x.data_ptr(), y.data_ptr(), 11, 0.5, None])]
    arguments[1] = z = torch.zeros(4)
    run(arguments)
    arguments[2] = 12
    run(arguments)
    assert [call[-1] for call in seen[1:]] == [[x.data_ptr(), z.data_ptr(), n, 0.5, None] for n in (11, 12)]
    assert [call[:-1] for call in seen[1:]] == [seen[0][:-1]] * 2
