"""The learner on the GPU: every parameter's gradient, the loss and the norm have the CPU's bits."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu.test_model_agrees import DEMO, LAYER
from alignment_tests.gpu.values import agree
from alignment_tests.learner.tiny import tiny_model
from minitransformer.learner.learner import Learner
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
# Changes of the tiny model, recipe, lengths of the sequences, the most tokens of a pack.
MODELS = {
    "tiny": ({}, "bf16", [3, 24, 2, 65, 90], 100),
    "tied, not renormalised": (dict(tie_word_embeddings=True, norm_topk_prob=False), "bf16", [40, 7, 33], 100),
    "tiny nvfp4": ({}, "nvfp4_per_row", [3, 24, 2, 65, 90], 100),
    "demo's shape": (DEMO, "bf16", [3, 64, 130, 7], 150),
    "demo's shape nvfp4": (DEMO, "nvfp4_per_row", [64, 30], 150),
    "a real layer": (LAYER, "bf16", [33, 5], 1024),
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
    learner = Learner(model, lr=0.0, max_grad_norm=1e-3, max_tokens_per_pack=tokens, **settings)
    caught = {}
    learner._apply = caught.update
    return caught, learner.update(samples)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    changes, recipe, lengths, tokens = MODELS[request.param]
    cpu = tiny_model(**changes)
    gpu = Qwen3MoeForCausalLM(cpu.config)
    gpu.load_state_dict(cpu.state_dict())
    for model in (cpu, gpu):
        model.set_recipe(recipe)
    samples = samples_of(cpu, lengths)
    return gpu.to("cuda"), samples, tokens, gradients(cpu, samples, tokens)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_gradients_and_metrics(case, recompute):
    gpu, samples, tokens, (want, metrics) = case
    got, theirs = gradients(gpu, samples, tokens, recompute=recompute)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        agree([got[name]], [grad], name)
        assert grad.abs().max() > 0, name
    assert theirs == metrics


def test_frozen_parameters_get_no_gradient(case):
    gpu, samples, tokens, (want, _) = case
    got, _ = gradients(gpu, samples, tokens, frozen=["*.attn.*", "embed_tokens.weight"])
    for name, parameter in gpu.named_parameters():
        parameter.requires_grad_(True)
        assert (name not in got) == (".attn." in name or name.startswith("embed_tokens"))
    assert got.keys() < want.keys()


def test_scores(case):
    gpu, samples, tokens, _ = case
    cpu = Qwen3MoeForCausalLM(gpu.config)
    cpu.load_state_dict({name: x.cpu() for name, x in gpu.state_dict().items()})
    cpu.set_recipe(gpu.recipe)
    args = [s.ids for s in samples], [s.prompt_len for s in samples]
    got, want = (Learner(model, max_tokens_per_pack=tokens).score(*args) for model in (gpu, cpu))
    agree(got, want, "scores")


def test_updates_repeat_and_are_seen(case):
    """Two runs of two updates on the GPU end with the same weights. AdamW is torch's: its bits are not the CPU's."""
    gpu, samples, tokens, _ = case
    start = {name: x.clone() for name, x in gpu.state_dict().items()}
    ends = []
    for _ in range(2):
        gpu.load_state_dict(start)
        learner = Learner(gpu, lr=1e-3, max_tokens_per_pack=tokens)
        norms = [learner.update(samples).grad_norm for _ in range(2)]
        ends.append(({name: x.clone() for name, x in gpu.state_dict().items()}, norms))
    gpu.load_state_dict(start)
    assert ends[0][1] == ends[1][1]
    for name, x in ends[0][0].items():
        assert_bits_equal(x, ends[1][0][name], name)
    assert any(not torch.equal(x, start[name]) for name, x in ends[0][0].items())
