"""The walk through the learner's model with exchanged operators, and how SGLang's functions are called: on the CPU.

The operators exchanged are here the learner's own, so the log-probs must be the learner's, bit for bit. What SGLang's
compute is compared on a GPU: alignment_tests/plugin/h200.py stock.
"""

import json
import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from alignment_tests.learner.tiny import random_sequences, tiny_config, tiny_model
from alignment_tests.plugin import stock_h200, stock_mutations
from alignment_tests.plugin.fake import Fake
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.alignment.compare import ComparingTrace
from minitransformer.alignment.trace import Trace
from minitransformer.cli import main
from minitransformer.commands import align_sglang, common
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang import launch, plugin, stock
from minitransformer.plugins.sglang.align import EngineAlignment, align_engine
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.identity import refuse_for_stock
from minitransformer.sampler.sequence import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11], [1, 2, 3, 4, 5, 6, 7, 8, 30, 31]]
ALL_SPARSE = dict(sparse_layers=(True,) * 3)
SERVER = {
    "version": "0.5.17", "enable_deterministic_inference": True, "attention_backend": "triton",
    "moe_runner_backend": "triton",
}  # fmt: skip


def check_the_walk(top_k: int = 2, norm_topk_prob: bool = True) -> None:
    model = tiny_model(1, top_k=top_k, norm_topk_prob=norm_topk_prob, **ALL_SPARSE)
    sequences, _ = random_sequences(5, 4)
    temperatures = [1.0, 0.6, 1.0, 2.0]
    expected = Learner(model).score(sequences, [1] * 4, temperatures)
    found = stock.log_probs(model, sequences, OwnKernels(), temperatures)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


@pytest.mark.parametrize("top_k, norm", [(2, True), (1, True), (3, False)])
def test_the_walk_is_the_models(top_k, norm):
    check_the_walk(top_k, norm)


def test_every_stage_outside_the_experts_is_noted():
    model, sequences = tiny_model(1, **ALL_SPARSE), [[1, 2, 3], [4, 5]]
    trace = Trace(None)
    model(stock.Batch.packed(sequences), trace=trace)
    comparing = ComparingTrace(trace)
    stock.log_probs(model, sequences, OwnKernels(), trace=comparing)
    alone = {r.stage.rsplit(".", 1)[-1] for r in comparing.results() if not r.rows}
    assert alone == {"gate_up", "swiglu", "down", "logits"}
    assert all(r.equal for r in comparing.results())


@pytest.mark.parametrize("fault", stock_mutations.FAULTS)
def test_a_fault_in_the_walk_is_seen(fault, monkeypatch):
    stock_mutations.FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        check_the_walk()


def on_gpu(model):
    """The same, said to be on a GPU."""
    return SimpleNamespace(config=model.config, recipe=model.recipe, layers=model.layers, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "changes, server, words",
    [
        ({}, {}, None),
        (dict(head_dim=16), {}, "turns heads of 16 by another kernel"),
        ({}, {"enable_deterministic_inference": False}, "enable_deterministic_inference is False.*use --enable"),
        ({}, {"attention_backend": "fa3", "tp_size": 2}, "attention_backend is 'fa3'; tp_size is 2"),
        ({}, {"dtype": "auto", "kv_cache_dtype": "bf16", "pp_size": 1, "moe_a2a_backend": "none"}, None),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is 'fp8_e4m3'"),
        ({}, {"dtype": "float16"}, "dtype is 'float16'"),
        ({}, {"pp_size": 2, "ep_size": 4, "dp_size": 2}, "pp_size is 2; dp_size is 2; ep_size is 4"),
        ({}, {"json_model_override_args": '{"rope_theta": 1}'}, "json_model_override_args is"),
        ({}, {"load_format": "dummy"}, "load_format is 'dummy'"),
        ({}, {"lora_paths": ["a"], "enable_lora": True}, "lora_paths is .*enable_lora is True"),
        ({}, {"enable_eplb": True, "ep_num_redundant_experts": 2}, "redundant_experts is 2; enable_eplb is True"),
        ({}, {"torchao_config": "int8wo"}, "torchao_config is 'int8wo'"),
        ({}, {"version": "0.5.16"}, "the server runs SGLang 0.5.16, the kernels here are those of 0.5.17"),
    ],
)
def test_when_it_can(changes, server, words, monkeypatch):
    monkeypatch.setattr(stock, "check_version", lambda: None)
    monkeypatch.setattr(stock, "sglang_version", lambda: "0.5.17")
    model = on_gpu(tiny_model(0, **{"head_dim": 64, **ALL_SPARSE, **changes}))
    found = stock.unable(model, SERVER | server)
    assert (found is None) if words is None else re.search(words, found), found


TELLS = {"enable_deterministic_inference": True, "attention_backend": "triton", "chunked_prefill_size": 128}


@pytest.mark.parametrize("server, longest, stalls", [
    ({}, 129, True), ({}, 128, False), ({"chunked_prefill_size": 4096}, 9000, False),
    ({"chunked_prefill_size": -1}, 9000, False), ({"chunked_prefill_size": None}, 9000, False),
    ({"enable_deterministic_inference": False}, 129, False), ({"attention_backend": "fa3"}, 129, False),
    ({"attention_backend": "flashinfer"}, 129, True),
])  # fmt: skip
def test_a_server_that_would_never_begin(server, longest, stalls, monkeypatch):
    found = stock.stalls(TELLS | server, longest)
    assert bool(found) == stalls and (not stalls or "_PREFILL_" in found and "--chunked-prefill-size 4096" in found)
    for name in stock.CUTS.values():
        monkeypatch.setenv(name, "64")
    assert stock.stalls(TELLS | server, longest) is None


