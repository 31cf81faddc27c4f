"""Reinforcement learning in small: sampled, scored, updated, sampled again, with a gap of exactly 0 each time."""

import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.alignment.trace import STAGES, Trace, stage_kind
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import group_advantages
from minitransformer.learner.packing import Sample
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams

SHARED = [7, 30, 2, 41, 5, 19, 88, 64, 23, 11, 50, 3, 77, 9, 36, 14, 6]  # two full pages of 8, and one token more


def _round(sampler, step, samples_per_prompt=4):
    """(completions, params): prompts that share two pages, mixed temperatures, a seed for each request."""
    prompts = [SHARED + [i] * i for i in range(3) for _ in range(samples_per_prompt)]
    params = [
        SamplingParams(max_new_tokens=6, temperature=0.6 + 0.2 * (i % 3), seed=100 * step + i)
        for i in range(len(prompts))
    ]
    return sampler.generate(prompts, params), params


def sample_score_update(steps: int = 3, lr: float = 2e-2) -> None:
    """The law learner == sampler, before and after updates; raises AssertionError where it does not hold."""
    model = tiny_model()
    sampler = Sampler(model, page_size=8, chunk_size=5, max_batch_tokens=40)
    learner = Learner(model, lr=lr, max_tokens_per_pack=100)
    before = None
    for step in range(steps):
        completions, params = _round(sampler, step)
        assert any(c.cached_tokens for c in completions)
        sequences = [c.prompt_ids + c.token_ids for c in completions]
        starts = [len(c.prompt_ids) for c in completions]
        scores = learner.score(sequences, starts, [p.temperature for p in params])
        for c, score_L in zip(completions, scores, strict=True):
            assert_bits_equal(score_L, torch.tensor(c.log_probs), f"step {step}, request {c.request_id}")
        rewards = [float(len(set(c.token_ids))) for c in completions]
        advantages = [a for i in range(0, len(rewards), 4) for a in group_advantages(rewards[i : i + 4])]
        samples = [
            Sample(ids, n, a, c.log_probs, temperature=p.temperature)
            for ids, n, a, c, p in zip(sequences, starts, advantages, completions, params, strict=True)
        ]
        metrics = learner.update(samples)
        assert metrics.max_log_prob_gap == 0.0 and metrics.clip_share == 0.0 and metrics.packs > 1
        # The update must have moved something, or the next round would prove nothing.
        assert before is None or not torch.equal(before, scores[0])
        before = scores[0]


def test_learner_equals_sampler_before_and_after_updates():
    sample_score_update()


def test_after_an_update_an_old_sampler_is_as_good_as_a_new_one():
    model = tiny_model()
    old = Sampler(model, page_size=8)
    _round(old, 0)
    Learner(model, lr=2e-2).update([Sample(SHARED, 5, 1.0, [-3.0] * 12)])
    kept, _ = _round(old, 1)
    fresh, _ = _round(Sampler(model, page_size=8, prefix_cache=False), 1)
    for a, b in zip(kept, fresh, strict=True):
        assert a.token_ids == b.token_ids and a.log_probs == b.log_probs


def test_every_stage_of_the_learner_has_the_samplers_bits():
    model = tiny_model()
    written, scored = Trace(), Trace()
    prompts = [SHARED[:5], SHARED, [1], SHARED[:9] + [2]]
    sampler = Sampler(model, page_size=4, chunk_size=6, max_batch_tokens=16)
    completions = sampler.generate(prompts, SamplingParams(max_new_tokens=7, seed=5), trace=written)
    sequences = [c.prompt_ids + c.token_ids for c in completions]
    Learner(model, max_tokens_per_pack=48).score(
        sequences, [len(p) for p in prompts], trace=scored, request_ids=[c.request_id for c in completions]
    )
    assert written.stages == scored.stages and {stage_kind(s)[0] for s in scored.stages} == set(STAGES)
    for stage in written.stages:
        keys_R = written.row_keys(stage)
        pairs = [tuple(pair) for pair in written.keys.pairs()[keys_R].tolist()]
        at_R = scored.find(stage, scored.keys.number(pairs))
        assert len(pairs) and (at_R >= 0).all(), stage
        assert_bits_equal(scored.rows(stage)[at_R], written.rows(stage), stage)
