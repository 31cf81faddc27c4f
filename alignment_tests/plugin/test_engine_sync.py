"""Learner and a real engine, in a loop: update, sync, sample, score; and what a real server does when a sync fails."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.test_engine import P, zero
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import PolicyGradient
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.nvfp4_layout import MODELOPT
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang import group
from minitransformer.plugins.sglang import sync as sync_module
from minitransformer.plugins.sglang.align import align_engine
from minitransformer.plugins.sglang.send import ROUTES
from minitransformer.plugins.sglang.sync import sync
from minitransformer.recipe import get
from minitransformer.sampler.sequence import SamplingParams

pytestmark, RECIPE = pytest.mark.sglang, "nvfp4_per_token"


def learn(learner: Learner, client) -> float:
    """One update on tokens of the engine's, with its log-probs as the old ones -> the largest gap to them."""
    outs = laws.run(client, P[:4], 1.0, 8)
    samples = [
        Sample([*prompt, *out.token_ids], len(prompt), 1.0 - i % 2 * 2, out.log_probs)
        for i, (prompt, out) in enumerate(zip(P[:4], outs, strict=True))
    ]
    return learner.update(samples, PolicyGradient()).max_log_prob_gap


def check_loop(server, learner: Learner, packed: int) -> None:
    """A step a route. Between an update and its sync the engine is stale, and that shows."""
    for route in ROUTES:
        assert learn(learner, server.client) == 0
        assert laws.learner_equals_engine(learner.model, server.client, P).differing, "the update changed nothing"
        assert learner.sync(server, route=route).packed == packed
        for temperature in (1.0, 0.6, 0.0):
            zero(laws.learner_equals_engine(learner.model, server.client, P, temperature))


def test_a_loop_in_bf16_keeps_the_laws(engine):
    learner = Learner(engines.tiny(), lr=1e-2)
    sync(learner, engine).require_equal()
    check_loop(engine, learner, 0)
    assert sync(Learner(engines.tiny()), engine).equal  # as the other tests of this engine want it


@pytest.mark.parametrize("form", [None, MODELOPT])
def test_a_server_without_weights_waits_for_a_learner(checkpoint, tmp_path, form):
    """--load-format dummy: no file of weights. A part of them is refused, for the rest has no value."""
    if form is not None:
        quantise(checkpoint, tmp_path / "packed", get(RECIPE), form)
    (tmp_path / "bare").mkdir()
    for file in (tmp_path / "packed" if form else checkpoint).glob("*config.json"):
        shutil.copy(file, tmp_path / "bare")
    model = engines.tiny(3)
    model.set_recipe(RECIPE if form else "bf16")
    with engines.start(tmp_path / "bare", ["--load-format", "dummy"]) as server:
        assert "no weights yet" in server.log.read_text("utf-8", "replace")
        held = server.client.checksums()
        shutil.copytree(checkpoint, tmp_path / "part")
        tensors = load_file(tmp_path / "part" / "model.safetensors")
        some = {name: t for name, t in tensors.items() if name == "model.norm.weight"}
        save_file(some, tmp_path / "part" / "model.safetensors")
        with pytest.raises(InputError, match="no weights yet.*send all.*Nothing was written"):
            laws.update_from_disk(server.client, tmp_path / "part")
        assert server.client.checksums() == held
        assert sync(Learner(model), server).equal
        zero(laws.learner_equals_engine(model, server.client, P, 0.6))
        zero(laws.decode_equals_rescoring(server.client, P))
        server.stop()
        with pytest.raises(InputError, match="no server answers"):
            sync(Learner(model), server)


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_weights_again_change_no_output(engine, route):
    learner = Learner(engines.tiny())
    first = laws.run(engine.client, P)
    assert sync(learner, engine, route).equal
    zero(laws.same(first, laws.run(engine.client, P)))


def test_align_sees_equality_and_other_weights(engine):
    found = align_engine(engines.tiny(), engine.client, P, [SamplingParams(8, 0.6, seed=i) for i in range(len(P))])
    assert found.equal and not found.stock
    assert [r.stage for r in found.stages] == [
        "layers.0.expert_ids", "layers.2.expert_ids", "log_prob", "prompt_log_prob",
    ]  # fmt: skip
    assert all(r.rows == sum(map(len, P)) + 7 * len(P) for r in found.stages[:2])
    with pytest.raises(InputError, match="holds other weights than --model"):
        align_engine(engines.tiny(1), engine.client, P, [SamplingParams(8)] * len(P))


