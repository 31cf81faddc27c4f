"""How graphs of prefills are captured (plugins/sglang/prefill_graphs.py), and what a capture that fails leaves behind.

Without a GPU: torch's part is replaced, and what is done is written down.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its package chooses attention's kernel")

import torch

from alignment_tests.plugin import engines
from alignment_tests.plugin.test_prefill_graphs import PAGE, PAGES, SIZES, batch_of
from minitransformer.ops.gpu import capture
from minitransformer.plugins.sglang import prefill_graphs
from minitransformer.plugins.sglang.prefill_graphs import RESERVE, PrefillGraphs


@pytest.fixture
def captured(monkeypatch):
    """(what PrefillGraphs itself does, in order, without a GPU; a model; the free bytes after each capture).

    torch counts the graphs' own memory as kept, not in use. hidden's `fails` are raised, one a call; None: it ends.
    """
    did, free, pools, small = [], [], iter("abc"), engines.tiny(max_positions=400)

    @contextmanager
    def capturing(graph, pool, stream):
        did.append(f"capture in {pool}")
        yield

    @contextmanager
    def on(stream):
        try:
            yield
        finally:
            did.append(f"on {stream}")

    def hidden(batch, pool, note):
        did.append(batch.cu_seqlens[-1])
        if hidden.fails and (error := hidden.fails.pop(0)) is not None:
            raise error

    hidden.fails = []

    monkeypatch.setattr(prefill_graphs, "takes", lambda config: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda home: (free.pop(0), 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda home: 8 * RESERVE)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda home: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "its stream")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(capture, "close", lambda device, pool: did.append(f"closed {pool}"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("given back"))
    monkeypatch.setattr(prefill_graphs.gpu.device, "clear", lambda home: did.append("clear"))
    return did, SimpleNamespace(device=small.device, config=small.config, hidden=hidden), free


def test_faults_of_a_capture_are_forgotten_and_the_largest_is_first(captured):
    did, model, free = captured
    free += [RESERVE, RESERVE]
    assert PrefillGraphs(model, None, PAGE * PAGES, SIZES).sizes == [128, 256]
    assert did == [x for n in (256, 128) for x in (n, "clear", "capture in a", n, "on its stream", "given back")]


def test_a_graph_that_leaves_too_little_memory_is_given_back(captured, caplog):
    did, model, free = captured
    free += [RESERVE - 1, RESERVE]
    made = PrefillGraphs(model, None, PAGE * PAGES, SIZES)
    assert made.sizes == [128] and list(made.graphs) == [128] and "prefills of 256 tokens" in caplog.text
    assert did[:7] == [256, "clear", "capture in a", 256, "on its stream", "given back", "given back"]
    assert did[7:] == [128, "clear", "capture in b", 128, "on its stream", "given back"]
    assert made.run(batch_of([129], [0])) is None


def hidden_error() -> RuntimeError:
    """What the end of a capture raises while the reason is on its way out."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("of 2.00 GiB")
    return error


OF_MEMORY = {
    "torch's": torch.OutOfMemoryError("of 2.00 GiB"), "CUDA's": torch.AcceleratorError("CUDA error: out of memory"),
    "a kernel's": RuntimeError("Triton Error [CUDA]: out of memory"), "hidden": hidden_error(),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_MEMORY)
@pytest.mark.parametrize("in_capture", [False, True])
def test_a_capture_that_fails_leaves_nothing_behind(captured, caplog, name, in_capture):
    """No faults of its own tokens, the stream of before, and nothing open in torch, whose pool is not used again."""
    did, model, free = captured
    model.hidden.fails += [None, OF_MEMORY[name]] if in_capture else [OF_MEMORY[name]]
    free += [RESERVE]
    assert PrefillGraphs(model, None, PAGE * PAGES, SIZES).sizes == [128] and "prefills of 256 tokens" in caplog.text
    failed = [256, "clear"] + ["capture in a", 256, "on its stream", "closed a"] * in_capture + ["given back"]
    assert did[: len(failed)] == failed and did[len(failed)] == 128
    assert f"capture in {'b' if in_capture else 'a'}" in did[len(failed) :]


def test_a_pool_that_graphs_have_is_left_where_a_later_capture_fails(captured):
    """The graphs that there are keep it; the next one takes another."""
    did, model, free = captured
    model.hidden.fails += [None, None, None, hidden_error()]
    free += [RESERVE, RESERVE]
    made = PrefillGraphs(model, None, PAGE * PAGES, (128, 256, 300))
    assert made.sizes == [128, 300]
    assert [x for x in did if str(x).startswith(("capture", "closed"))] == [
        "capture in a", "capture in a", "closed a", "capture in b"]  # fmt: skip


def test_another_error_ends_the_server(captured):
    did, model, _ = captured
    model.hidden.fails += [RuntimeError("CUDA error: an illegal memory access was encountered")]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        PrefillGraphs(model, None, PAGE * PAGES, SIZES)
    assert did == [256, "clear"]
