"""Which tokens of a completion count, and what a loss may return."""

import math

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import PolicyGradient, TokenLoss, nll
from minitransformer.learner.packing import Sample

IDS, START = [5, 9, 2, 7, 7, 1, 30, 4, 11, 8], 2
MASK = [1, 1, 0, 0, 1, 0, 1, 0]  # two turns, a tool's answers between them: 4 of 8 tokens
OLD = [-4.0, -5.0, 0.0, 0.0, -4.5, 0.0, -3.0, 0.0]


def weights_after(samples, loss=nll) -> tuple:
    learner = Learner(tiny_model(), lr=1e-2, max_tokens_per_pack=16)
    metrics = learner.update(samples, loss)
    return metrics, [p.detach().clone() for p in learner.model.parameters()]


def assert_same_weights(a, b) -> None:
    for one, other in zip(a, b, strict=True):
        assert_bits_equal(one, other)


def counted_in_the_loss(log_probs_L, sample, where):
    """What the mask says, said by the loss: half of the tokens count, so each counts twice in a mean over all."""
    weight_L = 2 * torch.tensor(MASK, dtype=torch.float32)
    return TokenLoss(-log_probs_L * weight_L, -weight_L)


def test_a_mask_leaves_tokens_out_of_the_mean_and_its_gradient():
    masked, got = weights_after([Sample(IDS, START, mask=MASK)] * 2)
    whole, want = weights_after([Sample(IDS, START)] * 2, counted_in_the_loss)
    assert_same_weights(got, want)
    assert (masked.tokens, whole.tokens) == (8, 16)
    assert masked.loss == whole.loss and masked.grad_norm == whole.grad_norm


@pytest.mark.parametrize("mask", [[1] * 8, torch.ones(8, dtype=torch.bool), 1])
def test_a_mask_of_ones_is_none(mask):
    metrics, got = weights_after([Sample(IDS, START, 1.0, OLD, mask=mask)], PolicyGradient())
    unmasked, want = weights_after([Sample(IDS, START, 1.0, OLD)], PolicyGradient())
    assert metrics == unmasked
    assert_same_weights(got, want)


def test_what_stands_at_left_out_tokens_moves_nothing():
    """Old log-probs, references and advantages there; a sample of none but such tokens has no part either."""
    loss = PolicyGradient(kl_coef=0.1)
    odd_L = [value if counts else -77.0 for value, counts in zip(OLD, MASK, strict=True)]
    metrics, want = weights_after([Sample(IDS, START, 1.0, OLD, OLD, mask=MASK)], loss)
    again, got = weights_after([Sample(IDS, START, odd_L, odd_L, odd_L, mask=MASK)], loss)
    assert again.max_log_prob_gap == metrics.max_log_prob_gap < 10
    (lp,) = Learner(tiny_model()).score([IDS], [START])
    ratio_L = torch.exp(lp - torch.tensor(OLD))[torch.tensor(MASK).bool()]
    assert metrics.clip_share == sum(not 0.8 <= r <= 1.28 for r in ratio_L.tolist()) / 4
    one = Sample(IDS, START, [1.0] * 8, odd_L, odd_L, mask=MASK)
    none = Sample(IDS, START, 5.0, OLD, OLD, mask=[0] * 8)
    alone, mine = weights_after([one], loss)
    beside, theirs = weights_after([one, none], loss)
    assert_same_weights(mine, theirs)
    assert (alone.tokens, alone.loss, alone.kl) == (beside.tokens, beside.loss, beside.kl)


def test_a_ratio_on_a_bound_is_not_clipped():
    (lp,) = Learner(tiny_model()).score([IDS], [START])
    metrics, _ = weights_after([Sample(IDS, START, 1.0, lp.tolist())], PolicyGradient(1.0, 1.0))
    assert metrics.clip_share == 0


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1] * 7, "sample 0: mask has shape (7,)"),
        ([0.5] * 8, "give 1 or 0"),
        ([math.nan] * 8, "not finite"),
        (["a"] * 8, "sample 0: mask"),
        ([0] * 8, "no token to learn from"),
    ],
)
def test_bad_masks_are_refused(mask, words):
    with pytest.raises(InputError) as error:
        weights_after([Sample(IDS, START, mask=mask)])
    assert words in str(error.value)


RESULTS = {
    "None": lambda lp: None,
    "grad_L of its loss is torch.float32 [2]": lambda lp: TokenLoss(-lp, lp[:2]),
    "loss_L of its loss is torch.float32 []": lambda lp: TokenLoss(lp.mean(), -torch.ones_like(lp)),
    "grad_L of its loss is torch.bfloat16 [8]": lambda lp: TokenLoss(-lp, -torch.ones_like(lp).bfloat16()),
    "loss_L of its loss is torch.float64 [8]": lambda lp: TokenLoss(-lp.double(), -torch.ones_like(lp)),
    "ratio_L of its loss is [1.0": lambda lp: TokenLoss(-lp, -torch.ones_like(lp), [1.0] * 8),
}


@pytest.mark.parametrize("words", RESULTS)
def test_a_loss_that_returns_something_else_is_refused_and_updates_nothing(words):
    """Silently taken, a BF16 derivative would be divided in BF16, and a short one would belong to the next sample."""
    learner = Learner(tiny_model(), lr=1e-2)
    before = [p.detach().clone() for p in learner.model.parameters()]
    with pytest.raises(InputError, match="^sample 0: ") as error:
        learner.update([Sample(IDS, START)], lambda lp, sample, where: RESULTS[words](lp))
    assert words in str(error.value) and learner.step == 0
    assert_same_weights(learner.model.parameters(), before)


def test_a_loss_that_writes_into_its_argument_spoils_nothing():
    def spoiling(log_probs_L, sample, where):
        found = TokenLoss(-log_probs_L, torch.full_like(log_probs_L, -1.0))
        log_probs_L.zero_()
        return found

    sample = Sample(IDS, START, old_log_probs=OLD)
    (metrics, got), (clean, want) = weights_after([sample], spoiling), weights_after([sample])
    assert_same_weights(got, want)
    assert metrics.max_log_prob_gap == clean.max_log_prob_gap
