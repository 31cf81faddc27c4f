"""logprob/1 on Hopper, forward and backward (ops/logprob.py has the spec). Nothing of the size [T, V] is written.

The spec adds the elements of a lane one after another, so a row's sum is a chain of V / 128 additions that no number
of programs can shorten; the maximum has no order and is taken by many programs first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LANES, LOG2E, div, exp2_32, lane_tree, log_32


@quick
@triton.jit(do_not_specialize=["V"])
def max_kernel(logits_ptr, tops_ptr, V, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Program (block, row): the largest of BLOCK logits, tops FP32 [T, blocks]. A NaN is passed over."""
    block, row, wide = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, WIDE)
    top = tl.full((WIDE,), float("-inf"), tl.float32)
    for v0 in tl.static_range(0, BLOCK, WIDE):
        v = block * BLOCK + v0 + wide
        top = tl.maximum(top, tl.load(logits_ptr + row * V + v, mask=v < V, other=float("-inf")))
    tl.store(tops_ptr + row * tl.num_programs(0) + block, tl.max(top, 0))


@triton.jit
def _terms(row, v, temperature, m, UNIT: tl.constexpr):
    x = tl.load(row + v)
    if not UNIT:  # x / 1 is x
        x = div(x, temperature)
    return exp2_32((x - m) * LOG2E)


@triton.jit
def _lane_sums(row, temperature, m, V, UNROLL: tl.constexpr, UNIT: tl.constexpr):
    lane = tl.arange(0, LANES)
    lanes = tl.zeros((LANES,), tl.float32)
    whole = V // (LANES * UNROLL) * (LANES * UNROLL)
    for v0 in tl.range(0, whole, LANES * UNROLL, num_stages=4):  # copies run ahead of the sums
        for u in tl.static_range(UNROLL):
            lanes += _terms(row, v0 + u * LANES + lane, temperature, m, UNIT)
    for v0 in range(whole, V, LANES):
        v = v0 + lane
        lanes += tl.where(v < V, _terms(row, tl.where(v < V, v, 0), temperature, m, UNIT), 0.0)
    return lanes


@quick
@triton.jit(do_not_specialize=["V", "blocks"])
def sum_kernel(
    logits_ptr, ids_ptr, temperatures_ptr, tops_ptr, out_ptr, max_sum_ptr, faults_ptr, V, blocks,
    PADDED: tl.constexpr, UNROLL: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """One row a program, a lane a thread. SLOT < 0: what the spec refuses is not flagged."""
    t, i = tl.program_id(0), tl.arange(0, PADDED)
    row, temperature = logits_ptr + t.to(tl.int64) * V, tl.load(temperatures_ptr + t)
    tops = tl.load(tops_ptr + t * blocks + i, mask=i < blocks, other=float("-inf"))
    m = div(tl.max(tops, 0), temperature)
    if temperature == 1.0:
        lanes = _lane_sums(row, temperature, m, V, UNROLL, True)
    else:
        lanes = _lane_sums(row, temperature, m, V, UNROLL, False)
    total = tl.sum(lane_tree(tl.reshape(lanes, (1, LANES)), 1), 0)  # of one element
    token = tl.load(ids_ptr + t)
    outside = (token < 0) | (token >= V)
    x = tl.load(row + tl.where(outside, 0, token))
    tl.store(out_ptr + t, (div(x, temperature) - m) - log_32(total))
    tl.store(max_sum_ptr + 2 * t, m)
    tl.store(max_sum_ptr + 2 * t + 1, total)
    if SLOT >= 0:
        # A NaN passed over by the maximum, and a maximum that is not finite, leave a NaN in the sum.
        if outside | (total != total) | (tl.abs(m) == float("inf")):
            tl.atomic_min(faults_ptr + SLOT, t, sem="relaxed")


@quick
@triton.jit
def backward_kernel(
    dout_ptr, logits_ptr, ids_ptr, temperatures_ptr, max_sum_ptr, dlogits_ptr, first, V, WIDE: tl.constexpr
):
    """V columns of the vocabulary, from `first` on; dlogits FP32, or rounded to BF16."""
    t = tl.program_id(0)
    v = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    m, total = tl.load(max_sum_ptr + 2 * t), tl.load(max_sum_ptr + 2 * t + 1)
    temperature = tl.load(temperatures_ptr + t)
    at = t.to(tl.int64) * V + v
    x = tl.load(logits_ptr + at, mask=v < V, other=0.0)
    p = div(exp2_32((div(x, temperature) - m) * LOG2E), total)
    hit = tl.where(v + first == tl.load(ids_ptr + t), 1.0, 0.0)
    d = div(tl.load(dout_ptr + t) * (hit - p), temperature)
    tl.store(dlogits_ptr + at, d.to(dlogits_ptr.dtype.element_ty), mask=v < V)


BLOCK, WIDE, UNROLL = 8192, 2048, 16


def of_rows(
    logits: Tensor, ids: Tensor, temperatures: Tensor, tops: Tensor | None = None, where: int = -1
) -> tuple[Tensor, Tensor]:
    """forward for contiguous operands and a temperature a row, FP32 [T]. tops: maxima of blocks of the logits."""
    home, (T, V) = logits.device, logits.shape
    out, max_sum = (torch.empty(shape, dtype=torch.float32, device=home) for shape in ((T,), (T, 2)))
    with on(home):
        if tops is None:
            tops = torch.empty(T, cdiv(V, BLOCK), dtype=torch.float32, device=home)
            # Rows lie on the second axis of the grid, which ends at 65,535.
            for begin in range(0, T, 65535):
                some = slice(begin, begin + 65535)
                grid = tops.shape[1], logits[some].shape[0]
                max_kernel[grid](logits[some], tops[some], V, BLOCK, WIDE, num_warps=4, **device.ROWS)
        sum_kernel[(T,)](
            logits, ids, temperatures, tops, out, max_sum, device.faults(home), V, tops.shape[1],
            next_power_of_2(tops.shape[1]), UNROLL, where, num_warps=4, **device.ROWS,
        )  # fmt: skip
    return out, max_sum


def forward(logits_TV: Tensor, ids_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    home, T = logits_TV.device, logits_TV.shape[0]
    logits, temperatures = device.take("logprob", home, torch.float32, logits_TV, temperatures_T)
    (ids,) = device.take("logprob", home, torch.int64, ids_T)
    if T:
        out, max_sum = of_rows(logits, ids, temperatures, where=device.slot("logprob"))
    else:
        out, max_sum = (torch.empty(shape, dtype=torch.float32, device=home) for shape in ((0,), (0, 2)))
    device.check(home)  # log-probs go to the host next, so waiting costs nothing here
    return out, max_sum


def backward(
    dout_T: Tensor, logits_TV: Tensor, ids_T: Tensor, temperatures_T: Tensor, max_sum_T2: Tensor, first: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    home, (T, V) = logits_TV.device, logits_TV.shape
    floats = dout_T, logits_TV, temperatures_T, max_sum_T2
    dout, logits, temperatures, max_sum = device.take("logprob", home, torch.float32, *floats)
    (ids,) = device.take("logprob", home, torch.int64, ids_T)
    dlogits = torch.empty_like(logits, dtype=dtype)
    if dlogits.numel():
        with on(home):
            backward_kernel[(T, cdiv(V, 1024))](
                dout, logits, ids, temperatures, max_sum, dlogits, first, V, 1024, num_warps=4, **device.ROWS
            )
    return dlogits
