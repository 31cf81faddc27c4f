"""The log-prob gap between a sampler and a learner, in the numbers that reinforcement learning feels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitransformer.alignment.ulp import differing

# The importance ratio's usual clip range, with the raised upper end: outside it a token's gradient is lost or cut.
CLIP = (0.80, 1.28)


@dataclass(frozen=True)
class Gap:
    """tokens compared; how many differ in a bit; max, mean and P99 (nearest rank) of |learner - sampler| in nats;
    clip_share: the share of tokens whose ratio exp(learner - sampler) lies outside CLIP. A NaN counts as outside."""

    tokens: int
    differing: int
    max: float
    mean: float
    p99: float
    clip_share: float


def log_prob_gap(sampler_T: Tensor, learner_T: Tensor) -> Gap:
    """FP32 [T] each, the same tokens. The statistics are taken in FP64. No tokens: zeros."""
    tokens = sampler_T.numel()
    if tokens == 0:
        return Gap(0, 0, 0.0, 0.0, 0.0, 0.0)
    # Equal bits are no gap, also where both are -infinity and a difference would be NaN.
    wrong_T = differing(sampler_T, learner_T)
    signed_T = torch.where(wrong_T, learner_T.double() - sampler_T.double(), 0.0)
    distance_T = signed_T.abs().sort().values  # a NaN sorts last
    ratio_T = signed_T.exp()
    inside = int(((ratio_T >= CLIP[0]) & (ratio_T <= CLIP[1])).sum())
    return Gap(
        tokens=tokens,
        differing=int(wrong_T.sum()),
        max=distance_T[-1].item(),
        mean=distance_T.mean().item(),
        p99=distance_T[-(-99 * tokens // 100) - 1].item(),
        clip_share=1 - inside / tokens,
    )
