"""`sync` against a stand-in server: the proof, what it refuses, and which state it names after each kind of failure."""

import json
import socket
from pathlib import Path

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from minitransformer.cli import main
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS, MODELOPT
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang import send
from minitransformer.plugins.sglang import sync as sync_module
from minitransformer.plugins.sglang.checksums import checksums
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.sync import sync
from minitransformer.recipe import get

AGAIN = "don't sample from it; sync again"


def trained(seed: int = 0, steps: int = 1, recipe: str = "bf16") -> Learner:
    """A learner whose weights are no checkpoint's."""
    model = tiny_model(seed)
    model.set_recipe(recipe)
    learner = Learner(model, lr=1e-2)
    for _ in range(steps):
        learner.update([Sample(list(range(20)), 3)], nll)
    return learner


def packed(directory: Path, form=MODELOPT, seed: int = 0) -> Qwen3MoeForCausalLM:
    """The tiny model as an NVFP4 checkpoint holds it."""
    tiny_model(seed).save_pretrained(directory / "bf16")
    quantise(directory / "bf16", directory / form.name, get("nvfp4_per_token"), form)
    return Qwen3MoeForCausalLM.from_pretrained(directory / form.name)


@pytest.mark.parametrize("route", ["tensor", "disk"])
def test_arrives_and_is_proven(route, tmp_path):
    learner = trained()
    with Fake(tiny_model(0)) as server:
        assert checksums(server.model) != checksums(learner.model)
        report = learner.sync(server.url, route=route, directory=tmp_path)
        assert checksums(server.model) == checksums(learner.model)
    assert report.equal and report.checked == len(list(learner.model.parameters())) and report.probe.tokens == 55
    assert report.bytes == sum(p.nbytes for p in learner.model.parameters()) and report.packed == 0
    assert list(report.seconds) == ["quantise", "send", "load", "prove"]
    assert server.updates == [f"/update_weights_from_{route}"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", list(FORMATS.values()), ids=list(FORMATS))
@pytest.mark.parametrize("route", ["tensor", "disk"])
def test_packed_layers_are_quantised_and_sent_packed(route, form, tmp_path):
    learner = trained(recipe="nvfp4_per_token")
    with Fake(packed(tmp_path, form), form) as server:
        report = learner.sync(server, route=route)
    assert report.equal and report.packed == 2
    assert report.bytes < sum(p.nbytes for p in learner.model.parameters())


def test_a_learner_in_nvfp4_only_sends_what_it_has(tmp_path):
    model = packed(tmp_path, seed=1)
    with Fake(packed(tmp_path / "other"), MODELOPT) as server:
        assert sync(Learner(model), server).equal
        assert checksums(server.model) == checksums(model)


@pytest.mark.parametrize("bad", [("scale", 127, "no block"), ("scale", 129, "no block"), ("scale_2", 127, "no finite")])
def test_a_bad_scale_is_refused_and_nothing_written(tmp_path, monkeypatch, bad):
    """The last byte of one expert's block scales: a NaN, a negative one; its outer scale: infinite."""
    (name, bits, said), named = bad, sync_module._named
    learner, suffix = trained(recipe="nvfp4_per_token"), f"experts.5.up_proj.weight_{name}"

    def damaged(*rest):
        for key, tensor in named(*rest):
            if key.endswith(suffix):
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[-2:] = torch.tensor([0x80 if name == "scale_2" else 0, bits])
            yield key, tensor

    monkeypatch.setattr(sync_module, "_named", damaged)
    with Fake(packed(tmp_path), MODELOPT) as server:
        before = checksums(server.model)
        with pytest.raises(InputError, match=f"{suffix} has a value that is {said}"):
            sync(learner, server)
        assert checksums(server.model) == before


def test_the_learner_is_left_as_it_was():
    """Parameters stay where they are and keep what autograd is told of them."""
    learner = Learner(tiny_model(0), frozen=["layers.0.*"])
    before = [(p.data_ptr(), p.requires_grad) for p in learner.model.parameters()]
    with Fake(tiny_model(1)) as server:
        learner.sync(server)
    assert [(p.data_ptr(), p.requires_grad) for p in learner.model.parameters()] == before
    assert not any(p.is_shared() for p in learner.model.parameters())


@pytest.mark.parametrize("name", ["layers.2.mlp.gate_up.weight", "norm.weight"])
def test_one_wrong_bit_on_the_server_is_named(name):
    learner = trained()
    with Fake(tiny_model(0)) as server:
        load = server.receiver.load

        def flipping(tensors, update):
            load(tensors, update)
            flat = dict(server.model.named_parameters())[name].detach().view(torch.int16).flatten()
            flat[-1] ^= 1

        server.receiver.load = flipping
        report = sync(learner, server)
        assert not report.equal and report.differing == [name]
        with pytest.raises(InputError, match=f"DIFFERENT: 1 of 29 tensors differ .{name}"):
            learner.sync(server)


def test_a_server_that_computes_otherwise_fails_the_probe():
    """Every tensor is equal, and the log-probs are not."""
    learner = trained()
    with Fake(tiny_model(0)) as server:
        server.model.layers[0].eps = 1e-3
        report = sync(learner, server)
    assert not report.equal and not report.differing and report.probe.differing


def test_a_stock_server_proves_nothing():
    all_sparse = dict(sparse_layers=(True,) * 3)
    with Fake(tiny_model(0, **all_sparse), stock=True) as server:
        report = sync(Learner(tiny_model(1, **all_sparse)), server)
        assert not report.equal and report.stock and not report.checked
        assert report.verdict().startswith("NOT PROVEN: a stock SGLang has no checksums")
        server.fault = "refuse"
        with pytest.raises(InputError, match="State: unknown, a stock SGLang can't say"):
            sync(Learner(tiny_model(1, **all_sparse)), server)


def refused(learner: Learner, server: Fake, words: str, **options) -> None:
    """Before anything is sent."""
    before = checksums(server.model)
    with pytest.raises(InputError, match=words):
        sync(learner, server, **options)
    assert not server.updates and checksums(server.model) == before


def test_refused_before_anything_is_sent(tmp_path, monkeypatch):
    with Fake(tiny_model(0)) as server:
        refused(Learner(tiny_model(0, num_experts=16)), server, "num_experts: 16 != 8")
        refused(trained(recipe="nvfp4_per_token"), server, "different execution specs.*options.recipe")
        refused(trained(), server, "route 'ipc' is not supported; choose tensor, disk or distributed", route="ipc")
        refused(trained(), server, "backend 'mpi' is not supported", route="distributed", backend="mpi")
        refused(trained(), server, "'nccl' needs the learner on a GPU", route="distributed", backend="nccl")
        refused(trained(), server, "'gloo' is of the route distributed", backend="gloo")
        refused(trained(), server, "init_weights_update_group: the server refuses", route="distributed")
        refused(trained(), server, "absent: no such directory", route="disk", directory=tmp_path / "absent")
        own = packed(tmp_path)
        server.model.set_recipe("nvfp4_per_token")  # it keeps BF16 and quantises by itself
        refused(Learner(own), server, "layer 0: SGLang keeps its experts in BF16")

        if Path("/dev/full").exists():
            full = lambda dir: open("/dev/full", "wb", buffering=0)  # noqa: E731
            monkeypatch.setattr(send.tempfile, "NamedTemporaryFile", full)
            learner = trained(recipe="nvfp4_per_token")
            refused(learner, server, "no room for 0.[1-9] MiB .No space left", route="tensor")
    with Fake(tiny_model(0), stock=True) as server:
        refused(trained(), server, "layer 1 is dense")


def test_a_dead_server_and_one_of_another_kind():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="no server answers"):
            trained().sync(f"http://127.0.0.1:{s.getsockname()[1]}")
    with Fake(tiny_model(0)) as server:
        server.reply = lambda path, body: (404, {})
        with pytest.raises(InputError, match="it is no SGLang server"):
            trained().sync(server)


