"""Log-probs without gradients: the logits, FP32 [L, V], exist only for a few rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minitransformer.learner.packing import Pack
from minitransformer.ops import gpu

# Of one chunk's logits. Rows are independent, so the size of a chunk cannot move a bit.
CHUNK_BYTES = 1 << 28


@torch.no_grad()
def in_chunks(model: Any, one: Pack, temperatures: Sequence[float], trace: Any, logprob: Callable) -> Tensor:
    """FP32 [L] of the pack's targets; temperatures: of all the caller's sequences. InputError names a refused row."""
    batch, ids_L = one.batch, one.target_ids_L
    with one.naming_rows():
        h_TD = model.hidden(batch) if trace is None else model.hidden(batch, note=trace.bind(batch))
        if h_TD.is_cuda:
            gpu.device.check(h_TD.device)  # now: rows found later would be taken for rows of the logits
    h_LD, found = h_TD[batch.logit_rows_L], []
    most = max(1, CHUNK_BYTES // (4 * model.config.vocab_size))
    for begin, end, temperature in chunks(one.bounds, [temperatures[s] for s in one.sequences], most):
        with one.naming_rows(begin):
            found.append(logprob(model.logits(h_LD[begin:end]), ids_L[begin:end], temperature))
    return torch.cat(found)


def chunks(bounds: Sequence[int], temperatures: Sequence[float], most: int) -> Iterator[tuple[int, int, float]]:
    """(begin, end, temperature) of runs of at most `most` rows of one temperature, in order.

    bounds: of each sequence's rows; temperatures: one a sequence.
    """
    begin = bounds[0]
    for s, temperature in enumerate(temperatures):
        end = bounds[s + 1]
        if s + 1 < len(temperatures) and temperatures[s + 1] == temperature:
            continue
        for a in range(begin, end, most):
            yield a, min(a + most, end), temperature
        begin = end
