"""Losses: pure functions of log-probs that return each token's loss and its derivative by the log-prob.

Per token (lp: the learner's log-prob, old: the sampler's, ref: a reference's, A: the advantage), all in nats:

    nll               -lp
    policy_gradient   -min(r A, clip(r, low, high) A) + kl_coef * k3
                      r = exp(lp - old); low = 0.80, high = 1.28: PPO's clipped objective with DAPO's higher upper bound
                      k3 = exp(ref - lp) - (ref - lp) - 1: Schulman's non-negative estimate of KL(policy || reference)

Normalisation: the loss of an update is the mean over all of its counted tokens (DAPO's token mean), sum / N with N
counted over the whole update, so that how tokens fall into packs or samples does not change any token's weight. A
sample's mask says which tokens count; the others have loss and derivative 0, whatever the loss said of them.

Roundings: inputs are FP32; a token's arithmetic is FP64 and each output is rounded once to FP32, nearest even. The
exponential is IEEE multiplies and adds in the order written here, so its bits do not depend on a maths library, and
r is exactly 1 where lp equals old. Sums over tokens are math.fsum of FP32 values: correctly rounded, hence of no order.
Derivatives are analytic: a backward pass starts from grad_L, so a loss needs no autograd graph of its own.

Legend: L scored tokens of one sample, G samples of a prompt's group.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.files import shown
from minitransformer.learner.packing import Sample
from minitransformer.ops.cpu import f32
from minitransformer.ops.jit import jit

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # ln 2 in two parts: n * high is exact


@dataclass(frozen=True)
class TokenLoss:
    """loss_L, grad_L: FP32 [L], the loss of a token and its derivative by the log-prob, before normalisation.

    ratio_L, kl_L: FP32 [L], the importance ratio and k3, or None for a loss that has none.
    clip_low, clip_high: the bounds that a metric of clipped tokens counts against.
    """

    loss_L: Tensor
    grad_L: Tensor
    ratio_L: Tensor | None = None
    kl_L: Tensor | None = None
    clip_low: float = 0.0
    clip_high: float = math.inf


Loss = Callable[[Tensor, Sample, str], TokenLoss]
"""(log_probs_L FP32, the sample, its name for errors) -> TokenLoss: what Learner.update takes as its loss."""


def nll(log_probs_L: Tensor, sample: Sample | None = None, where: str = "") -> TokenLoss:
    """The negative log-likelihood -lp of every completion token; a Loss by itself. log_probs_L: FP32 [L], nats."""
    log_probs_L = log_probs_L.detach()
    return TokenLoss(-log_probs_L, torch.full_like(log_probs_L, -1.0))


@dataclass(frozen=True)
class PolicyGradient:
    """policy_gradient as a Loss: reads advantages, old_log_probs and, with kl_coef > 0, ref_log_probs of the sample."""

    clip_low: float = 0.80
    clip_high: float = 1.28
    kl_coef: float = 0.0

    def __call__(self, log_probs_L: Tensor, sample: Sample, where: str) -> TokenLoss:
        old_L = sample.column("old_log_probs", where)
        ref_L = sample.column("ref_log_probs", where) if self.kl_coef else None
        if old_L is None or (self.kl_coef and ref_L is None):
            missing = "old_log_probs" if old_L is None else "ref_log_probs"
            raise InputError(f"{where}: the policy gradient needs {missing}; give one value a completion token")
        advantages_L = sample.column("advantages", where)
        return policy_gradient(log_probs_L, old_L, advantages_L, self.clip_low, self.clip_high, ref_L, self.kl_coef)


def policy_gradient(
    log_probs_L: Tensor,
    old_log_probs_L: Tensor,
    advantages_L: Tensor,
    clip_low: float = 0.80,
    clip_high: float = 1.28,
    ref_log_probs_L: Tensor | None = None,
    kl_coef: float = 0.0,
) -> TokenLoss:
    """The module's policy_gradient for FP32 [L] inputs on the CPU.

    On a bound the unclipped branch counts (derivative -r A); beyond it, where clipping binds, the derivative is 0.
    A NaN comes out as a NaN. Raises InputError for bounds that do not enclose 1 or a negative kl_coef.
    """
    if not 0 <= clip_low <= 1 <= clip_high:
        raise InputError(f"clip bounds [{clip_low}, {clip_high}] must enclose 1, with the lower one at least 0")
    if not 0 <= kl_coef < math.inf or (kl_coef and ref_log_probs_L is None):
        raise InputError(f"kl_coef {kl_coef} must be finite, at least 0, and 0 without reference log-probs")
    # Without a reference the KL column is computed against the policy itself: exactly 0, and never NaN from nothing.
    inputs = [log_probs_L, old_log_probs_L, advantages_L, log_probs_L if ref_log_probs_L is None else ref_log_probs_L]
    if any(t.shape != (len(log_probs_L),) for t in inputs):
        raise InputError(f"policy_gradient takes vectors of one length, got shapes {[tuple(t.shape) for t in inputs]}")
    nothing_L = torch.full(log_probs_L.shape, math.nan, dtype=torch.float32)
    loss_L, grad_L, ratio_L, kl_L = outputs = [nothing_L.clone() for _ in range(4)]
    bounds = float(clip_low), float(clip_high), float(kl_coef)
    _policy_gradient(*map(f32, inputs), *bounds, *map(f32, outputs))
    return TokenLoss(loss_L, grad_L, ratio_L, None if ref_log_probs_L is None else kl_L, clip_low, clip_high)


def group_advantages(rewards_G: Sequence[float], scale_by_std: bool = True, eps: float = 1e-6) -> list[float]:
    """GRPO: (reward - mean) / (std + eps) within the group of one prompt; Dr. GRPO without the division.

    std is the population's (divided by G). FP64, sums by fsum. A group of equal rewards gets exact zeros.
    """
    rewards = [float(r) for r in rewards_G]
    if not rewards or not all(math.isfinite(r) for r in rewards):
        raise InputError(f"rewards {rewards} of a group must be finite and at least one")
    if min(rewards) == max(rewards):
        # A rounded mean would leave a residue that the division by eps then blows up.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not scale_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / (std + eps) for c in centred]


def token_sum(values: Sequence[Tensor]) -> float:
    """The correctly rounded FP64 sum of all elements of FP32 tensors: independent of their order and grouping.

    With a NaN or infinite element the sum is NaN or infinite, as IEEE addition has it.
    """
    flat = [v for tensor in values for v in tensor.tolist()]
    # fsum raises on inf - inf; a plain sum gives the NaN that the caller looks for.
    return math.fsum(flat) if all(map(math.isfinite, flat)) else sum(flat)


@jit
def _expm1(x):
    """exp(x) - 1 in FP64, relative error below 1e-15; plain multiplies and adds, never contracted."""
    if not abs(x) < 700.0:  # infinities, NaN and what would overflow or vanish
        return np.inf if x > 0 else (-1.0 if x < 0 else x)
    n = np.rint(x * 1.4426950408889634)
    if abs(x) < 0.35:
        n = 0.0
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    # Taylor in Horner form, |r| <= 0.35: the first term left out is below 2^-53 of the sum.
    p = 1.0
    for k in range(16, 1, -1):
        p = 1.0 + r * p / k
    m = r * p
    if n == 0.0:
        return m
    two_n = math.ldexp(1.0, int(n))  # exact
    return two_n * m + (two_n - 1.0)


@jit
def _policy_gradient(lp, old, advantage, ref, low, high, kl_coef, loss, grad, ratio, kl):
    for t in range(lp.shape[0]):
        a = np.float64(advantage[t])
        r = 1.0 + _expm1(np.float64(lp[t]) - np.float64(old[t]))
        unclipped = r * a
        clipped = min(max(r, low), high) * a
        # Written so that a NaN in r or a takes the first branch and shows.
        surrogate, slope = unclipped, unclipped
        if clipped < unclipped:
            surrogate, slope = clipped, 0.0
        e = np.float64(ref[t]) - np.float64(lp[t])
        x = _expm1(e)
        loss[t], grad[t] = -surrogate, -slope
        if kl_coef > 0:
            loss[t] = kl_coef * (x - e) - surrogate
            grad[t] = -kl_coef * x - slope
        ratio[t] = r
        kl[t] = x - e


def counted(output: TokenLoss, mask_L: Tensor, where: str) -> TokenLoss:
    """What a loss said of a sample, for the tokens that its mask (bool [L]) counts: the others get zeros, and have no
    place in the ratio and the KL.

    Raises InputError for anything but a TokenLoss of FP32 [L] on the CPU, and FloatingPointError, naming the first
    token, for a loss or a derivative that is not finite and counts.
    """
    if not isinstance(output, TokenLoss):
        raise InputError(f"{where}: the loss returned {shown(output)}; return a TokenLoss")
    for name in ("loss_L", "grad_L", "ratio_L", "kl_L"):
        value = getattr(output, name)
        if value is None and name in ("ratio_L", "kl_L"):
            continue
        fits = isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == mask_L.shape
        if not fits or value.device.type != "cpu":
            said = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else shown(value)
            raise InputError(f"{where}: {name} of its loss is {said}; return FP32 [{len(mask_L)}] on the CPU")
    zero = torch.zeros((), dtype=torch.float32)
    loss_L, grad_L = (torch.where(mask_L, value.detach(), zero) for value in (output.loss_L, output.grad_L))
    bad_L = ~(torch.isfinite(loss_L) & torch.isfinite(grad_L))
    if bad_L.any():
        token = int(bad_L.nonzero()[0])
        raise FloatingPointError(f"{where}: loss of completion token {token} is not finite; nothing was updated")
    ratio_L, kl_L = (None if value is None else value[mask_L] for value in (output.ratio_L, output.kl_L))
    return replace(output, loss_L=loss_L, grad_L=grad_L, ratio_L=ratio_L, kl_L=kl_L)
