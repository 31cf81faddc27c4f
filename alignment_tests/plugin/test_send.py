"""Handles of GPU memory, with a stand-in for the one call that needs a GPU (real ones: gpu/test_send.py)."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from minitransformer.plugins.sglang import send


@contextmanager
def counting():
    """Counts that torch has given out, as it numbers them, and those that were given back."""
    made, back = [], []

    def reduce(tensor):
        made.append(tensor.nbytes)
        return len, (*range(11), b"file", len(made), "event", False)

    with ExitStack() as patches:
        for owner, name, value in (
            (send, "reduce_tensor", reduce), (send, "_handles", {}),
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
        assert told == (*range(11), send.NO_COUNTER, 0, "event", False)


def test_memory_that_is_gone_has_no_handle():
    """Another tensor may be at its address."""
    a, b = torch.zeros(4), torch.zeros(4)
    with counting():
        for t in (a, b):
            send._handle(t.untyped_storage())
        del a, t
        with send.by_tensor([]):
            assert list(send._handles) == [b.untyped_storage().data_ptr()]


@pytest.mark.parametrize("url, directory, here, there, route", [
    ("http://127.0.0.1:1", None, None, None, "tensor"), ("http://127.0.0.1:1", None, None, "a", "tensor"),
    ("http://127.0.0.1:1", None, "a", None, "tensor"), ("http://127.0.0.1:1", None, "a", "a", "tensor"),
    ("http://127.0.0.1:1", None, "a", "b", "distributed"), ("http://127.0.0.1:1", "x", "a", "b", "disk"),
    ("http://other.host:1", None, "a", "b", "disk"),
])  # fmt: skip
def test_which_way_is_taken(url, directory, here, there, route):
    assert send.default_route(url, directory, here, there) == route
