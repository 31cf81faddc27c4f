"""gap.py: the statistics of |learner - sampler|, on numbers worked out by hand."""

import math

import pytest
import torch

from minitransformer.alignment.gap import Gap, log_prob_gap


def test_equal_bits_are_no_gap_even_at_infinity():
    x_T = torch.tensor([-1.0, -2.5, -math.inf])
    assert log_prob_gap(x_T, x_T.clone()) == Gap(3, 0, 0.0, 0.0, 0.0, 0.0)


def test_no_tokens_have_no_gap():
    assert log_prob_gap(torch.empty(0), torch.empty(0)) == Gap(0, 0, 0.0, 0.0, 0.0, 0.0)


def test_known_gap():
    """100 tokens: 97 equal, then +0.25 (ratio 1.284, too high), -0.125 (0.88, inside), -0.25 (0.78, too low)."""
    sampler_T = torch.full((100,), -4.0)
    learner_T = sampler_T.clone()
    learner_T[:3] += torch.tensor([0.25, -0.125, -0.25])
    gap = log_prob_gap(sampler_T, learner_T)
    assert (gap.tokens, gap.differing, gap.max, gap.mean) == (100, 3, 0.25, 0.00625)
    # Nearest rank: the 99th of 100 values in order.
    assert gap.p99 == 0.25
    assert gap.clip_share == pytest.approx(0.02)


def test_one_ulp_is_a_gap():
    sampler_T = torch.tensor([-1.0, -1e-30])
    gap = log_prob_gap(sampler_T, torch.nextafter(sampler_T, torch.zeros(2)))
    assert gap.differing == 2 and gap.max == 2.0**-24 and gap.mean > 0


def test_p99_is_a_rank_not_an_interpolation():
    learner_T = torch.arange(200) / 1024
    assert log_prob_gap(torch.zeros(200), learner_T).p99 == 197 / 1024


def test_a_nan_is_shown_and_counts_as_clipped():
    gap = log_prob_gap(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, math.nan]))
    assert gap.differing == 1 and math.isnan(gap.max) and gap.clip_share == 0.5
