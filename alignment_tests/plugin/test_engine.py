"""The laws through a real SGLang engine on the CPU, 0 differing. Engines run in processes of their own."""

import subprocess
import sys

import pytest

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.engines import VOCAB
from minitransformer.plugins.sglang.launch import environment

LENGTHS = (5, 1, 37, 64, 65, 90, 16, 130)
P = laws.prompts(LENGTHS, VOCAB)
pytestmark = pytest.mark.sglang


def zero(count: laws.Count) -> None:
    assert count.differing == 0 and count.of > 0, str(count)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_decode_equals_rescoring(engine, temperature):
    zero(laws.decode_equals_rescoring(engine.client, P, temperature))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
def test_decode_equals_a_fresh_prefill_of_each_token(engine, temperature):
    zero(laws.decode_equals_fresh_prefill(engine.client, P[2:4], temperature))


@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_alone_equals_batch(engine, size, temperature):
    ids = laws.prompts([3 + 7 * i % 61 for i in range(size)], VOCAB, seed=size)
    zero(laws.alone_equals_batch(engine.client, ids, temperature, 8))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
def test_two_runs_are_the_same(engine, temperature):
    zero(laws.two_runs(engine.client, P, temperature))


@pytest.mark.parametrize("prefix", [1, 63, 64, 65, 100])
def test_radix_hit_equals_miss(engine, prefix):
    zero(laws.hit_equals_miss(engine.client, P[7][:prefix], P[2], prefix))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
def test_learner_equals_engine(engine, temperature):
    zero(laws.learner_equals_engine(engines.tiny(), engine.client, P, temperature))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
def test_our_sampler_equals_engine(engine, temperature):
    zero(laws.sampler_equals_engine(engines.tiny(), engine.client, P, temperature))


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 7}, {"top_k": 40, "top_p": 0.3}], ids=str)
def test_our_sampler_equals_engine_with_a_part_of_the_vocabulary(engine, options):
    zero(laws.sampler_equals_engine(engines.tiny(), engine.client, P, 0.8, **options))


TOP_P = """
from types import SimpleNamespace as N
from minitransformer.plugins.sglang import logits
one = N(rid="a", sampling_params=N(sampling_seed=None, top_p=0.9))
print(logits.with_seeds(lambda *_: N(), None, N(reqs=[one], device="cpu"), 5).top_ps.tolist())
"""


def test_top_p_is_not_rounded():
    """Mass that reaches a share in FP64 and not in FP32 is rare, so the share itself is looked at."""
    run = subprocess.run([sys.executable, "-c", TOP_P], env=environment(cpu=True), capture_output=True, text=True)
    assert run.stdout == "[0.9]\n", run.stderr[-2000:]


BEST = """
import torch
from minitransformer.plugins.sglang import logits
rows = torch.randint(0, 4, (3, 90), generator=torch.Generator().manual_seed(0)).float()
alone = [logits.best(rows[i : i + 1], [k])[0][1].tolist() for i, k in enumerate((0, 5, 200))]
print(alone == [ids.tolist() for _, ids in logits.best(rows, [0, 5, 200])], list(map(len, alone)),
      alone[1] == (rows[1] == 3).nonzero().flatten()[:5].tolist())
"""


def test_which_of_equal_logits_are_the_best_knows_nothing_of_the_batch():
    run = subprocess.run([sys.executable, "-c", BEST], env=environment(cpu=True), capture_output=True, text=True)
    assert run.stdout == "True [0, 5, 90] True\n", run.stderr[-2000:]


def test_experts_agree(engine):
    zero(laws.experts_agree(engines.tiny(), engine.client, P))


def test_top_and_chosen_log_probs(engine):
    """All of the distribution at each position: sampled and rescored alike, and the token's own among them."""
    zero(laws.distribution_agrees(engine.client, P[2], VOCAB))
