"""The head: log-probs of the last hidden rows. The logits, FP32 [L, V], exist only in parts, forward and backward.

Forward by rows, which are independent; a row's m and S are kept. Backward by columns, which m and S make independent:
the logits of some ids are made once more, then their gradient in BF16, these rows of dW whole, and dX's chain goes on
over them in FP32 (ops/linear.py). So both chains add what they add in one piece. Logits that are one part are kept.

L rows, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minitransformer.devices import free_bytes
from minitransformer.learner.packing import Pack
from minitransformer.ops import gpu, linear, logprob
from minitransformer.ops.autograd import apply
from minitransformer.ops.embedding import check_ids
from minitransformer.ops.mma import STEP

# Of one part's logits in FP32. The size of a part cannot move a bit, so it may follow what an engine leaves of a GPU.
CHUNK_BYTES = 1 << 30
LEAST_BYTES = 1 << 25  # below this a part's launches would take the time, and the memory is lacking anyway
PARTS_AT_ONCE = 4  # the logits, their gradient in BF16, a product's FP32, and one for what does not fit exactly


def part_bytes(device: torch.device, beside: int = 0) -> int:
    """Of the logits at a time: CHUNK_BYTES, less on a GPU of which others, and `beside` bytes, leave little."""
    return min(CHUNK_BYTES, max(LEAST_BYTES, (free_bytes(device) - beside) // PARTS_AT_ONCE))


def log_probs(model: Any, one: Pack, temperatures: Sequence[float], trace: Any, recompute: bool) -> Tensor:
    """FP32 [L] of the pack's targets, with gradients where they are on; InputError names a refused row.

    temperatures: of all the caller's sequences.
    """
    batch, note = one.batch, None if trace is None else trace.bind(one.batch)
    with one.naming_rows():
        h_TD = model.hidden(batch, recompute=recompute, **({"note": note} if note else {}))
        if h_TD.is_cuda:
            gpu.device.check(h_TD.device)  # now: rows found later would be taken for rows of the logits
    h_LD = h_TD[batch.logit_rows_L]
    if note and trace.wants("logits"):
        note("logits", model.logits(h_LD))  # the same bits as the parts'
    return head(h_LD, model.head, one.target_ids_L, _of_rows(one, temperatures), one.naming_rows)


def _of_rows(one: Pack, temperatures: Sequence[float]) -> Tensor:
    """FP32 [L]: the temperature of each row's sequence."""
    for s in one.sequences:
        logprob.check_temperature(temperatures[s])
    rows_S = torch.tensor([b - a for a, b in pairwise(one.bounds)])
    of_S = torch.tensor([temperatures[s] for s in one.sequences], dtype=torch.float32)
    return of_S.repeat_interleave(rows_S).to(one.target_ids_L.device)


def head(
    h_LD: Tensor, weight_VD: Tensor, ids_L: Tensor, temperatures_L: Tensor,
    naming: Callable[[int], AbstractContextManager] = lambda row: nullcontext(),
) -> Tensor:  # fmt: skip
    """linear [L, D] BF16 times [V, D] BF16 to FP32, then logprob of ids int64 at temperatures FP32 -> FP32 [L].

    naming(row): a context for errors of the rows from that one on. Raises what the two operators raise.
    """
    L = len(h_LD)
    if ids_L.shape != (L,) or temperatures_L.shape != (L,):
        raise ValueError(f"head: {L} rows, ids {tuple(ids_L.shape)}, temperatures {tuple(temperatures_L.shape)}")
    if not ids_L.is_cuda:
        check_ids("logprob", ids_L, len(weight_VD))  # all at once: a part would count from its own first row
    return apply(_Head, h_LD, weight_VD, ids_L, temperatures_L, naming)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_LD: Tensor, weight_VD: Tensor, ids_L: Tensor, temperatures_L: Tensor, naming: Callable):
        rows, found = max(1, part_bytes(h_LD.device) // (4 * weight_VD.shape[0])), []
        for begin in range(0, max(1, h_LD.shape[0]), rows):  # no row is one part, too
            logits = None  # freed before the next ones are made
            part = slice(begin, begin + rows)
            with naming(begin):
                logits = linear.forward(h_LD[part], weight_VD, torch.float32)
                found.append(logprob.forward(logits, ids_L[part], temperatures_L[part]))
        log_probs_L, max_sum_L2 = map(torch.cat, zip(*found, strict=True))
        whole = logits if len(found) == 1 else None
        ctx.save_for_backward(h_LD, weight_VD, ids_L, temperatures_L, max_sum_L2, whole)
        return log_probs_L

    @staticmethod
    def backward(ctx: Any, d_L: Tensor) -> tuple:
        h_LD, weight_VD, *rows, whole = ctx.saved_tensors
        need_dh, need_dw = ctx.needs_input_grad[:2]
        V, dh_LD, dw_VD = weight_VD.shape[0], None, torch.empty_like(weight_VD) if need_dw else None
        # A step of dX's chain is not cut.
        beside = 12 * h_LD.numel() * need_dh  # dX before and after a part in FP32, and rounded
        most = part_bytes(h_LD.device, beside) // (4 * max(1, h_LD.shape[0]))
        columns = V if whole is not None else max(STEP, most // STEP * STEP)
        for first in range(0, V, columns):
            part = slice(first, first + columns)
            dlogits = _dlogits(h_LD, weight_VD[part], *rows, d_L, whole, first)
            if need_dh:
                dh_LD = linear.continue_dx(dlogits, weight_VD[part], dh_LD, last=first + columns >= V)
            if need_dw:
                linear.backward(dlogits, h_LD, weight_VD[part], need_dx=False, into=dw_VD[part])
            del dlogits
        return dh_LD, dw_VD, None, None, None


def _dlogits(
    h_LD: Tensor, weight_CD: Tensor, ids_L: Tensor, temperatures_L: Tensor, max_sum_L2: Tensor, d_L: Tensor,
    whole: Tensor | None, first: int,
) -> Tensor:  # fmt: skip
    """BF16 [L, C], of the ids from `first` on; whole: these logits, if they were kept."""
    logits = linear.forward(h_LD, weight_CD, torch.float32) if whole is None else whole
    return logprob.backward(d_L, logits, ids_L, temperatures_L, max_sum_L2, first, torch.bfloat16)
