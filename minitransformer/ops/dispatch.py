"""Execution spec dispatch/1: routed tokens to expert order and back.

    plan     sorts the R = T * K flat slots t * K + k by expert, then token, then slot (a stable counting sort)
    gather   x_R[r] = x_T[order[r] // K]                     row copy, no arithmetic
    combine  y_T[t] = bf16(sum over k ascending of y_R[rows[t, k]])
             FP32, starting from +0, one addition a slot in slot order, one rounding at the end

    gather_amax             gather, and amax_R[r] = max over d of |x_R[r, d]|, as the row is copied; NaN: 0x7fc00000
    combine_weighted  y_T[t] = bf16(acc), acc = fma(w[t, k], y_R[rows[t, k]], acc) over k ascending, from +0, FP32

BF16 experts: the routing weights are applied in grouped_linear (down), once. NVFP4 experts: in combine_weighted, once.
The order of a sum is that of the slots, not of the experts' rows, so it depends on no other token and not on T.

Backward: gather's is combine's sum (slot order, FP32, one rounding); combine's is gather; combine_weighted's is
    dy_R[r] = bf16(fl(dy_T[t] * w[t, k])), dw[t, k] = lane sum over d of fl(dy_T[t, d] * y_R[r, d]), r = rows[t, k]
Refused: an expert id outside 0 .. E - 1, shapes that do not fit the plan, dtypes, devices without a kernel.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import bf16_to_f32, f32_to_bf16, fma32, lane_sum

SPEC = "dispatch/1"


@dataclass(frozen=True)
class Plan:
    """Where each routed row goes.

    order_R   int64 [R]: flat slot t * K + k of row r in dispatch order
    rows_TK   int64 [T, K]: row of each slot (the inverse)
    bounds_E1 int64 [E + 1]: expert e owns rows bounds[e] .. bounds[e + 1]
    """

    order_R: Tensor
    rows_TK: Tensor
    bounds_E1: Tensor

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The bounds on the host; on a GPU this waits for it, so no kernel's launch asks."""
        return tuple(self.bounds_E1.tolist())

    @property
    def num_rows(self) -> int:
        return self.order_R.shape[0]

    @property
    def num_experts(self) -> int:
        return self.bounds_E1.shape[0] - 1

    def to(self, device: torch.device | str) -> "Plan":
        return Plan(self.order_R.to(device), self.rows_TK.to(device), self.bounds_E1.to(device))


@jit
def _counting_sort(ids_R, offsets, order_R, rows_R):
    # Slots are visited in ascending order, so rows of one expert stay sorted by token, then slot.
    for r in range(ids_R.size):
        offsets[ids_R[r] + 1] += 1
    for e in range(offsets.size - 1):
        offsets[e + 1] += offsets[e]
    place = offsets[:-1].copy()
    for r in range(ids_R.size):
        row = place[ids_R[r]]
        place[ids_R[r]] = row + 1
        order_R[row] = r
        rows_R[r] = row


def plan(expert_ids_TK: Tensor, num_experts: int) -> Plan:
    """Dispatch plan of expert ids int64 [T, K], each in 0 .. num_experts - 1 (InputError otherwise)."""
    if expert_ids_TK.is_cuda:
        return Plan(*gpu.dispatch.plan(expert_ids_TK, num_experts))
    cpu.on_cpu("dispatch.plan", expert_ids_TK)
    ids = cpu.i64(expert_ids_TK)
    if ids.ndim != 2:
        raise ValueError(f"dispatch.plan: expert ids are {ids.shape}, expected [T, K]")
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        t, k = np.argwhere((ids < 0) | (ids >= num_experts))[0]
        raise InputError(f"dispatch.plan: expert id {ids[t, k]} of token {t}, slot {k} is outside 0..{num_experts - 1}")
    offsets = np.zeros(num_experts + 1, np.int64)
    order, rows = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    _counting_sort(ids.reshape(-1), offsets, order, rows)
    return Plan(torch.from_numpy(order), torch.from_numpy(rows).view(ids.shape), torch.from_numpy(offsets))


@jit
def _sum_slots(begin, end, y_RD, rows_TK, out_TD):
    acc = np.empty(y_RD.shape[1], np.float32)
    for t in range(begin, end):
        acc[:] = np.float32(0)
        for k in range(rows_TK.shape[1]):
            row = y_RD[rows_TK[t, k]]
            for d in range(acc.size):
                acc[d] += bf16_to_f32(row[d])  # fl, slot order
        for d in range(acc.size):
            out_TD[t, d] = f32_to_bf16(acc[d])  # the one rounding to BF16


