"""The learner on the GPU has the CPU's bits: gradients, loss and norm, whole updates, and runs that change devices."""

import json

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.goldens import digest, updates
from alignment_tests.gpu.test_model_agrees import DEMO, LAYER
from alignment_tests.gpu.values import agree
from alignment_tests.learner.tiny import tiny_model
from minitransformer.learner import checkpoint
from minitransformer.learner.learner import Learner
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.recipe import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
# Changes of the tiny model, recipe (and backward), lengths of the sequences, the most tokens of a pack.
MODELS = {
    "tiny": ({}, "bf16", [3, 24, 2, 65, 90], 100),
    "tied, not renormalised": (dict(tie_word_embeddings=True, norm_topk_prob=False), "bf16", [40, 7, 33], 100),
    "tiny nvfp4": ({}, "nvfp4_per_row", [3, 24, 2, 65, 90], 100),
    "tiny nvfp4, mxfp8 gradients": ({}, "nvfp4_per_row mxfp8", [3, 24, 2, 65, 90], 100),
    "tiny, mxfp8 gradients": ({}, "bf16 mxfp8", [40, 7, 33], 100),
    "demo's shape": (DEMO, "bf16", [3, 64, 130, 7], 150),
    "demo's shape nvfp4": (DEMO, "nvfp4_per_row", [64, 30], 150),
    "a real layer": (LAYER, "bf16", [20, 5], 1024),
}


def samples_of(model, lengths: list[int]) -> list[Sample]:
    found = []
    for i, n in enumerate(lengths):
        ids = inputs.integers(50 + i, model.config.vocab_size, n).tolist()
        start = max(1, n // 3)
        old = -inputs.normal(60 + i, n - start).abs() - 1
        found.append(Sample(ids, start, 0.5 - i % 3, old, temperature=0.9 if i % 2 else 1.0))
    return found


def gradients(model, samples, tokens: int, **settings):
    """FP32 gradients of one update just before they are applied, and its metrics; the model stays as it is."""
    learner = Learner(model, lr=0.0, max_tokens_per_pack=tokens, **settings)
    caught = {}
    learner._apply = lambda totals, clip: caught.update(totals)
    return caught, learner.update(samples)


def models(name: str):
    """(the CPU's, the GPU's), samples, tokens of a pack."""
    changes, recipe, lengths, tokens = MODELS[name]
    cpu = tiny_model(**changes)
    gpu = Qwen3MoeForCausalLM(cpu.config)
    gpu.load_state_dict(cpu.state_dict())
    for model in (cpu, gpu):
        model.set_recipe(get(recipe.split()[0]).with_backward((*recipe.split(), "bf16")[1]))
    return cpu, gpu.to("cuda"), samples_of(cpu, lengths), tokens


@pytest.mark.parametrize("name", updates.CASES)
def test_known_answer(name):
    """Three whole updates, as every CPU computes them."""
    assert digest(updates.CASES[name]("cuda")) == json.loads(updates.FILE.read_text())[name]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_metrics(name):
    """Stored and recomputed activations, and with frozen parameters, against one run of the CPU."""
    cpu, gpu, samples, tokens = models(name)
    want, metrics = gradients(cpu, samples, tokens)
    for recompute in (False, True):
        got, theirs = gradients(gpu, samples, tokens, recompute=recompute)
        assert got.keys() == want.keys()
        for key, grad in want.items():
            agree([got[key]], [grad], f"recompute {recompute}: {key}")
            assert grad.abs().max() > 0, key
        assert theirs == metrics
    got, _ = gradients(gpu, samples, tokens, frozen=["*.attn.*", "embed_tokens.weight"])
    assert got.keys() == {key for key in want if ".attn." not in key and not key.startswith("embed_tokens")}


SMALL = [name for name in MODELS if not MODELS[name][0].get("hidden_size", 0) > 64]


@pytest.mark.parametrize("name", SMALL)
def test_scores(name):
    *pair, samples, tokens = models(name)
    args = [s.ids for s in samples], [s.prompt_len for s in samples]
    want, got = (Learner(model, max_tokens_per_pack=tokens).score(*args) for model in pair)
    agree(got, want, "scores")


def state(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, on the CPU."""
    learner.optimizer.make_state()
    found = {f"model.{name}": p.detach().cpu().clone() for name, p in learner.model.named_parameters()}
    return found | {name: x.cpu().clone() for name, x in checkpoint._state(learner)}


def assert_same(got: Learner, want: Learner, what: str) -> None:
    found = state(got)
    for name, x in state(want).items():
        assert_bits_equal(found[name], x, f"{what}: {name}")
    assert got.step == want.step and got.lr == want.lr


def misses(learner: Learner, name: str) -> None:
    """No token reaches this parameter."""
    apply = learner._apply
    learner._apply = lambda totals, clip: apply({n: g for n, g in totals.items() if n != name}, clip)


SETTINGS = dict(lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("bound", [1e-3, None])
@pytest.mark.parametrize("name", SMALL)
def test_updates(name, bound):
    """Three whole updates with a schedule: every master, moment, weight and metric, and what is scored afterwards."""
    *pair, samples, tokens = models(name)
    learners = [Learner(m, max_grad_norm=bound, max_tokens_per_pack=tokens, **SETTINGS) for m in pair]
    start = state(learners[0])
    for step in range(3):
        for learner in learners:
            learner.lr = SETTINGS["lr"] / (1 + step)
        if step == 1:
            for learner in learners:
                misses(learner, "norm.weight")
        want, got = (learner.update(samples) for learner in learners)
        assert got == want and (bound is None or want.grad_norm > bound)
        assert_same(learners[1], learners[0], f"update {step}")
    assert all(not torch.equal(x, start[key]) for key, x in state(learners[0]).items())
    args = [s.ids for s in samples], [s.prompt_len for s in samples]
    agree(learners[1].score(*args), learners[0].score(*args), "scores")


@pytest.mark.parametrize("saved_on", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["tiny", "tiny nvfp4"])
def test_a_run_goes_on_on_the_other_device(name, saved_on, tmp_path):
    """Two updates, a save, a resume on the other device, two more; the files of both devices have the same bytes."""
    *pair, samples, tokens = models(name)
    straight, first = (Learner(model, max_tokens_per_pack=tokens, **SETTINGS) for model in pair)
    if saved_on == "cpu":
        straight, first = first, straight
    for learner in (straight, first):
        learner.update(samples), learner.update(samples)
        learner.save(tmp_path / learner.model.device.type)
    files = [(tmp_path / kind).read_bytes() for kind in ("cpu", "cuda")]
    assert files[0] == files[1]
    _, there, *_ = models(name)
    there = there.to(straight.model.device)
    resumed = Learner(there, max_tokens_per_pack=tokens, **SETTINGS)
    resumed.load(tmp_path / saved_on)
    for learner in (straight, resumed):
        learner.update(samples), learner.update(samples)
    assert_same(resumed, straight, f"from {saved_on}")
