"""Handles of GPU memory, with a stand-in for the one call that needs a GPU (real ones: gpu/test_send.py)."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang import identity, send
from minitransformer.plugins.sglang import sync as sync_module


@contextmanager
def counting():
    """Counts that torch has given out, as it numbers them, and those that were given back."""
    made, back = [], []

    def reduce(tensor):
        made.append(tensor.nbytes)
        return len, (*range(11), b"file", len(made), "event", False)

    with ExitStack() as patches:
        for owner, name, value in (
            (send, "reduce_tensor", reduce), (send, "_handles", {}), (send, "gpu", lambda device: "a GPU's name"),
            (torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *c: back.append(c)),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, value, create=True))
        yield made, back


def test_one_handle_for_all_pieces_of_a_storage():
    a, b = torch.zeros(6, 4), torch.zeros(8)
    with counting() as (made, back):
        first = [send._handle(t.untyped_storage()) for t in (a[1], a[2:], b)]
        assert first[0] is first[1] is not first[2] and made == [96, 32]
        assert [send._handle(t.untyped_storage()) for t in (a, a[5], b[1:])] == [first[0], first[0], first[2]]
        assert made == [96, 32] and back == [(b"file", 1), (b"file", 2)]
        _, told = first[2].__reduce__()
        assert told == (*range(6), "a GPU's name", *range(7, 11), send.NO_COUNTER, 0, "event", False)


def test_memory_that_is_gone_has_no_handle():
    """Another tensor may be at its address."""
    a, b = torch.zeros(4), torch.zeros(4)
    with counting():
        for t in (a, b):
            send._handle(t.untyped_storage())
        del a, t
        with send.by_tensor([]):
            assert list(send._handles) == [b.untyped_storage().data_ptr()]


def test_memory_that_moved_has_no_handle_at_its_old_address():
    """A resized storage lives on elsewhere; what stands at its address now is another one."""
    a, b = torch.zeros(4), torch.zeros(8)
    with counting() as (made, _):
        send._handle(a.untyped_storage())
        send._handles[b.untyped_storage().data_ptr()] = send._handles.pop(a.untyped_storage().data_ptr())
        send._handle(b.untyped_storage())
        assert made == [16, 32]


@pytest.mark.parametrize("url, directory, here, there, route", [
    ("http://127.0.0.1:1", None, None, None, "tensor"), ("http://127.0.0.1:1", None, None, "a", "tensor"),
    ("http://127.0.0.1:1", None, "a", None, "tensor"), ("http://127.0.0.1:1", None, "a", "a", "tensor"),
    ("http://127.0.0.1:1", None, "a", "b", "distributed"), ("http://127.0.0.1:1", "x", "a", "b", "disk"),
    ("http://other.host:1", None, "a", "b", "disk"),
])  # fmt: skip
def test_which_way_is_taken(url, directory, here, there, route):
    assert send.default_route(url, directory, here, there) == route


@pytest.mark.parametrize("there, asked, route, same_gpu", [
    ("a", None, "tensor", True), ("b", "tensor", "tensor", False), ("b", None, "distributed", None),
])  # fmt: skip
def test_handles_go_to_the_learners_own_gpu_only(monkeypatch, there, asked, route, same_gpu):
    """The server tells its GPU; a handle does not open on another one."""
    seen = []

    def way(name, *rest):
        seen.append((name, *rest))
        raise InputError("stop here")

    monkeypatch.setattr(sync_module, "gpu", lambda device: "a")
    monkeypatch.setattr(identity, "gpu", lambda device: there)
    monkeypatch.setattr(send, "by_tensor", lambda tensors, same_gpu: way("tensor", same_gpu))
    monkeypatch.setattr(sync_module, "by_group", lambda *rest: way("distributed", None))
    with Fake(tiny_model(0)) as server, pytest.raises(InputError, match="stop here"):
        sync_module.sync(Learner(tiny_model(1)), server, asked)
    assert seen == [(route, same_gpu)]


def test_a_stock_server_may_be_on_any_gpu(monkeypatch):
    all_sparse, seen, by_tensor = dict(sparse_layers=(True,) * 3), [], send.by_tensor
    monkeypatch.setattr(sync_module, "gpu", lambda device: "a")
    monkeypatch.setattr(send, "by_tensor", lambda tensors, same: (seen.append(same), by_tensor(tensors, same))[1])
    with Fake(tiny_model(0, **all_sparse), stock=True) as server:
        sync_module.sync(Learner(tiny_model(1, **all_sparse)), server)
    assert seen == [False]
