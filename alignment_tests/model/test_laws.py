"""The laws of the whole model, on tiny random models of several shapes."""

import pytest

from alignment_tests import laws
from alignment_tests.learner.tiny import tiny_model

SHAPES = {
    "sparse and dense layers": {},
    "tied, one group, no renormalisation": dict(tie_word_embeddings=True, num_kv_heads=1, norm_topk_prob=False),
    "128 experts, top-8, head size 64": dict(num_experts=128, top_k=8, head_dim=64, sparse_layers=(True, True, True)),
    "top-1, three heads": dict(num_heads=3, num_kv_heads=3, top_k=1, hidden_size=48),
}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def model(request):
    return tiny_model(seed=1, **SHAPES[request.param])


def test_repeats(model):
    laws.repeats(model)


def test_ignores_the_batch(model):
    laws.ignores_the_batch(model)


def test_ignores_the_packing(model):
    laws.ignores_the_packing(model)


def test_ignores_the_chunking_and_the_pages(model):
    laws.ignores_the_chunking_and_the_pages(model)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_learner_equals_sampler(model, temperature):
    laws.learner_equals_sampler(model, temperature)


def test_recomputes_the_same(model):
    laws.recomputes_the_same(model)
