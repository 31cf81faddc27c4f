"""The next token of each request of a step, and its log-prob."""

import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import gpu
from minitransformer.ops.logprob import logprob
from minitransformer.ops.sample import sample
from minitransformer.sampler.sequence import Sequence


def draw(sequences: list[Sequence], logits_LV: Tensor) -> list[tuple[int, float] | InputError]:
    """The next token of each row's sequence and its log-prob, or what is wrong with the row: it is that request's own.

    The new token's position is the length of the sequence so far: with the seed it keys the noise, so that neither
    the row nor the step matters. Log-probs go through one call a temperature.
    """
    if logits_LV.is_cuda:  # all rows at once, so that the GPU is waited for once
        return gpu.sample.draw(logits_LV, [gpu.sample.Draw(*s.next_draw) for s in sequences])
    drawn: list = []
    for s, row_V in zip(sequences, logits_LV, strict=True):
        p = s.params
        try:
            drawn.append(sample(row_V, p.seed, len(s.ids), p.temperature, p.top_k, p.top_p))
        except InputError as error:
            drawn.append(error)
    good = [i for i, token in enumerate(drawn) if not isinstance(token, InputError)]
    for temperature in dict.fromkeys(sequences[i].params.log_prob_temperature for i in good):
        rows = [i for i in good if sequences[i].params.log_prob_temperature == temperature]
        ids_L = torch.tensor([drawn[i] for i in rows], device=logits_LV.device)
        # Refuses no row from which sample() has drawn: its largest quotient is finite, and no logit is NaN.
        log_probs = logprob(logits_LV[rows], ids_L, temperature).tolist()
        for i, log_prob in zip(rows, log_probs, strict=True):
            drawn[i] = drawn[i], log_prob
    return drawn