@jit
def _gather_amax(begin, end, x_TD, order_R, slots, out_RD, amax_R):
    for r in range(begin, end):
        source, row, top = x_TD[order_R[r] // slots], out_RD[r], np.uint16(0)
        for d in range(row.size):
            row[d] = source[d]
            top = max(top, np.uint16(source[d] & np.uint16(0x7FFF)))  # |x| orders as its bits do, NaN above all
        amax_R[r] = bf16_to_f32(np.uint16(0x7FC0) if top > np.uint16(0x7F80) else top)  # one NaN for all


@jit
def _weigh_slots(begin, end, y_RD, rows_TK, weights_TK, out_TD):
    acc = np.empty(y_RD.shape[1], np.float32)
    for t in range(begin, end):
        acc[:] = np.float32(0)
        for k in range(rows_TK.shape[1]):
            row, w = y_RD[rows_TK[t, k]], weights_TK[t, k]
            for d in range(acc.size):
                acc[d] = fma32(w, bf16_to_f32(row[d]), acc[d])  # one rounding a slot, slot order
        for d in range(acc.size):
            out_TD[t, d] = f32_to_bf16(acc[d])


@jit
def _weigh_backward(begin, end, dy_TD, y_RD, rows_TK, weights_TK, dy_RD, dw_TK):
    terms = np.empty(y_RD.shape[1], np.float32)
    for t in range(begin, end):
        for k in range(rows_TK.shape[1]):
            row, w = rows_TK[t, k], weights_TK[t, k]
            for d in range(terms.size):
                dy = bf16_to_f32(dy_TD[t, d])
                dy_RD[row, d] = f32_to_bf16(dy * w)
                terms[d] = dy * bf16_to_f32(y_RD[row, d])
            dw_TK[t, k] = lane_sum(terms)


def gather_forward(x_TD: Tensor, plan: Plan) -> Tensor:
    """x [T, D] BF16 -> [R, D], rows copied into dispatch order."""
    if x_TD.is_cuda:
        return gpu.dispatch.gather(x_TD, plan)
    cpu.on_cpu("dispatch.gather", x_TD)
    return x_TD.detach().index_select(0, plan.order_R // plan.rows_TK.shape[1])


def combine_forward(y_RD: Tensor, plan: Plan) -> Tensor:
    """y [R, D] BF16 -> [T, D] BF16: FP32 sum over the slots in slot order, one rounding."""
    if y_RD.is_cuda:
        return gpu.dispatch.combine(y_RD, plan)
    cpu.on_cpu("dispatch.combine", y_RD)
    rows = cpu.i64(plan.rows_TK)
    out = torch.empty(rows.shape[0], y_RD.shape[1], dtype=torch.bfloat16)
    cpu.parallel(_sum_slots, rows.shape[0], cpu.bf16_bits(y_RD), rows, cpu.bf16_bits(out), grain=16)
    return out


def gather_amax_forward(x_TD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """x [T, D] BF16 -> (rows in dispatch order [R, D] BF16, their largest magnitudes FP32 [R])."""
    if x_TD.is_cuda:
        return gpu.dispatch.gather_amax(x_TD, plan)
    cpu.on_cpu("dispatch.gather_amax", x_TD)
    order = cpu.i64(plan.order_R)
    out = torch.empty(order.size, x_TD.shape[1], dtype=torch.bfloat16)
    amax = torch.empty(order.size, dtype=torch.float32)
    args = cpu.bf16_bits(x_TD), order, plan.rows_TK.shape[1], cpu.bf16_bits(out), amax.numpy()
    cpu.parallel(_gather_amax, order.size, *args, grain=16)
    return out, amax


def combine_weighted_forward(y_RD: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
    """y [R, D] BF16, routing weights [T, K] FP32 -> [T, D] BF16 by FMA in slot order."""
    if y_RD.is_cuda:
        return gpu.dispatch.combine(y_RD, plan, weights_TK)
    cpu.on_cpu("dispatch.combine_weighted", y_RD, weights_TK)
    rows = cpu.i64(plan.rows_TK)
    out = torch.empty(rows.shape[0], y_RD.shape[1], dtype=torch.bfloat16)
    args = cpu.bf16_bits(y_RD), rows, cpu.f32(weights_TK), cpu.bf16_bits(out)
    cpu.parallel(_weigh_slots, rows.shape[0], *args, grain=16)
    return out


def combine_weighted_backward(dy_TD: Tensor, y_RD: Tensor, plan: Plan, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """dY [T, D] BF16 -> (dy_R [R, D] BF16, dweights [T, K] FP32)."""
    if dy_TD.is_cuda:
        return gpu.dispatch.combine_weighted_backward(dy_TD, y_RD, plan, weights_TK)
    dy_RD, dw_TK = torch.empty(y_RD.shape, dtype=torch.bfloat16), torch.empty(weights_TK.shape, dtype=torch.float32)
    rows, weights = cpu.i64(plan.rows_TK), cpu.f32(weights_TK)
    args = cpu.bf16_bits(dy_TD), cpu.bf16_bits(y_RD), rows, weights, cpu.bf16_bits(dy_RD), dw_TK.numpy()
    cpu.parallel(_weigh_backward, rows.shape[0], *args, grain=16)
    return dy_RD, dw_TK


class _GatherAmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, plan):
        ctx.plan = plan
        x_RD, amax_R = gather_amax_forward(x_TD, plan)
        ctx.mark_non_differentiable(amax_R)
        return x_RD, amax_R

    @staticmethod
    def backward(ctx, dx_RD, _):
        return combine_forward(dx_RD, ctx.plan), None


class _CombineWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, plan, weights_TK):
        ctx.plan = plan
        ctx.save_for_backward(y_RD, weights_TK)
        return combine_weighted_forward(y_RD, plan, weights_TK)

    @staticmethod
    def backward(ctx, dy_TD):
        y_RD, weights_TK = ctx.saved_tensors
        dy_RD, dw_TK = combine_weighted_backward(dy_TD, y_RD, ctx.plan, weights_TK)
        return dy_RD, None, dw_TK


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, plan):
        ctx.plan = plan
        return gather_forward(x_TD, plan)

    @staticmethod
    def backward(ctx, dx_RD):
        return combine_forward(dx_RD, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, plan):
        ctx.plan = plan
        return combine_forward(y_RD, plan)

    @staticmethod
    def backward(ctx, dy_TD):
        return gather_forward(dy_TD, ctx.plan), None


def gather(x_TD: Tensor, plan: Plan) -> Tensor:
    """x [T, D] BF16 -> [R, D] BF16 in dispatch order. ValueError on shapes, TypeError on dtypes."""
    if x_TD.dim() != 2 or x_TD.shape[0] != plan.rows_TK.shape[0]:
        raise ValueError(f"dispatch.gather: x is {tuple(x_TD.shape)}, the plan has {plan.rows_TK.shape[0]} tokens")
    if x_TD.dtype != torch.bfloat16:
        raise TypeError(f"dispatch.gather: x is {x_TD.dtype}, expected BF16")
    return apply(_Gather, x_TD, plan)


def combine(y_RD: Tensor, plan: Plan) -> Tensor:
    """y [R, D] BF16 in dispatch order -> [T, D] BF16. ValueError on shapes, TypeError on dtypes."""
    if y_RD.dim() != 2 or y_RD.shape[0] != plan.num_rows:
        raise ValueError(f"dispatch.combine: y is {tuple(y_RD.shape)}, the plan has {plan.num_rows} rows")
    return apply(_Combine, y_RD, plan)


def gather_amax(x_TD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """x [T, D] BF16 -> (x_R [R, D] BF16 in dispatch order, row maxima FP32 [R] without a second pass). As gather."""
    if x_TD.dim() != 2 or x_TD.shape[0] != plan.rows_TK.shape[0]:
        raise ValueError(f"dispatch.gather_amax: x is {tuple(x_TD.shape)}, the plan has {plan.rows_TK.shape[0]} tokens")
    return apply(_GatherAmax, x_TD, plan)


def combine_weighted(y_RD: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
    """y [R, D] BF16 in dispatch order, weights [T, K] FP32 -> [T, D] BF16. ValueError, TypeError as combine."""
    if y_RD.dim() != 2 or y_RD.shape[0] != plan.num_rows or weights_TK.shape != plan.rows_TK.shape:
        raise ValueError(
            f"dispatch.combine_weighted: y is {tuple(y_RD.shape)}, weights {tuple(weights_TK.shape)}; the plan has "
            f"{plan.num_rows} rows of {tuple(plan.rows_TK.shape)} slots"
        )
    return apply(_CombineWeighted, y_RD, plan, weights_TK)


def slots(y_R: Tensor, plan: Plan) -> Tensor:
    """Rows in dispatch order [R, ...] -> [T, K, ...], as traces keep them (no autograd)."""
    return y_R.detach()[plan.rows_TK]
