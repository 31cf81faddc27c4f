"""Law: the prefix cache spares work and moves no bit; what it holds is found by its ids alone, and never outlives the
weights."""

import itertools

import numpy as np
import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import FakeModel, Request, alone, assert_alone, assert_bits, play, poisoned, prompts
from minitransformer.learner.learner import Learner
from minitransformer.recipe import get
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams


@pytest.mark.parametrize(("length", "cached"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32), (41, 40)])
def test_prefix_hits_of_no_page_one_page_and_several(length: int, cached: int) -> None:
    """A prompt served twice: all its full pages are spared, but never its last token."""
    (prompt,) = prompts(5, [length])
    requests = [Request(prompt, SamplingParams(1, seed=i)) for i in range(2)]
    model = FakeModel()
    sampler = poisoned(Sampler(model, page_size=8))
    first, second = play(sampler, requests[:1]) + play(sampler, requests[1:])
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert len(model.batches[-1].ids_T) == length - cached
    assert_alone(requests, [first, second])


def test_prefixes_part_ways_inside_a_page() -> None:
    """Two prompts equal but for one token: pages before it are shared, its own page and those after are not."""
    (base,) = prompts(6, [33])
    for i in range(33):
        other = base[:i] + (base[i] ^ 1,) + base[i + 1 :]
        requests = [Request(p, SamplingParams(3)) for p in (base, other)]
        sampler = poisoned(Sampler(FakeModel(), page_size=8))
        completions = play(sampler, requests[:1]) + play(sampler, requests[1:])
        assert completions[1].cached_tokens == i // 8 * 8
        assert_alone(requests, completions)


def test_a_page_is_found_only_behind_its_own_prefix() -> None:
    """The same ids at another place, or behind other ids, are another page."""
    a, b = tuple(range(4, 8)), tuple(range(8, 12))
    requests = [Request(p, SamplingParams(3)) for p in (a + b + a, b + a + a, a + a + b, b + b + a, a + b + b)]
    sampler = poisoned(Sampler(FakeModel(), page_size=4))
    completions = [play(sampler, [r])[0] for r in requests]
    assert [c.cached_tokens for c in completions] == [0, 0, 4, 4, 8]
    assert_alone(requests, completions)


def test_identical_prompts_at_the_same_time() -> None:
    """Computed side by side, kept once: what both have filled is one page."""
    (prompt,) = prompts(7, [33])
    requests = [Request(prompt, SamplingParams(12, seed=i, ignore_eos=True)) for i in (0, 0, 1)]
    sampler = poisoned(Sampler(FakeModel(), page_size=8, chunk_size=16))
    completions = play(sampler, requests)
    assert_alone(requests, completions)
    assert completions[0].token_ids == completions[1].token_ids != completions[2].token_ids
    # 4 pages of prompt; 12 new tokens fill the fifth page with one of two contents.
    assert len(sampler.pool._keys) == 6


def test_a_page_is_found_only_once_it_is_full() -> None:
    """The same prompt arrives again while the first one is still being read, in chunks smaller than a page."""
    (prompt,) = prompts(16, [33])
    requests = [Request(prompt, SamplingParams(3, seed=t), arrival=t) for t in range(12)]
    completions = play(poisoned(Sampler(FakeModel(), page_size=8, chunk_size=3)), requests)
    assert [c.cached_tokens for c in completions] == [0, 0, 0, 8, 8, 8, 16, 16, 24, 24, 24, 32]
    assert_alone(requests, completions)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    (prompt,) = prompts(8, [10])
    sampler = poisoned(Sampler(FakeModel(), page_size=4))
    (turn,) = play(sampler, [Request(prompt, SamplingParams(9, ignore_eos=True))])
    longer = Request(prompt + tuple(turn.token_ids) + (7, 8), SamplingParams(4))
    completions = play(sampler, [longer])
    assert completions[0].cached_tokens == 16
    assert_alone([longer], completions)


def test_new_weights_are_seen_and_old_keys_are_not() -> None:
    """A change that torch counts is noticed; one that it does not count needs reset_cache()."""
    (prompt,) = prompts(12, [40])
    params = SamplingParams(6, ignore_eos=True)

    def optimiser_step(model: FakeModel) -> None:
        with torch.no_grad():
            model.salt.add_(1)

    def replaced(model: FakeModel) -> None:
        model.salt = torch.nn.Parameter(torch.full((1,), 2.0))

    def announced(model: FakeModel) -> None:
        model.salt.data.add_(1)
        model.weights_version += 1

    def behind_torchs_back(model: FakeModel) -> None:
        model.salt.data.add_(1)
        sampler.reset_cache()

    def replaced_at_the_same_address(model: FakeModel) -> None:
        """The second parameter has the first one's address and count of writes, as after two replacements in a row."""
        salt[:] = 2
        model.salt = torch.nn.Parameter(torch.from_numpy(salt))

    for change in (optimiser_step, replaced, replaced_at_the_same_address, announced, behind_torchs_back):
        model, salt = FakeModel(), np.ones(1, np.float32)
        model.salt = torch.nn.Parameter(torch.from_numpy(salt))
        sampler = Sampler(model, page_size=4)
        old = sampler.generate([list(prompt)], params)[0]
        change(model)
        new = sampler.generate([list(prompt)], params)[0]
        assert new.cached_tokens == 0 and new.token_ids != old.token_ids
        token_ids, log_probs, _ = alone(model, prompt, params)
        assert new.token_ids == token_ids
        assert_bits(new.log_probs, log_probs, change.__name__)


def test_another_recipe_is_seen_and_old_keys_are_not() -> None:
    """bf16 -> nvfp4_per_token -> bf16 on one sampler: no hit of the other format's keys, and the learner's bits."""
    model, params = tiny_model(3), SamplingParams(6, ignore_eos=True)
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    sampler, outcomes = Sampler(model, page_size=4), []
    for recipe in ("bf16", "nvfp4_per_token", "bf16"):
        model.set_recipe(recipe)
        got, again = (sampler.generate([prompt], params)[0] for _ in range(2))
        assert (got.cached_tokens, again.cached_tokens) == (0, 36), recipe
        (score,) = Learner(model).score([got.prompt_ids + got.token_ids], [40])
        assert_bits(got.log_probs, score.tolist(), recipe)
        assert_bits(again.log_probs, score.tolist(), f"{recipe}, from the prefix cache")
        outcomes.append(got.log_probs)
    assert outcomes[0] == outcomes[2] != outcomes[1]


def test_another_recipe_of_one_layer_is_seen() -> None:
    model, params = tiny_model(3), SamplingParams(2, ignore_eos=True)
    sampler = Sampler(model, page_size=4)
    sampler.generate([[5] * 20], params)
    model.layers[0].mlp.set_recipe(get("nvfp4_per_token"))
    assert sampler.generate([[5] * 20], params)[0].cached_tokens == 0


def test_the_same_weights_written_again_change_no_output() -> None:
    """Also in the middle of a request: its keys and values are computed again."""
    requests = [Request(p, SamplingParams(10, ignore_eos=True)) for p in prompts(13, [9, 21])]
    model = FakeModel()
    sampler = poisoned(Sampler(model, page_size=4, chunk_size=6))
    for request in requests:
        sampler.add(list(request.prompt), request.params)
    done = {}
    for step in itertools.count():
        if len(done) == 2:
            break
        done |= {t.request_id: t.completion for t in sampler.step() if t.completion is not None}
        if step % 7 == 0:
            model.load_state_dict(model.state_dict())
        sampler.check()
    assert done[1].preemptions > 0
    assert_alone(requests, [done[0], done[1]])
