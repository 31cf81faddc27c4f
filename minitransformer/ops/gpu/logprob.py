"""logprob/1 on Hopper, forward and backward (ops/logprob.py has the spec). Nothing of the size [T, V] is written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.scalar import LANES, LOG2E, div, exp2_32, lane_tree, log_32


@triton.jit
def logprob_kernel(
    logits_ptr, ids_ptr, out_ptr, max_sum_ptr, faults_ptr, temperature, V,
    WIDE: tl.constexpr, UNROLL: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """One row a program: its maximum in wide tiles, then the lane sum in chunks of 128."""
    t = tl.program_id(0)
    row = logits_ptr + t.to(tl.int64) * V
    wide = tl.arange(0, WIDE)
    top = tl.full((WIDE,), float("-inf"), tl.float32)
    for v0 in range(0, V, WIDE):
        top = tl.maximum(top, tl.load(row + v0 + wide, mask=v0 + wide < V, other=float("-inf")))
    m = div(tl.max(top, 0), temperature)
    lane = tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((1, LANES), tl.float32)
    whole = V // (LANES * UNROLL) * (LANES * UNROLL)
    for v0 in range(0, whole, LANES * UNROLL):
        for u in tl.static_range(UNROLL):
            x = tl.load(row + v0 + u * LANES + lane)
            lanes += exp2_32((div(x, temperature) - m) * LOG2E)
    for v0 in range(whole, V, LANES):
        inside = v0 + lane < V
        x = tl.load(row + v0 + lane, mask=inside, other=0.0)
        lanes += tl.where(inside, exp2_32((div(x, temperature) - m) * LOG2E), 0.0)
    total = tl.sum(lane_tree(lanes, 1), 0)  # of one element
    token = tl.load(ids_ptr + t)
    outside = (token < 0) | (token >= V)
    x = tl.load(row + tl.where(outside, 0, token))
    tl.store(out_ptr + t, (div(x, temperature) - m) - log_32(total))
    tl.store(max_sum_ptr + 2 * t, m)
    tl.store(max_sum_ptr + 2 * t + 1, total)
    # A NaN passed over by the maximum, and a maximum that is not finite, leave a NaN in the sum.
    if outside | (total != total) | (tl.abs(m) == float("inf")):
        tl.atomic_min(faults_ptr + SLOT, t)


@triton.jit
def backward_kernel(dout_ptr, logits_ptr, ids_ptr, max_sum_ptr, dlogits_ptr, temperature, V, WIDE: tl.constexpr):
    t = tl.program_id(0)
    v = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    m, total = tl.load(max_sum_ptr + 2 * t), tl.load(max_sum_ptr + 2 * t + 1)
    at = t.to(tl.int64) * V + v
    x = tl.load(logits_ptr + at, mask=v < V, other=0.0)
    p = div(exp2_32((div(x, temperature) - m) * LOG2E), total)
    hit = tl.where(v == tl.load(ids_ptr + t), 1.0, 0.0)
    tl.store(dlogits_ptr + at, div(tl.load(dout_ptr + t) * (hit - p), temperature), mask=v < V)


def forward(logits_TV: Tensor, ids_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    home, (T, V) = logits_TV.device, logits_TV.shape
    (logits,) = device.take("logprob", home, torch.float32, logits_TV)
    (ids,) = device.take("logprob", home, torch.int64, ids_T)
    out, max_sum = torch.empty(T, device=home), torch.empty(T, 2, device=home)
    if T:
        with torch.cuda.device(home):
            logprob_kernel[(T,)](
                logits, ids, out, max_sum, device.faults(home), float(temperature), V, 2048, 8,
                device.slot("logprob"), num_warps=4, **device.ROWS,
            )  # fmt: skip
    device.check(home)  # log-probs go to the host next, so waiting costs nothing here
    return out, max_sum


def backward(dout_T: Tensor, logits_TV: Tensor, ids_T: Tensor, temperature: float, max_sum_T2: Tensor) -> Tensor:
    home, (T, V) = logits_TV.device, logits_TV.shape
    dout, logits, max_sum = device.take("logprob", home, torch.float32, dout_T, logits_TV, max_sum_T2)
    (ids,) = device.take("logprob", home, torch.int64, ids_T)
    dlogits = torch.empty_like(logits)
    if dlogits.numel():
        with torch.cuda.device(home):
            backward_kernel[(T, triton.cdiv(V, 1024))](
                dout, logits, ids, max_sum, dlogits, float(temperature), V, 1024, num_warps=4, **device.ROWS
            )
    return dlogits