def test_it_is_told_before_anything_is_sampled(exchanged):
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        server.told = TELLS | {"chunked_prefill_size": 16}
        assert run(server).equal  # up to 10 tokens and 6 new ones
        server.told = TELLS | {"chunked_prefill_size": 15}
        server.generate = None
        with pytest.raises(InputError, match="never begins a prompt of more than its chunk, 15 tokens"):
            run(server)


@pytest.fixture
def exchanged(monkeypatch):
    """As on a GPU, with the learner's operators for SGLang's."""
    monkeypatch.setattr(stock, "unable", lambda model, server: None)
    monkeypatch.setattr(stock, "SglangKernels", OwnKernels)


def run(server: Fake, temperature: float = 1.0) -> EngineAlignment:
    params = [SamplingParams(6, temperature, seed=i) for i in range(len(PROMPTS))]
    return align_engine(tiny_model(0, **ALL_SPARSE), Client(server.url), PROMPTS, params, stock_kernels=True)


def test_the_servers_prefill_is_compared(exchanged):
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        for temperature in (1.0, 0.7):
            found = run(server, temperature)
            assert found.equal and found.kernels == "sglang" and found.gap.differing == 0
            assert [(r.stage, r.rows) for r in found.stages] == [("prefill_log_prob", 35)]
        server.model.layers[0].eps = 1e-3
        found = run(server)
        assert not found.equal and found.stages[0].differing > 30


def test_another_decode_is_shown_but_no_difference(exchanged):
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        whole = server.generate

        def generate(body):
            answers = whole(body)
            for meta in (a["meta_info"] for a in answers):
                meta["output_token_logprobs"] = [[x - 0.5, *more] for x, *more in meta["output_token_logprobs"]]
            return answers

        server.generate = generate
        found = run(server)
    assert found.equal and (found.gap.differing, found.gap.tokens) == (18, 18) and found.rescored == found.gap


def test_the_server_is_started_as_the_kernels_need(monkeypatch, tmp_path):
    started, said, warmed, model = [], [], [], tiny_model(0, head_dim=64, **ALL_SPARSE)
    monkeypatch.setattr(stock, "SglangKernels", OwnKernels)
    monkeypatch.setattr(stock, "warm", lambda *these: warmed.append(these))

    class Started:
        url, log = "http://127.0.0.1:9", tmp_path / "log"

        def __init__(self, model, arguments, **more):
            started.append((arguments, more))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(launch, "Server", Started)
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.5.17")
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(common, "device", lambda name, args, device=device: torch.device(device))
        args = Namespace(sampler="sglang", stock=True, device="", recipe=None, model="m", sglang_arg=["--page-size 8"])
        with align_sglang._client(args, on_gpu(model) if device == "cuda" else model, 5, said.append) as client:
            assert client.url == Started.url
        started[-1][1]["meanwhile"]()
    (arguments, more), (on_cpu, _) = started
    assert said.count("starting SGLang; here, compiling its kernels") == len(warmed) == 1
    assert arguments[-4:] == ["--cuda-graph-max-bs-decode", "5", "--page-size", "8"]
    assert "--enable-deterministic-inference" in arguments
    assert {arguments[i + 1] for i, x in enumerate(arguments) if x.endswith("-backend")} == {"triton", "pytorch"}
    assert arguments[arguments.index("--cuda-graph-backend-prefill") + 1] == "disabled"
    assert more["stock"] and not more["cpu"] and more["timeout"] == 300
    assert more["extra_environment"] == {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}
    assert on_cpu == ["--attention-backend", "torch_native", "--page-size", "8"]


def test_stock_of_a_server_with_our_model(exchanged):
    with Fake(tiny_model(0)) as server, pytest.raises(InputError, match="serves miniTransformer's model"):
        run(server)


def test_kernels_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(InputError, match="kernels can't be loaded: .*install complete"):
        stock.SglangKernels()


def test_tied_embeddings_are_refused_for_stock():
    with pytest.raises(InputError, match="tied.*leaves it unloaded"):
        refuse_for_stock(tiny_config(tie_word_embeddings=True, **ALL_SPARSE))


def test_where_it_cannot_the_learner_keeps_its_operators():
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        found = run(server)
    assert found.kernels == "own" and re.search("SGLang.* (not|is) installed|need a GPU", found.why_own), found.why_own
    assert found.equal and {r.stage for r in found.stages} == {"log_prob", "prompt_log_prob"}


def test_the_command(exchanged, tmp_path, capsys):
    tiny_model(0, **ALL_SPARSE).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        line = f"align --model {tmp_path}/model --prompts {tmp_path}/prompts --no-contrast --max-new-tokens 4 --stock"
        assert main([*line.split(), "--sampler", server.url, "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    said = "EQUAL: 0 of 29 log-probs of SGLang's own prefill differ from the learner's on SGLang's kernels; of what"
    assert said in out and "learner, SGLang's kernels" in out
    assert json.loads((tmp_path / "found.json").read_text())["kernels"] == "sglang"


def test_the_scripts_for_a_gpu_run_here(capsys, monkeypatch):
    """With the learner's operators on both sides: nothing may differ, and the rows are those of the table."""
    for what in (["operators", "--own", "--tokens", "40"], ["packing", "--own"]):
        monkeypatch.setattr(sys, "argv", ["stock_h200", *what])
        assert stock_h200.main() == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ") and "operator" not in line]
    assert len(rows) == 20 and all("equal" in row for row in rows if "FP32 against" not in row), out
    assert out.count("0 of 414 log-probs differ") == 3
