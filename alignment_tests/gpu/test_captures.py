"""A capture that fails (ops/gpu/capture.py) leaves torch as it was: its allocator, its generator and its stream.

Once on a GPU, and once anywhere, with a torch of which only what a capture opens and closes is left.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.ops.gpu import capture
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing can be captured"),
]
gpu = lambda test: on_a_gpu[0](on_a_gpu[1](test))  # noqa: E731
MIB = 1 << 20


@pytest.fixture
def opened(monkeypatch):
    """What is open of a torch whose captures end with an error after `forbid()`: pools, generator, stream."""
    now = SimpleNamespace(pools=[], released=[], capturing=False, stream="before", broken=False, handles=iter("pqrs"))

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, now.stream = now.stream, self.stream

        def __exit__(self, *why):
            now.stream = self.before

    class Graph:
        def __init__(self, graph, pool=None, stream=None):
            self.pool, self.on = pool or "its own", On(stream or "of captures")

        def __enter__(self):
            self.on.__enter__()
            assert self.pool not in now.pools, "already recording"
            now.pools.append(self.pool)
            now.capturing, now.broken = True, False

        def __exit__(self, *why):
            if now.broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            now.pools.remove(self.pool)
            now.capturing = False
            self.on.__exit__()

    def end(device, pool):
        if pool not in now.pools:
            raise RuntimeError("not currently recording")
        now.pools.remove(pool)

    def forbid():
        now.broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    now.forbid = forbid
    for name, value in {"graph": Graph, "stream": On, "current_stream": lambda: now.stream, "current_device": lambda: 0,
                        "device": lambda device: nullcontext(), "CUDAGraph": lambda: "graph",
                        "graph_pool_handle": lambda: next(now.handles)}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: now.released.append(pool), raising=False)
    monkeypatch.setattr(capture.torch, "zeros", lambda *args, **options: None)
    return now


def check_nothing_stays_open(now) -> None:
    with pytest.raises(RuntimeError, match="previous error") as caught, capture.capture("graph", "shared"):
        now.forbid()
    assert "not permitted" in str(caught.value.__context__)
    assert (now.pools, now.capturing, now.stream) == ([], False, "before")
    assert now.released == ["shared"], "the pool's memory comes back, and once"


def test_a_failed_end_is_closed(opened):
    check_nothing_stays_open(opened)


def test_without_the_closing_all_stays_open(opened, monkeypatch):
    monkeypatch.setattr(capture, "close", lambda device, pool: None)
    with pytest.raises(AssertionError):
        check_nothing_stays_open(opened)
    assert opened.pools == ["shared"] and opened.capturing


def test_an_error_whose_capture_ends_well_is_left_alone(opened):
    """torch has closed all, and gives the pool back itself: twice would take it from other graphs."""
    with pytest.raises(torch.OutOfMemoryError), capture.capture("graph", "shared", "a stream"):
        assert opened.stream == "a stream"
        raise torch.OutOfMemoryError("of 2 GiB")
    assert (opened.pools, opened.released, opened.capturing, opened.stream) == ([], [], False, "before")


def test_a_good_capture_is_torchs(opened):
    with capture.capture("graph"):
        assert opened.pools == ["p"] and opened.stream == "of captures"
    assert (opened.pools, opened.released, opened.stream) == ([], [], "before")


def failing(pool, mib: int = 0) -> None:
    """A capture that asks for memory and then for what no capture allows."""
    with pytest.raises(RuntimeError), capture.capture(torch.cuda.CUDAGraph(), pool):
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()


def kept() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@gpu
def test_torch_goes_on_after_a_failed_capture():
    """Other graphs of the pool, random numbers, the stream, and all of the memory."""
    x, graph, pool = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with capture.capture(graph, pool):
        y = x + 1
    torch.rand(1, device="cuda")
    stream, before = torch.cuda.current_stream(), kept()
    for own, mib in ((None, 256), (pool, 0), (None, 256), (pool, 0)):
        failing(own, mib)
        assert torch.cuda.current_stream() == stream
        assert torch.rand(8, device="cuda").unique().numel() > 1
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # goes where it can come back from
        assert kept() < before + 32 * MIB
    x.add_(1)
    graph.replay()
    assert y.tolist() == [3, 3, 3, 3]
    again = torch.cuda.CUDAGraph()
    with capture.capture(again):
        z = x * 5
    again.replay()
    assert z.tolist() == [10, 10, 10, 10]


@gpu
def test_what_torch_leaves_open_is_seen(monkeypatch):
    """Without the closing: so the test above shows something, with this version of torch too."""
    pool, close = torch.cuda.graph_pool_handle(), capture.close
    monkeypatch.setattr(capture, "close", lambda device, pool: None)
    failing(pool)
    try:
        with pytest.raises(RuntimeError, match="Offset increment outside|already recording"):
            torch.rand(1, device="cuda")
            failing(pool)
    finally:
        close(torch.cuda.current_device(), pool)
    torch.rand(1, device="cuda")


@gpu
def test_a_sampler_goes_on_after_a_capture_that_failed(monkeypatch):
    """The requests that it met are lost; the next ones have the bits of steps without graphs, from graphs."""
    model, params = tiny_model(max_positions=256).to("cuda"), SamplingParams(12, 0.8, seed=3, ignore_eos=True)
    prompts, forward = [[1, 2, 3], [4, 5, 6, 7]], type(model).forward
    want = Sampler(model, cuda_graphs=False).generate(prompts, params)
    sampler = Sampler(model)

    def forbidden(*args, **options):
        out = forward(*args, **options)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return out

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", forbidden)
        with pytest.raises(RuntimeError):
            sampler.generate(prompts, params)
    torch.rand(1, device="cuda")
    for got, one in zip(sampler.generate(prompts, params), want, strict=True):
        assert got.token_ids == one.token_ids
        assert_bits_equal(torch.tensor(got.log_probs), torch.tensor(one.log_probs), "log-probs")
    assert sampler.graphs.captures > 1
