"""Losses against hand values, an FP64 formula written with torch, finite differences, and their own rules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.errors import InputError
from minitransformer.learner import losses
from minitransformer.learner.losses import PolicyGradient, group_advantages, nll, policy_gradient, token_sum
from minitransformer.learner.packing import Sample


def _logs(*ratios):
    """Log-probs whose ratios to an old policy at -1 are as given, in FP32."""
    return torch.tensor([math.log(r) - 1.0 for r in ratios]), torch.full((len(ratios),), -1.0)


def _bits(t):
    return t.contiguous().view(torch.int32)


def test_nll_is_minus_the_log_prob():
    out = nll(torch.tensor([-0.5, -3.0]))
    assert out.loss_L.tolist() == [0.5, 3.0] and out.grad_L.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),  # clipped above: no more reward for moving further
        (1.5, -1.0, 1.5, 1.5),  # pessimistic: a bad token that grew keeps its gradient
        (0.5, 1.0, -0.5, -0.5),  # pessimistic: a good token that shrank keeps its gradient
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (0.9, -3.0, 2.7, 2.7),
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_policy_gradient_by_hand(ratio, advantage, loss, grad):
    lp, old = _logs(ratio)
    out = policy_gradient(lp, old, torch.tensor([advantage]))
    assert out.loss_L.item() == pytest.approx(loss, rel=1e-6)
    assert out.grad_L.item() == pytest.approx(grad, rel=1e-6)
    assert out.ratio_L.item() == pytest.approx(ratio, rel=1e-6)


def test_equal_log_probs_have_a_ratio_of_exactly_one():
    # Both sides divide by a temperature of 0.6, so the first token's ratio is 1, not 2.
    lp = torch.tensor([-0.1234567, -17.5, -3.0e-8, -0.0])
    out = policy_gradient(lp, lp.clone(), torch.ones(4))
    assert out.ratio_L.tolist() == [1.0] * 4 and out.loss_L.tolist() == [-1.0] * 4


def test_k3_by_hand_and_exact_at_zero():
    lp, ref = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0 + math.log(2.0), -2.5])
    out = policy_gradient(lp, lp, torch.zeros(3), ref_log_probs_L=ref, kl_coef=0.5)
    expected = [0.0, 1.0 - math.log(2.0), math.exp(-0.5) - 0.5]
    assert out.kl_L.tolist() == pytest.approx(expected, rel=1e-6) and out.kl_L[0] == 0.0
    assert out.loss_L.tolist() == pytest.approx([0.5 * k for k in expected], rel=1e-6)
    assert out.grad_L.tolist() == pytest.approx([0.0, -0.5, 0.5 * (1 - math.exp(-0.5))], rel=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 3.0]))
@settings(max_examples=25, deadline=None)
def test_against_torch_in_fp64(seed, kl_coef):
    rng = torch.Generator().manual_seed(seed)
    lp, old, ref = (-5 * torch.rand(64, generator=rng) for _ in range(3))
    old, ref = lp + (old + 2.5) / 4, lp + (ref + 2.5) / 2
    advantages = torch.randn(64, generator=rng)
    out = policy_gradient(lp, old, advantages, ref_log_probs_L=ref, kl_coef=kl_coef)
    x = lp.double().requires_grad_()
    r = torch.exp(x - old.double())
    surrogate = torch.minimum(r * advantages.double(), r.clamp(0.80, 1.28) * advantages.double())
    e = ref.double() - x
    expected = kl_coef * (torch.expm1(e) - e) - surrogate
    (grad,) = torch.autograd.grad(expected.sum(), x)
    # One rounding to FP32 of an FP64 value: half a unit in the last place and a little.
    torch.testing.assert_close(out.loss_L.double(), expected.detach(), rtol=6.1e-8, atol=1e-15)
    torch.testing.assert_close(out.grad_L.double(), grad, rtol=6.1e-8, atol=1e-15)


def test_exponential_is_accurate_and_keeps_special_values():
    x = torch.cat([torch.linspace(-60, 60, 20001), torch.linspace(-1e-3, 1e-3, 2001)]).double()
    mine = torch.tensor([losses._expm1(v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(mine, torch.expm1(x), rtol=1e-15, atol=0)
    assert losses._expm1(0.0) == 0.0 and losses._expm1(1e4) == math.inf and losses._expm1(-1e4) == -1.0
    assert math.isnan(losses._expm1(math.nan))


def test_a_token_does_not_see_its_neighbours():
    lp, old = _logs(0.5, 0.9, 1.0, 1.1, 1.5, 1.27)
    advantages = torch.tensor([1.0, -2.0, 0.3, 0.0, -0.1, 5.0])
    whole = policy_gradient(lp, old, advantages)
    for t in range(6):
        alone = policy_gradient(lp[t : t + 1], old[t : t + 1], advantages[t : t + 1])
        for column in ("loss_L", "grad_L", "ratio_L"):
            assert torch.equal(_bits(getattr(alone, column)), _bits(getattr(whole, column)[t : t + 1]))


def test_a_nan_shows_in_loss_and_gradient():
    out = policy_gradient(torch.tensor([math.nan, -1.0]), torch.full((2,), -1.0), torch.tensor([1.0, math.nan]))
    assert out.loss_L.isnan().all() and out.grad_L.isnan().all()


def test_advantages_are_of_the_group():
    assert group_advantages([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], rel=1e-5)
    assert group_advantages([1, 0, 0, 0], scale_by_std=False) == [0.75, -0.25, -0.25, -0.25]
    std = math.sqrt(3) / 4
    assert group_advantages([1, 0, 0, 0], eps=0.0) == pytest.approx([0.75 / std] + [-0.25 / std] * 3, rel=1e-15)
    assert group_advantages([0.1] * 3) == [0.0] * 3  # 0.1 + 0.1 + 0.1 over 3 is not 0.1
    with pytest.raises(InputError, match="finite"):
        group_advantages([1.0, math.nan])


def test_token_sum_ignores_order_and_grouping():
    values = torch.tensor([1e8, 1.0, -1e8, 1e-8] * 50)
    total = token_sum([values])
    shuffled = values[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert total == token_sum(list(shuffled.split(7))) == math.fsum(values.tolist())
    assert math.isnan(token_sum([torch.tensor([math.inf, -math.inf])]))
    assert token_sum([torch.tensor([1.0, math.inf])]) == math.inf


def test_bad_settings_and_missing_columns():
    one = torch.zeros(1)
    for low, high in [(1.28, 0.80), (-0.1, 1.2), (0.8, 0.9)]:
        with pytest.raises(InputError, match="clip bounds"):
            policy_gradient(one, one, one, low, high)
    with pytest.raises(InputError, match="kl_coef"):
        policy_gradient(one, one, one, kl_coef=0.1)
    with pytest.raises(InputError, match="one length"):
        policy_gradient(one, torch.zeros(2), one)
    with pytest.raises(InputError, match="sample 7: the policy gradient needs old_log_probs"):
        PolicyGradient()(one, Sample([1, 2], 1), "sample 7")
    with pytest.raises(InputError, match="sample 7: the policy gradient needs ref_log_probs"):
        PolicyGradient(kl_coef=0.1)(one, Sample([1, 2], 1, old_log_probs=[0.0]), "sample 7")
