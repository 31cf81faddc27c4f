"""What an update reports about itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minitransformer.learner.losses import TokenLoss, token_sum
from minitransformer.learner.packing import Sample


@dataclass(frozen=True)
class UpdateMetrics:
    """What an update did; sums over tokens are correctly rounded, so no metric but grad_norm depends on the packing.

    loss                mean over the counted tokens, before the step
    grad_norm           global norm before clipping
    clip_share          share of tokens whose importance ratio lies outside the loss's bounds; None without a ratio
    max_log_prob_gap    largest |learner - sampler| in nats over counted tokens with old_log_probs; None without any
    kl                  mean k3 to the reference, nats a token; None without a reference
    tokens, packs       counted tokens (those of the samples' masks), forward passes
    step                updates made so far, this one included
    """

    loss: float
    grad_norm: float
    clip_share: float | None
    max_log_prob_gap: float | None
    kl: float | None
    tokens: int
    packs: int
    step: int


def metrics(done: Sequence[tuple[Sample, Tensor, TokenLoss]], grad_norm: float, packs: int, step: int) -> UpdateMetrics:
    """done: (sample, its log-probs [L] FP32 before the step, its loss) in the given order."""
    masks = [sample.counted("") for sample, _, _ in done]
    tokens = sum(int(mask_L.sum()) for mask_L in masks)
    gaps = [
        float((lp_L - sample.column("old_log_probs", ""))[mask_L].abs().max())
        for (sample, lp_L, _), mask_L in zip(done, masks, strict=True)
        if sample.old_log_probs is not None and mask_L.any()
    ]
    ratios = [out for _, _, out in done if out.ratio_L is not None]
    # Counted as "not inside", so that a NaN counts as outside.
    outside = sum(int((~((o.ratio_L >= o.clip_low) & (o.ratio_L <= o.clip_high))).sum()) for o in ratios)
    kls = [out.kl_L for _, _, out in done if out.kl_L is not None]
    return UpdateMetrics(
        loss=token_sum([out.loss_L for _, _, out in done]) / tokens,
        grad_norm=grad_norm,
        clip_share=outside / max(1, sum(len(o.ratio_L) for o in ratios)) if ratios else None,
        max_log_prob_gap=max(gaps) if gaps else None,
        kl=token_sum(kls) / max(1, sum(len(kl_L) for kl_L in kls)) if kls else None,
        tokens=tokens,
        packs=packs,
        step=step,
    )
