"""Groups of the route distributed end on both sides, whatever happens between; no engine, no GPU."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from minitransformer.errors import InputError
from minitransformer.plugins.sglang import group, identity, send, weights
from minitransformer.plugins.sglang.client import Client

INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"


def alone(name: str):
    """A real group, of one."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    store = dist.PrefixStore(name, dist.HashStore())
    made = _new_process_group_helper(1, 0, [], dist.Backend("gloo"), store, group_name=name, timeout=group.TIMEOUT)[0]
    _world.pg_group_ranks[made] = {0: 0}
    return made


def is_kept(name: str) -> bool:
    return name in dist.distributed_c10d._world.pg_names.values()


@pytest.fixture
def server():
    """It joins whatever it is asked to. asked: the names of what came."""
    with Fake(tiny_model(0)) as fake:
        fake.asked, fake.ready = [], threading.Event()
        fake.ready.set()

        def reply(path, body):
            fake.asked.append((path, body["group_name"]))
            return (200, {"success": True}) if path == DESTROY or fake.ready.wait(10) else (400, {})

        fake.reply = reply
        yield fake
        fake.ready.set()


def meet(server, timeout: float = 10) -> None:
    with group.by_group([("a", torch.ones(2))], Client(server.url, timeout), "gloo"):
        pass


def told_to_destroy(server) -> bool:
    (init, name), *rest = server.asked
    return init == INIT and rest == [(DESTROY, name)]


def test_a_learner_that_can_not_join_tells_the_server(server, monkeypatch):
    monkeypatch.setattr(group, "join", lambda *_: 1 / 0)
    with pytest.raises(InputError, match="did not meet at .*: division by zero"):
        meet(server)
    assert told_to_destroy(server)


@pytest.mark.parametrize("late", ["learner", "server"])
def test_a_group_that_comes_too_late_ends_on_both_sides(late, server, monkeypatch):
    """The learner's thread comes when nobody waits any more; the server answers when nobody listens any more."""
    ready, ended = threading.Event(), threading.Event()
    end = group.end

    def join(at, rank, name, backend):
        assert late == "server" or ready.wait(10)
        return alone(name)

    monkeypatch.setattr(group, "join", join)
    monkeypatch.setattr(group, "end", lambda made, abort: (end(made, abort), ended.set()))
    if late == "learner":
        monkeypatch.setattr(group, "TIMEOUT", group.timedelta(seconds=0.2))
    else:
        server.ready.clear()
    with pytest.raises(InputError, match="did not meet" if late == "learner" else "no answer within 2 s"):
        meet(server, 10 if late == "learner" else 2)
    ready.set()
    assert ended.wait(10) and told_to_destroy(server) and not is_kept(server.asked[0][1])


def test_an_error_of_the_end_does_not_hide_the_first(server, monkeypatch):
    monkeypatch.setattr(group, "join", lambda at, rank, name, backend: alone(name))
    call = Client.call

    def broken(client, path, body=None):
        call(client, path, body)
        if path == DESTROY:
            raise ConnectionResetError

    monkeypatch.setattr(Client, "call", broken)
    with pytest.raises(KeyError, match="the first"):
        with group.by_group([("a", torch.ones(2))], Client(server.url), "gloo"):
            raise KeyError("the first")
    assert told_to_destroy(server) and not is_kept(server.asked[0][1])


@pytest.mark.parametrize("abort", [False, True])
def test_torch_keeps_no_group_that_has_ended(abort):
    made = alone(f"ends-{abort}")
    assert is_kept(f"ends-{abort}")
    group.end(made, abort)
    assert not is_kept(f"ends-{abort}")


@pytest.mark.parametrize("came", [False, True])
def test_a_server_keeps_no_group_of_a_sender_that_is_gone(came):
    """Of a sender whose tensors came and were refused it keeps the group: that sender ends it."""
    model = SimpleNamespace(model=SimpleNamespace(weights_version=1), receiver=SimpleNamespace(begun=1))
    name = f"sender-{came}"
    groups = {name: alone(name), "other": None}
    updater = SimpleNamespace(get_model=lambda: model, _model_update_group=groups)

    def original(*_):
        model.receiver.begun += came
        return False, "Connection closed by peer"

    done, said = weights.from_distributed(original, updater, ["a"], ["bfloat16"], [[1]], name)
    assert not done and said == f"Connection closed by peer. {weights.KEPT}"
    assert (name in groups) is is_kept(name) is came and "other" in groups
    group.drop(groups, name)
    assert not is_kept(name)


@pytest.mark.parametrize("before", [None, "0"])
def test_only_nccl_is_told_to_fail_where_it_waits(before, monkeypatch):
    monkeypatch.delenv(group.WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(group.WAIT, before)
    seen = lambda backend, timeout: (backend, os.environ.get(group.WAIT))  # noqa: E731
    assert group.of_server(seen, backend="gloo") == ("gloo", before)
    assert group.of_server(seen, backend="nccl") == ("nccl", "1")
    with pytest.raises(ZeroDivisionError), group.failing_where_waited("nccl"):
        assert not group._environment.acquire(blocking=False)
        1 / 0  # noqa: B018
    assert os.environ.get(group.WAIT) == before


def test_a_host_is_here_in_any_case(monkeypatch):
    monkeypatch.setattr(send.socket, "gethostname", lambda: "Node-A")
    assert send._is_here("http://node-a:1") and send._is_here("http://NODE-A:1")
    assert not send._is_here("http://node-b:1")


def test_nccl_of_both_sides_shares_memory_alike(monkeypatch):
    """What a server says is taken from its environment; a stock one has cuMem off."""
    monkeypatch.delenv(identity.CUMEM, raising=False)
    with Fake(tiny_model(0)) as server:
        told = Client(server.url).identity()
        group.require_same_means(server.url, told)
        with pytest.raises(InputError, match="NCCL of SGLang has NCCL_CUMEM_ENABLE=0, that of the learner has not"):
            group.require_same_means(server.url, None)
        monkeypatch.setenv(identity.CUMEM, "0")
        with pytest.raises(InputError, match="NCCL of the learner has NCCL_CUMEM_ENABLE=0"):
            group.require_same_means(server.url, told)
        group.require_same_means(server.url, Client(server.url).identity())
        group.require_same_means(server.url, None)


def test_a_server_without_ipv4_is_no_traceback():
    with pytest.raises(InputError, match=r"http://\[::1\]:30000: no way there by IPv4"):
        group._address("http://[::1]:30000")
