"""The walk through the learner's model with exchanged operators, and how SGLang's functions are called: on the CPU.

The operators exchanged are here the learner's own, so the log-probs must be the learner's, bit for bit. What SGLang's
compute is compared on a GPU: alignment_tests/plugin/h200.py stock.
"""

import re
from types import SimpleNamespace

import pytest
import torch

from alignment_tests.learner.tiny import random_sequences, tiny_model
from alignment_tests.plugin import stock_mutations
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.alignment.compare import ComparingTrace
from minitransformer.alignment.trace import Trace
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang import stock

ALL_SPARSE = dict(sparse_layers=(True,) * 3)
SERVER = {"enable_deterministic_inference": True, "attention_backend": "triton", "moe_runner_backend": "triton"}


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


def test_short_sequences_and_small_chunks(monkeypatch):
    model = tiny_model(1, **ALL_SPARSE)
    whole = stock.log_probs(model, [[7], [1, 2, 3, 4, 5, 6]], OwnKernels())
    assert [len(x) for x in whole] == [0, 5]
    monkeypatch.setattr(stock, "CHUNK_BYTES", 4 * 96 * 2)
    assert torch.equal(stock.log_probs(model, [[1, 2, 3, 4, 5, 6]], OwnKernels())[0], whole[1])


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
    ],
)
def test_when_it_can(changes, server, words, monkeypatch):
    monkeypatch.setattr(stock, "check_version", lambda: None)
    model = on_gpu(tiny_model(0, **{"head_dim": 64, **ALL_SPARSE, **changes}))
    found = stock.unable(model, SERVER | server)
    assert (found is None) if words is None else re.search(words, found), found
