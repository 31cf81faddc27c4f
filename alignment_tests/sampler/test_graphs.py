"""Padded decode steps have the bits of plain ones, whatever pages do in between."""

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import FakeModel, Request, assert_alone, assert_bits, play, poisoned, prompts
from alignment_tests.sampler.graphs import with_graphs
from minitransformer.sampler.graphs import LEAST_PAGES, padded, spare_pages
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams


def test_padded_sizes_are_powers_of_two_with_pages_to_spare():
    assert [padded(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
    assert padded(3, LEAST_PAGES) == LEAST_PAGES
    for most in range(1, 70):
        assert spare_pages(most) >= max([1] + [padded(n) - n for n in range(1, most + 1)])


def crowd(count: int = 11, num_pages: int = 40, new: int = 30) -> None:
    """Equal prompts compute the same pages at the same time, so pages are exchanged; few pages, so some are taken."""
    texts = list(prompts(31, [6 + i % 4 for i in range(count)]))
    requests = [
        Request(texts[i - i % 3], SamplingParams(new - i, 1.0, seed=i // 3, ignore_eos=True), arrival=i // 2)
        for i in range(count)
    ]
    sampler = poisoned(with_graphs(Sampler(FakeModel(), page_size=4, num_pages=num_pages, chunk_size=8)))
    assert_alone(requests, play(sampler, requests))
    assert sampler.graphs.captures > 3, "no step was padded"


@pytest.mark.parametrize("num_pages", [20, 40, 200])
def test_padded_steps_of_a_crowd_have_its_bits(num_pages):
    crowd(num_pages=num_pages)


@pytest.mark.parametrize("count", range(1, 10))
def test_every_number_of_requests(count):
    """On the real model: the tokens and log-probs of plain steps; padding touches no page of the pool."""
    model, params = tiny_model(), [SamplingParams(12, 0.8, seed=i, ignore_eos=True) for i in range(count)]
    ids = [[(7 * i + j) % 96 for j in range(1 + i % 5)] for i in range(count)]
    want = Sampler(model, page_size=4, max_sequences=16).generate(ids, params)
    sampler = poisoned(with_graphs(Sampler(model, page_size=4, max_sequences=16)))
    got = sampler.generate(ids, params)
    assert sampler.graphs.captures >= 1
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        assert_bits(a.log_probs, b.log_probs, f"request {a.request_id}")


@pytest.mark.parametrize("count", [*range(18, 64, 5), 63])
def test_many_requests_at_once(count):
    """A stand-in for the model, whose rows tell every key that they saw; most batches are padded to 32 or 64."""
    texts = list(prompts(count, [3 + i % 4 for i in range(count)]))
    params = [SamplingParams(6, 1.0, seed=i, ignore_eos=True) for i in range(count)]
    sampler = poisoned(with_graphs(Sampler(FakeModel(), page_size=4, max_sequences=64)))
    requests = [Request(*pair) for pair in zip(texts, params, strict=True)]
    assert_alone(requests, play(sampler, requests))
    assert max(key[0] for key in sampler.graphs._graphs) == padded(count)


def test_only_an_other_storage_or_format_drops_the_graphs():
    model = tiny_model()
    sampler = with_graphs(Sampler(model, page_size=4))
    params = SamplingParams(8, ignore_eos=True)
    sampler.generate([[1, 2, 3]], params)
    made = sampler.graphs.captures
    with torch.no_grad():
        model.layers[0].attn.qkv.weight.mul_(-0.5)
    changed = sampler.generate([[1, 2, 3]], params)
    assert sampler.graphs.captures == made
    assert changed[0].log_probs == Sampler(model, page_size=4).generate([[1, 2, 3]], params)[0].log_probs
    model.layers[0].attn.qkv.weight = torch.nn.Parameter(model.layers[0].attn.qkv.weight.detach().clone())
    sampler.generate([[1, 2, 3]], params)
    assert sampler.graphs.captures == made + 1
    model.set_recipe("nvfp4_per_token")
    sampler.generate([[1, 2, 3]], params)
    assert sampler.graphs.captures == made + 2
    model.set_recipe("nvfp4_per_tensor")
    sampler.generate([[1, 2, 3]], params)
    assert sampler.graphs.captures == made + 2, "a number format that can't be captured runs eagerly"
