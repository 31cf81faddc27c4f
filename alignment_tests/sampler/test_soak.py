"""Law: a request among hundreds has the bits that it has alone, on a real network of random weights.

Each request is run three ways: in a crowd (random arrival, pages, chunks, prefix cache, too few pages), alone in a
sampler of its own, and in one packed pass without any cache, from whose logits every token is drawn again.
"""

import random
from functools import cache

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import Request, assert_alone, play, poisoned
from minitransformer.batch import Batch
from minitransformer.ops.logprob import logprob
from minitransformer.ops.sample import sample
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, SamplingParams

VOCAB = 128


@cache
def model() -> torch.nn.Module:
    """Two layers, one with experts; a random token ends the text."""
    shape = dict(vocab_size=VOCAB, num_layers=2, sparse_layers=(True, False), eos_token_ids=(3,))
    return tiny_model(5, **shape).requires_grad_(False)


def random_request(rng: random.Random, stems: list[list[int]]) -> Request:
    """A prompt of 1 to 70 tokens, two in three with a common beginning, then 1 to 16 new tokens."""
    stem = rng.choice(stems)[: rng.randint(1, 50)] if rng.random() < 2 / 3 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0 if stem else 1, 20))]
    params = SamplingParams(
        max_new_tokens=rng.randint(1, 16),
        temperature=rng.choice([0.0, 0.6, 1.0, 1.0, 1.3]),
        top_k=rng.choice([0, 0, 0, 1, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.4]),
        seed=rng.randrange(2**63),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 4]))),
        ignore_eos=rng.random() < 0.5,
    )
    return Request(tuple(stem + tail), params, arrival=rng.randint(0, 15))


def random_sampler(rng: random.Random, requests: list[Request], turn: int) -> Sampler:
    """Every other one has hardly more pages than its largest request takes, so that others give way."""
    page_size = rng.choice([1, 2, 5, 8, 16, 33])
    least = max(-(-(len(r.prompt) + r.params.max_new_tokens - 1) // page_size) for r in requests)
    sampler = Sampler(
        model(),
        page_size=page_size,
        num_pages=least + rng.randint(0, least) if turn % 2 else None,
        max_batch_tokens=rng.choice([16, 50, 256]),
        chunk_size=rng.randint(1, 64),
        max_sequences=rng.randint(2, 20),
        prefix_cache=turn % 3 > 0,
    )
    return poisoned(sampler)


def packed(request: Request, got: Completion) -> tuple[list[int], list[float]]:
    """Tokens and log-probs from one pass over the finished sequence: the learner's view."""
    ids, start, params = got.prompt_ids + got.token_ids, len(request.prompt), request.params
    rows_LV = model()(Batch.packed([ids[:-1]]))[start - 1 :]
    tokens = [
        sample(row_V, params.seed, start + i, params.temperature, params.top_k, params.top_p)
        for i, row_V in enumerate(rows_LV)
    ]
    return tokens, logprob(rows_LV, torch.tensor(got.token_ids), params.log_prob_temperature).tolist()


def soak(count: int, crowds: int, seed: int) -> None:
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(50)] for _ in range(3)]
    preemptions = cached = tokens = 0
    for turn in range(crowds):
        requests = [random_request(rng, stems) for _ in range(count // crowds)]
        completions = play(random_sampler(rng, requests, turn), requests)
        for request, got in zip(requests, completions, strict=True):
            (own,) = Sampler(model(), prefix_cache=False).generate([list(request.prompt)], request.params)
            assert_alone([request], [got], lambda *_, own=own: (own.token_ids, own.log_probs, own.finish_reason))
            assert_alone([request], [got], lambda *_, r=request, own=own: (*packed(r, own), own.finish_reason))
        preemptions += sum(c.preemptions for c in completions)
        cached += sum(c.cached_tokens for c in completions)
        tokens += sum(len(c.token_ids) for c in completions)
    print(f"{count} requests, {tokens} new tokens, {preemptions} preemptions, {cached} cached tokens: 0 bits differ")
    assert preemptions > count // 10 and cached > count


def test_300_requests_in_crowds_have_the_bits_each_has_alone() -> None:
    soak(300, crowds=12, seed=2)


@pytest.mark.slow
def test_3000_requests_in_crowds_have_the_bits_each_has_alone() -> None:
    soak(3000, crowds=100, seed=3)
