"""Law: decode == prefill at awkward lengths, through the sampler, on a real network of random weights."""

from functools import cache

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import assert_bits
from minitransformer.batch import Batch
from minitransformer.ops.logprob import logprob
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, SamplingParams


@cache
def model() -> torch.nn.Module:
    shape = dict(num_layers=2, sparse_layers=(False, True), num_heads=2, num_kv_heads=1, max_positions=4160)
    return tiny_model(6, **shape).requires_grad_(False)


def assert_packed(got: Completion, what: str) -> None:
    """The log-probs are those of one packed pass over prompt and new tokens."""
    ids = got.prompt_ids + got.token_ids
    rows_LV = model()(Batch.packed([ids[:-1]]))[len(got.prompt_ids) - 1 :]
    assert_bits(got.log_probs, logprob(rows_LV, torch.tensor(got.token_ids)).tolist(), what)


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_key_lengths_95_to_130_one_by_one() -> None:
    """Each decoded token sees one key more; a tile of keys fills and the next begins on the way."""
    (got,) = Sampler(model(), page_size=16).generate([random_ids(94)], SamplingParams(37, seed=4))
    assert len(got.token_ids) == 37
    assert_packed(got, "decode")


@pytest.mark.parametrize("prefix", [1, 511, 2048, pytest.param(4097, marks=pytest.mark.slow)])
def test_a_long_prefix_is_all_hits(prefix: int) -> None:
    """Served once, then again with other words behind it: all its full pages are hits."""
    sampler = Sampler(model(), page_size=16, chunk_size=256, num_pages=300)
    stem = random_ids(prefix)
    sampler.generate([stem], SamplingParams(1))
    (got,) = sampler.generate([stem + random_ids(3, seed=1)], SamplingParams(3, seed=8))
    assert got.cached_tokens == prefix // 16 * 16
    assert_packed(got, f"prefix of {prefix}")