STATES = {
    "refuse": "State: SGLang has the weights it had, nothing was written$",
    "hang": f"no answer within 2 s.*State: SGLang has the weights it had, nothing was written so far.*{AGAIN}",
    "half": f"no server answers.*State: [0-9]+ tensors are not the learner's .*{AGAIN}",
    "die": f"no server answers.*State: unknown, SGLang does not answer now either; {AGAIN}",
    "silent": "no server answers.*State: the new weights are in, though SGLang did not say so",
}


@pytest.mark.parametrize("route", ["tensor", "disk"])
@pytest.mark.parametrize("fault", STATES)
def test_the_state_after_a_failure_is_named_and_a_retry_is_safe(fault, route, tmp_path, monkeypatch):
    learner, memory, disk = trained(), tmp_path / "memory", tmp_path / "disk"
    memory.mkdir(), disk.mkdir()
    monkeypatch.setattr(send, "SHARED_MEMORY", str(memory))
    with Fake(tiny_model(0)) as server:
        Client(server.url).identity()
        sync(learner, server)  # warm: the time-out below is of the update alone
        learner.update([Sample(list(range(20)), 3)], nll)
        server.fault = fault
        with pytest.raises(InputError, match=STATES[fault]):
            sync(learner, server, route, disk, timeout=2 if fault == "hang" else 60)
        assert not list(memory.iterdir()) and not list(disk.iterdir())
        if fault != "die":
            server.fault = ""
            assert sync(learner, server, route, disk).equal