def test_other_shapes_are_told_by_the_server_too(engine, monkeypatch):
    """Where the client's own check is missing."""
    monkeypatch.setattr(sync_module, "require_same", lambda *_: None)
    sums = engine.client.checksums()
    for route in ROUTES:
        with pytest.raises(InputError, match="the model takes.*State: .* nothing was written$"):
            sync(Learner(engines.tiny(vocab_size=engines.VOCAB + 16)), engine, route)
    assert engine.client.checksums() == sums


GONE = """
import os, sys, threading
from alignment_tests.plugin import engines
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang import group
from minitransformer.plugins.sglang.client import Client
call = Client.call
def told(client, path, body=None):
    if path == "/update_weights_from_distributed":  # it takes the server milliseconds to begin to receive
        threading.Timer(4, os._exit, [3]).start()
    return call(client, path, body)
Client.call, group._broadcast = told, lambda *_: None
group.secrets.token_hex = lambda _: "gone"
Learner(engines.tiny(1)).sync(sys.argv[1], route="distributed")
"""


def test_a_broadcast_that_fails(engine, monkeypatch):
    """A value that the server refuses once it has all, a sender that is gone: nothing was written. Then it works."""
    sums, named = engine.client.checksums(), sync_module._named
    bad = lambda *rest: [(n, t * torch.nan if n.endswith("3.up_proj.weight") else t) for n, t in named(*rest)]  # noqa: E731
    monkeypatch.setattr(sync_module, "_named", bad)
    with pytest.raises(InputError, match="no finite BF16 number.*Nothing was written.*State: .* nothing was written$"):
        sync(Learner(engines.tiny(1)), engine, "distributed")
    monkeypatch.setattr(sync_module, "_named", named)
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", GONE, engine.url]).returncode == 3
    assert engine.client.checksums() == sums and time.monotonic() - began < group.TIMEOUT.total_seconds() / 2
    assert "Connection closed by peer" in engine.log.read_text("utf-8", "replace")
    with pytest.raises(InputError, match="The group to be destroyed does not exist"):
        engine.client.call("/destroy_weights_update_group", {"group_name": "minitransformer-gone"})
    assert sync(Learner(engines.tiny()), engine, "distributed").equal


def test_nccl_of_a_server_decides_about_cumem_by_itself(engine):
    """SGLang turns cuMem off, and a learner that has it on could not share memory with the server."""
    assert engine.client.identity()["cumem"]


def test_broadcasts_in_another_order_are_seen(engine, monkeypatch):
    """Two experts of one shape, one sent in the other's place."""
    learner, broadcast = Learner(engines.tiny()), group._broadcast
    names = [name for name, _ in sync_module._named(learner.model, {}, None)]
    a, b = (names.index(f"model.layers.2.mlp.experts.{e}.down_proj.weight") for e in (3, 4))
    order = [b if i == a else a if i == b else i for i in range(len(names))]
    monkeypatch.setattr(group, "_broadcast", lambda pg, tensors: broadcast(pg, [tensors[i] for i in order]))
    assert sync(learner, engine, "distributed").differing == ["layers.2.mlp.down.weight"]
    monkeypatch.setattr(group, "_broadcast", broadcast)
    assert sync(learner, engine, "distributed").equal


def test_a_server_that_stops_and_goes_on(engine, monkeypatch):
    """A time-out while it is stopped; the late update finds its sender gone and is turned away; a retry succeeds."""
    monkeypatch.setattr(sync_module, "STATE_TIMEOUT", 1)
    learner, sums, told = Learner(engines.tiny(1)), engine.client.checksums(), sync_module.require_same

    def stop_then(*rest):
        told(*rest)
        os.killpg(engine.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(sync_module, "require_same", stop_then)
    try:
        with pytest.raises(InputError, match="no answer within 2 s.*State: unknown, SGLang does not answer now"):
            sync(learner, engine, timeout=2)
    finally:
        os.killpg(engine.process.pid, signal.SIGCONT)
    monkeypatch.setattr(sync_module, "require_same", told)
    assert engine.client.checksums() == sums
    assert sync(learner, engine).equal
    assert sync(Learner(engines.tiny()), engine).equal


@pytest.mark.slow  # an engine for one line; test_sync.py has the same with a stand-in
def test_a_server_that_dies_half_way(checkpoint, monkeypatch):
    with engines.start(checkpoint) as server:
        told = sync_module.require_same

        def kill_then(*rest):
            told(*rest)
            server.stop()

        monkeypatch.setattr(sync_module, "require_same", kill_then)
        with pytest.raises(InputError, match="State: unknown, SGLang does not answer now either"):
            sync(Learner(engines.tiny(1)), server)
