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
    learner = Learner(model, lr=0.0, max_grad_norm=1e-3, max_tokens_per_pack=tokens, **settings)
    caught = {}
    learner._apply = caught.update
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


@pytest.mark.parametrize("name", SMALL)
def test_updates_repeat_and_are_seen(name):
    """Two runs of two updates on the GPU end with the same weights. AdamW is torch's: its bits are not the CPU's."""
    _, gpu, samples, tokens = models(name)
    start = {key: x.clone() for key, x in gpu.state_dict().items()}
    ends = []
    for _ in range(2):
        gpu.load_state_dict(start)
        learner = Learner(gpu, lr=1e-3, max_tokens_per_pack=tokens)
        norms = [learner.update(samples).grad_norm for _ in range(2)]
        ends.append(({key: x.clone() for key, x in gpu.state_dict().items()}, norms))
    assert ends[0][1] == ends[1][1]
    for key, x in ends[0][0].items():
        assert_bits_equal(x, ends[1][0][key], key)
    assert any(not torch.equal(x, start[key]) for key, x in ends[0][0].items())