@pytest.mark.parametrize("where", ["/weights_checker", "/generate"])
def test_a_proof_that_fails_says_that_the_weights_were_sent(where):
    learner = trained()
    with Fake(tiny_model(0)) as server:
        answer = server.reply
        server.reply = lambda path, body: (500, {}) if path == where and server.updates else answer(path, body)
        with pytest.raises(InputError, match=f"{where}: the server refuses .*State: .* are in, which is not proven"):
            sync(learner, server)
        assert checksums(server.model) == checksums(learner.model)


def test_the_command(tmp_path, capsys):
    tiny_model(1).save_pretrained(tmp_path / "new")
    line = ["sync", "--model", str(tmp_path / "new"), "--to"]
    with Fake(tiny_model(0)) as server:
        assert main([*line, server.url, "--json", str(tmp_path / "report.json")]) == 0
        out = capsys.readouterr().out
        assert "sent     80 tensors, 0.3 MiB by tensor" in out and "quantise 0.00, send" in out
        assert "EQUAL: 29 tensors by checksum, 55 log-probs of a probe prompt by bits" in out
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["equal"] and report["tensors"] == 80 and set(report["seconds"]) > {"send", "load"}
        server.model.layers[0].eps = 1e-3
        assert main([*line, server.url]) == 1 and "DIFFERENT" in capsys.readouterr().out
        server.fault = "refuse"
        assert main([*line, server.url]) == 2 and "nothing was written" in capsys.readouterr().err
    for bad, words in (("here", "expected http"), ("http://127.0.0.1:9", "no server answers")):
        assert main([*line, bad]) == 2 and words in capsys.readouterr().err
    for more, words in ((["--route", "x"], "route 'x' is not"), (["--backend", "gloo"], "is of the route distributed"),
                        (["--route", "tensor", "--directory", "x"], "is of the route disk"),
                        (["--timeout", "inf"], "must be above 0 and at most 1e+06")):  # fmt: skip
        assert main([*line[:2], "nowhere", "--to", "http://127.0.0.1:9", *more]) == 2  # told before anything is loaded
        assert words in capsys.readouterr().err
    assert main(["sync", "--model", "nowhere", "--to", "http://127.0.0.1:9"]) == 2
    assert "no server answers" in capsys.readouterr().err
    assert main([*line, "http://127.0.0.1:9", "--timeout", "0"]) == 2
