"""Execution spec logprob/1: the log-probability of a token under the full softmax at the request's temperature.

    t  = f32(temperature),  x[v] = fl(logit[v] / t)                       FP32 logits, IEEE divide
    m  = max over v of x[v]
    S  = lane sum over v of exp2_32(fl(fl(x[v] - m) * log2 e))            (rounding.py)
    logprob = fl(fl(x[id] - m) - log_32(S))                               FP32

Each row on its own. It is the distribution of all V tokens, never of those that top-k or top-p left: with truncation
the sampler's own probabilities are larger. Greedy requests (temperature 0) are scored at temperature 1.
Row t of the logits scores the token that follows it: ids[t] is the next token, and a sequence's first token has none.

Backward, dlogits FP32 [T, V], d the FP32 gradient of the row:
    p[v]       = fl(exp2_32(fl(fl(x[v] - m) * log2 e)) / S)
    dlogits[v] = fl(fl(d * fl([v = id] - p[v])) / t)
Each column on its own, given m and S.
Refused: temperature <= 0 or not finite, an id outside the vocabulary, a row with a NaN or +infinity, or without any
finite logit (-infinity alone stands for a token that cannot occur); shapes, dtypes, devices without a kernel.
"""

import math

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError, RowError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.embedding import check_ids
from minitransformer.ops.jit import jit
from minitransformer.ops.linear import round_bf16
from minitransformer.ops.rounding import LANES, LOG2E, exp2_32, lane_tree, log_32

SPEC = "logprob/1"
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)


@jit
def row_max(row, lanes):
    """Largest value of an FP32 row; NaN is passed over. lanes: scratch FP32 [128]."""
    # A maximum has no rounding, so its order is free; 128 lanes let it vectorise.
    lanes[:] = -_INF
    full = row.size // LANES * LANES
    for start in range(0, full, LANES):
        for l in range(LANES):
            lanes[l] = row[start + l] if row[start + l] > lanes[l] else lanes[l]
    top = -_INF
    for l in range(LANES):
        top = max(top, lanes[l])
    for v in range(full, row.size):
        top = row[v] if row[v] > top else top
    return top


@jit
def _row_sum(row, t, m, lanes):
    lanes[:] = _ZERO
    full = row.size // LANES * LANES
    for start in range(0, full, LANES):
        for l in range(LANES):
            lanes[l] += exp2_32((row[start + l] / t - m) * LOG2E)
    for l in range(row.size - full):
        lanes[l] += exp2_32((row[full + l] / t - m) * LOG2E)
    return lane_tree(lanes)


@jit
def _forward_cpu(begin, end, logits, ids, temperatures, out, max_sum):
    lanes = np.empty(LANES, np.float32)
    for i in range(begin, end):
        t = temperatures[i]
        # Division by t > 0 is monotone even after rounding: the largest quotient is the largest logit's.
        m = row_max(logits[i], lanes) / t
        S = _row_sum(logits[i], t, m, lanes)
        out[i] = (logits[i, ids[i]] / t - m) - log_32(S)
        max_sum[i, 0], max_sum[i, 1] = m, S


def check_temperature(temperature: float) -> None:
    """Raises InputError unless it is positive, in FP32 too, and finite."""
    if not (np.float32(temperature) > 0 and math.isfinite(temperature)):
        raise InputError(f"logprob: temperature {temperature} must be positive; score greedy requests at temperature 1")


def _each_row(temperature: float | Tensor, like_TV: Tensor) -> Tensor:
    """FP32 [T], where the logits are; a tensor is one a row already."""
    if isinstance(temperature, Tensor):
        return temperature
    return torch.full(like_TV.shape[:1], float(temperature), dtype=torch.float32, device=like_TV.device)


def forward(logits_TV: Tensor, ids_T: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """temperature: of all rows, or FP32 [T] -> (log-probs FP32 [T], the rows' m and S FP32 [T, 2])."""
    temperatures_T = _each_row(temperature, logits_TV)
    if logits_TV.is_cuda:
        return gpu.logprob.forward(logits_TV, ids_T, temperatures_T)
    cpu.on_cpu("logprob", logits_TV, ids_T)
    ids = check_ids("logprob", ids_T, logits_TV.shape[1])
    out, max_sum = torch.empty(ids.size, dtype=torch.float32), torch.empty(ids.size, 2, dtype=torch.float32)
    args = cpu.f32(logits_TV), ids, cpu.f32(temperatures_T), out.numpy(), max_sum.numpy()
    cpu.parallel(_forward_cpu, ids.size, *args)
    # An infinite maximum or a NaN anywhere in the row makes S NaN.
    bad = max_sum[:, 1].isnan() | max_sum[:, 0].isinf()
    if bad.any():
        raise RowError("logprob", bad.nonzero().flatten(), "the logits have a NaN or no finite maximum")
    return out, max_sum


@jit
def _backward_cpu(begin, end, dout, logits, ids, temperatures, max_sum, first, dlogits):
    for i in range(begin, end):
        m, S, d, t, token = max_sum[i, 0], max_sum[i, 1], dout[i], temperatures[i], ids[i] - first
        row, out = logits[i], dlogits[i]
        for v in range(row.size):
            p = exp2_32((row[v] / t - m) * LOG2E) / S
            out[v] = (d * (_ZERO - p)) / t
        if 0 <= token < row.size:
            p = exp2_32((row[token] / t - m) * LOG2E) / S
            out[token] = (d * (_ONE - p)) / t


def backward(
    dout_T: Tensor, logits_TV: Tensor, ids_T: Tensor, temperature: float | Tensor, max_sum_T2: Tensor,
    first: int = 0, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """d of the log-probs FP32 [T] -> dlogits FP32 [T, V], or rounded to BF16 as linear's backward would round them.

    The logits may be some columns of all: those of the vocabulary from id `first` on.
    """
    temperatures_T = _each_row(temperature, logits_TV)
    if dout_T.is_cuda:
        return gpu.logprob.backward(dout_T, logits_TV, ids_T, temperatures_T, max_sum_T2, first, dtype)
    dlogits = torch.empty(logits_TV.shape, dtype=torch.float32)
    args = cpu.f32(logits_TV), cpu.i64(ids_T), cpu.f32(temperatures_T), cpu.f32(max_sum_T2), first, dlogits.numpy()
    cpu.parallel(_backward_cpu, dlogits.shape[0], cpu.f32(dout_T), *args)
    return round_bf16(dlogits.numpy()) if dtype == torch.bfloat16 else dlogits


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, ids_T, temperature):
        out, max_sum = forward(logits_TV, ids_T, temperature)
        ctx.save_for_backward(logits_TV, ids_T, max_sum)
        ctx.temperature = temperature
        return out

    @staticmethod
    def backward(ctx, dout_T):
        logits_TV, ids_T, max_sum = ctx.saved_tensors
        return backward(dout_T, logits_TV, ids_T, ctx.temperature, max_sum), None, None


def logprob(logits_TV: Tensor, ids_T: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(ids[t]) under logits [T, V] FP32, ids [T] int64, at one temperature -> FP32 [T], in nats.

    Raises InputError on temperature <= 0 or an id outside the vocabulary, RowError on a NaN logit; ValueError,
    TypeError, UnsupportedDevice on shapes, dtypes, devices.
    """
    check_temperature(temperature)
    if logits_TV.dim() != 2 or ids_T.shape != logits_TV.shape[:1]:
        raise ValueError(f"logprob: logits {tuple(logits_TV.shape)}, ids {tuple(ids_T.shape)}; expected [T, V], [T]")
    return apply(_LogProb, logits_TV, ids_T, float(temperature))
