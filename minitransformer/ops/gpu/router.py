"""router/1 on Hopper, forward and backward (ops/router.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LANES, LOG2E, div, exp2_32, lane_tree
from minitransformer.ops.gpu.tiles import in_turn, to_bf16


@triton.jit
def _max_and_sum(logits_ptr, row, valid, E: tl.constexpr, ROWS: tl.constexpr):
    """Largest logit [ROWS, 1], lane sum of the exponentials [ROWS, 1], and whether each row is finite [ROWS]."""
    lane = tl.arange(0, LANES)[None, :]
    best = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    odd = tl.zeros((ROWS, LANES), tl.int32)
    for e0 in tl.static_range(0, E, LANES):
        inside = valid & (e0 + lane < E)
        x = tl.load(logits_ptr + row * E + e0 + lane, mask=inside, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.where(inside, x, float("-inf")))
        odd |= (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
    top = tl.max(best, 1)[:, None]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for e0 in tl.static_range(0, E, LANES):
        inside = valid & (e0 + lane < E)
        x = tl.load(logits_ptr + row * E + e0 + lane, mask=inside, other=0.0).to(tl.float32)
        lanes += tl.where(inside, exp2_32((x - top) * LOG2E), 0.0)
    return top, lane_tree(lanes, ROWS)[:, None], tl.max(odd, 1) == 0


@quick
@triton.jit(do_not_specialize=["T"])
def router_kernel(
    logits_ptr, weights_ptr, ids_ptr, faults_ptr, T, E: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """logits [T, E] BF16 -> weights [T, K] FP32, ids [T, K] int64. EXPERTS, SLOTS: powers of two that hold E, K."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, valid = row[:, None], (row < T)[:, None]
    top, total, finite = _max_and_sum(logits_ptr, t, valid, E, ROWS)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), row.to(tl.int32), mask=(row < T) & ~finite, sem="relaxed")
    e, k = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    x = tl.load(logits_ptr + t * E + e, mask=valid & (e < E), other=float("-inf")).to(tl.float32)
    # One integer ascends as (value, lower id first), with -0 equal to +0: the upper half of an FP32 that holds a BF16.
    u = (x + 0.0).to(tl.int32, bitcast=True)
    key = (tl.where(u < 0, u ^ 0x7FFFFFFF, u) & -65536) | (65535 - e)
    best = tl.zeros((ROWS, SLOTS), tl.int32)
    for slot in tl.static_range(K):
        top_key = tl.max(key, 1)[:, None]
        best = tl.where(k == slot, top_key, best)
        key = tl.where(key == top_key, -2147483648, key)
    # A row with a NaN is refused; here its ids only stay in range.
    ids = tl.minimum(65535 - (best & 65535), E - 1)
    high = best & -65536
    value = tl.where(high < 0, (high | 65535) ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    weights = div(exp2_32((value - top) * LOG2E), total)
    if NORM:
        sum_k = tl.zeros((ROWS, 1), tl.float32)
        for slot in tl.static_range(K):
            sum_k = sum_k + tl.max(tl.where(k == slot, weights, 0.0), 1)[:, None]
        weights = div(weights, sum_k)
    tl.store(weights_ptr + t * K + k, weights, mask=valid & (k < K))
    tl.store(ids_ptr + t * K + k, ids.to(tl.int64), mask=valid & (k < K))


@quick
@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    dw_ptr, logits_ptr, weights_ptr, ids_ptr, out_ptr, T, E: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, valid, lane = row[:, None], (row < T)[:, None], tl.arange(0, LANES)[None, :]
    c = tl.zeros((ROWS, 1), tl.float32)
    for k in tl.static_range(K):
        w, dw = (tl.load(weights_ptr + t * K + k, mask=valid, other=0.0),
                 tl.load(dw_ptr + t * K + k, mask=valid, other=0.0))  # fmt: skip
        c = c + w * dw
    top, total = c, c
    if not NORM:
        top, total, _ = _max_and_sum(logits_ptr, t, valid, E, ROWS)
    for e0 in tl.static_range(0, E, LANES):
        e = e0 + lane
        inside = valid & (e < E)
        out = tl.zeros((ROWS, LANES), tl.float32)
        if not NORM:
            x = tl.load(logits_ptr + t * E + e, mask=inside, other=0.0).to(tl.float32)
            out = (div(exp2_32((x - top) * LOG2E), total) * c) * -1.0  # Triton negates as 0 - x, which loses -0
        for k in tl.static_range(K):
            w = tl.load(weights_ptr + t * K + k, mask=valid, other=0.0)
            dw = tl.load(dw_ptr + t * K + k, mask=valid, other=0.0)
            out = tl.where(tl.load(ids_ptr + t * K + k, mask=valid, other=-1) == e, w * (dw - c), out)
        tl.store(out_ptr + t * E + e, to_bf16(out), mask=inside)


ROWS = 4


def forward(logits_TE: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    home, (T, E) = logits_TE.device, logits_TE.shape
    (logits,) = device.take("router", home, torch.bfloat16, logits_TE)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=home)
    ids = torch.empty(T, top_k, dtype=torch.int64, device=home)
    if T:
        with on(home):
            router_kernel[(cdiv(T, ROWS),)](
                logits, weights, ids, device.faults(home), T, E, top_k, norm_topk_prob, next_power_of_2(E),
                next_power_of_2(top_k), ROWS, device.slot("router"), num_warps=4, **device.ROWS, **device.EARLY,
            )  # fmt: skip
    return weights, ids


def backward(dw_TK: Tensor, logits_TE: Tensor, norm_topk_prob: bool, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    home, (T, E) = logits_TE.device, logits_TE.shape
    (logits,) = device.take("router", home, torch.bfloat16, logits_TE)
    dw, weights = device.take("router", home, torch.float32, dw_TK, weights_TK)
    (ids,) = device.take("router", home, torch.int64, ids_TK)
    out = torch.empty_like(logits)
    if T:
        with on(home):
            backward_kernel[(cdiv(T, ROWS),)](
                dw, logits, weights, ids, out, T, E, ids.shape[1], norm_topk_prob, ROWS, num_warps=4, **device.ROWS
            )
    return out
