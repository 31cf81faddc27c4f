"""Execution spec router/1: softmax over all experts, top-k by raw logit, optional renormalisation.

    x[e]     = f32(logits[t, e])                                        BF16 logits; each row on its own
    p[e]     = exp2_32(fl(fl(x[e] - max x) * log2 e))                   FP32 (rounding.py)
    prob[e]  = fl(p[e] / lane_sum over E of p)                          IEEE divide
    ids      = the K largest x, descending; equal values (also -0 and +0): the lower expert id first
    weights  = prob[ids[k]], FP32; with norm_topk_prob
               fl(prob[ids[k]] / s), s = FP32 sum of prob[ids[k]] over k ascending (slot order)

Selection is by the logits, never by the probabilities, whose rounding would create ties. Weights stay FP32.

Backward, FP32, dw [T, K] FP32 -> dlogits [T, E], one rounding to BF16:
    c            = FP32 sum over k ascending of fl(w[k] * dw[k])
    dlogits[e]   = bf16(fl(w[k] * fl(dw[k] - c)))                       e selected in slot k
    dlogits[e]   = +0 with norm_topk_prob (the weights are a softmax over the selected alone),
                   bf16(-fl(prob[e] * c)) without                       e not selected
Refused: a logit that is not finite (the row is named), K outside 1 .. E, dtypes, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import RowError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import LOG2E, bf16_to_f32, exp2_32, f32_to_bf16, lane_sum

SPEC = "router/1"
_ZERO, _INF = np.float32(0), np.float32(np.inf)


@jit
def _softmax_row(logits, x, prob):
    """FP32 logits into x, probabilities into prob; False if a logit is not finite."""
    top = -_INF
    finite = True
    for e in range(x.size):
        x[e] = bf16_to_f32(logits[e])
        finite = finite and abs(x[e]) < _INF
        top = max(top, x[e])
    for e in range(x.size):
        prob[e] = exp2_32((x[e] - top) * LOG2E)
    total = lane_sum(prob)
    for e in range(x.size):
        prob[e] = prob[e] / total
    return finite


@jit
def _forward_cpu(begin, end, logits_TE, norm, weights_TK, ids_TK, bad_T):
    E, K = logits_TE.shape[1], ids_TK.shape[1]
    x, prob = np.empty(E, np.float32), np.empty(E, np.float32)
    for t in range(begin, end):
        bad_T[t] = not _softmax_row(logits_TE[t], x, prob)
        if bad_T[t]:
            continue
        total = _ZERO
        for k in range(K):
            best = 0
            for e in range(1, E):
                # Strictly greater: of equal values the lower id stays.
                best = e if x[e] > x[best] else best
            x[best] = -_INF
            ids_TK[t, k] = best
            weights_TK[t, k] = prob[best]
            total += prob[best]  # fl, slot order
        if norm:
            for k in range(K):
                weights_TK[t, k] = weights_TK[t, k] / total


def forward(logits_TE: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """BF16 [T, E] -> weights FP32 [T, K], expert ids int64 [T, K]."""
    if logits_TE.is_cuda:
        return gpu.router.forward(logits_TE, top_k, norm_topk_prob)
    cpu.on_cpu("router", logits_TE)
    T = logits_TE.shape[0]
    weights, ids = torch.empty(T, top_k, dtype=torch.float32), torch.empty(T, top_k, dtype=torch.int64)
    bad = np.zeros(T, np.bool_)
    cpu.parallel(_forward_cpu, T, cpu.bf16_bits(logits_TE), norm_topk_prob, weights.numpy(), ids.numpy(), bad, grain=8)
    if bad.any():
        raise RowError("router", np.flatnonzero(bad), "a logit is NaN or infinite; check the weights")
    return weights, ids


@jit
def _backward_cpu(begin, end, dw_TK, logits_TE, norm, weights_TK, ids_TK, out_TE):
    E, K = logits_TE.shape[1], ids_TK.shape[1]
    x, prob = np.empty(E, np.float32), np.empty(E, np.float32)
    for t in range(begin, end):
        c = _ZERO
        for k in range(K):
            c += weights_TK[t, k] * dw_TK[t, k]  # fl product, fl sum, slot order
        if norm:
            out_TE[t, :] = np.uint16(0)
        else:
            _softmax_row(logits_TE[t], x, prob)
            for e in range(E):
                out_TE[t, e] = f32_to_bf16(-(prob[e] * c))
        for k in range(K):
            out_TE[t, ids_TK[t, k]] = f32_to_bf16(weights_TK[t, k] * (dw_TK[t, k] - c))


def backward(dw_TK: Tensor, logits_TE: Tensor, norm_topk_prob: bool, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """dweights FP32 [T, K] with what forward took and gave -> dlogits BF16 [T, E]."""
    if dw_TK.is_cuda:
        return gpu.router.backward(dw_TK, logits_TE, norm_topk_prob, weights_TK, ids_TK)
    out = torch.empty(logits_TE.shape, dtype=torch.bfloat16)
    args = cpu.f32(dw_TK), cpu.bf16_bits(logits_TE), norm_topk_prob, cpu.f32(weights_TK), cpu.i64(ids_TK)
    cpu.parallel(_backward_cpu, out.shape[0], *args, cpu.bf16_bits(out), grain=8)
    return out


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, top_k, norm_topk_prob):
        weights_TK, ids_TK = forward(logits_TE, top_k, norm_topk_prob)
        ctx.save_for_backward(logits_TE, weights_TK, ids_TK)
        ctx.norm_topk_prob = norm_topk_prob
        ctx.mark_non_differentiable(ids_TK)
        return weights_TK, ids_TK

    @staticmethod
    def backward(ctx, dw_TK, _):
        logits_TE, weights_TK, ids_TK = ctx.saved_tensors
        return backward(dw_TK, logits_TE, ctx.norm_topk_prob, weights_TK, ids_TK), None, None


def router(logits_TE: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Router logits BF16 [..., E] -> (weights FP32 [..., K], expert ids int64 [..., K]), largest logit first.

    Raises RowError when a logit is not finite (rows counted over the leading dimensions), ValueError when top_k is
    outside 1 .. E, TypeError on another dtype, UnsupportedDevice off the CPU.
    """
    E = logits_TE.shape[-1]
    if not 1 <= top_k <= E:
        raise ValueError(f"router: top_k = {top_k} must be between 1 and the number of experts, {E}")
    weights, ids = apply(_Router, logits_TE.reshape(-1, E), top_k, bool(norm_topk_prob))
    return weights.view(*logits_TE.shape[:-1], top_k), ids.view(*logits_TE.shape[:-1], top_k)
