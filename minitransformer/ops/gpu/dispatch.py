"""dispatch/1 on Hopper: the plan without a copy to the host, gather, combine and their gradients (ops/dispatch.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.copy import copy, copy_amax_kernel, tile
from minitransformer.ops.gpu.scalar import LANES, lane_tree
from minitransformer.ops.gpu.tiles import to_bf16


@triton.jit(do_not_specialize=["R", "E"])
def plan_kernel(
    ids_ptr, order_ptr, rows_ptr, bounds_ptr, faults_ptr, R, E, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Program e places expert e's slots, which it finds by reading all of them: integers alone, so no order matters."""
    e = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for r0 in range(0, R, BLOCK):
        ids = tl.load(ids_ptr + r0 + r, mask=r0 + r < R, other=E)
        lower += ((ids < e) & (r0 + r < R)).to(tl.int32)
        if e == 0:
            bad = ((ids < 0) | (ids >= E)) & (r0 + r < R)
            tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(r), (r0 + r) // SLOTS, mask=bad, sem="relaxed")
    begin = tl.sum(lower, 0)
    tl.store(bounds_ptr + e, begin.to(tl.int64))
    if e == E - 1:
        tl.store(bounds_ptr + E, R.to(tl.int64))
    for r0 in range(0, R, BLOCK):
        mine = (tl.load(ids_ptr + r0 + r, mask=r0 + r < R, other=E) == e) & (r0 + r < R)
        place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, (r0 + r).to(tl.int64), mask=mine)
        tl.store(rows_ptr + r0 + r, place.to(tl.int64), mask=mine)
        begin += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y_ptr, rows_ptr, weights_ptr, out_ptr, T, D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (t < T)[:, None] & (d < D)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows_ptr + t * K + k, mask=t < T, other=0)[:, None]
        y = tl.load(y_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            w = tl.load(weights_ptr + t * K + k, mask=t < T, other=0.0)[:, None]
            acc = tl.fma(tl.broadcast_to(w, (ROWS, COLUMNS)), y, acc)
        else:
            acc += y
    tl.store(out_ptr + t[:, None] * D + d, to_bf16(acc), mask=inside)


@triton.jit(do_not_specialize=["R"])
def weigh_backward_kernel(
    dy_ptr, y_ptr, rows_ptr, weights_ptr, dyr_ptr, dw_ptr, R, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr
):
    """ROWS flat slots t * K + k a program."""
    s = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane, valid = tl.arange(0, LANES)[None, :], (s < R)[:, None]
    row = tl.load(rows_ptr + s, mask=s < R, other=0)[:, None]
    w = tl.load(weights_ptr + s, mask=s < R, other=0.0)[:, None]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for d0 in tl.static_range(0, D, LANES):
        inside = valid & (d0 + lane < D)
        dy = tl.load(dy_ptr + (s // K)[:, None] * D + d0 + lane, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * D + d0 + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(dyr_ptr + row * D + d0 + lane, to_bf16(dy * w), mask=inside)
        lanes = tl.where(inside, lanes + dy * y, lanes)
    tl.store(dw_ptr + s, lane_tree(lanes, ROWS), mask=s < R)


def plan(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> (order [R], rows [T, K], bounds [E + 1]) int64."""
    if expert_ids_TK.dim() != 2:
        raise ValueError(f"dispatch.plan: expert ids are {tuple(expert_ids_TK.shape)}, expected [T, K]")
    home = expert_ids_TK.device
    (ids,) = device.take("dispatch.plan", home, torch.int64, expert_ids_TK)
    # Zeros, so that a slot whose expert does not exist still names a row.
    order, rows = torch.zeros(ids.numel(), dtype=torch.int64, device=home), torch.zeros_like(ids)
    bounds = torch.empty(num_experts + 1, dtype=torch.int64, device=home)
    block = min(2048, max(128, triton.next_power_of_2(ids.numel())))
    with torch.cuda.device(home):
        plan_kernel[(num_experts,)](
            ids, order, rows, bounds, device.faults(home), ids.numel(), num_experts, max(1, ids.shape[1]), block,
            device.slot("dispatch.plan"), num_warps=4, **device.ROWS,
        )  # fmt: skip
    return order, rows, bounds


def gather(x_TD: Tensor, plan) -> Tensor:
    home = x_TD.device
    (x,) = device.take("dispatch.gather", home, torch.bfloat16, x_TD)
    (order,) = device.take("dispatch.gather", home, torch.int64, plan.order_R)
    out = torch.empty(order.shape[0], x.shape[1], dtype=torch.bfloat16, device=home)
    copy("dispatch.gather", x, order, out, x.shape[0], plan.rows_TK.shape[1])
    return out


def gather_amax(x_TD: Tensor, plan) -> tuple[Tensor, Tensor]:
    home, D = x_TD.device, x_TD.shape[1]
    (x,) = device.take("dispatch.gather_amax", home, torch.bfloat16, x_TD)
    (order,) = device.take("dispatch.gather_amax", home, torch.int64, plan.order_R)
    out = torch.empty(order.shape[0], D, dtype=torch.bfloat16, device=home)
    amax, (rows, columns) = torch.zeros(order.shape[0], device=home), tile(D)
    if out.numel():
        with torch.cuda.device(home):
            copy_amax_kernel[(triton.cdiv(order.shape[0], rows),)](
                x, order, out, amax, order.shape[0], D, plan.rows_TK.shape[1], rows, columns,
                num_warps=4, **device.ROWS,
            )  # fmt: skip
    return out, amax


def combine(y_RD: Tensor, plan, weights_TK: Tensor | None = None) -> Tensor:
    """With weights: dispatch.combine_weighted."""
    home, (T, K), D = y_RD.device, plan.rows_TK.shape, y_RD.shape[1]
    (y,) = device.take("dispatch.combine", home, torch.bfloat16, y_RD)
    (rows,) = device.take("dispatch.combine", home, torch.int64, plan.rows_TK)
    weights = y if weights_TK is None else device.take("dispatch.combine", home, torch.float32, weights_TK)[0]
    out = torch.empty(T, D, dtype=torch.bfloat16, device=home)
    if out.numel():
        block, columns = tile(D)
        block = max(1, block // 2)
        with torch.cuda.device(home):
            combine_kernel[(triton.cdiv(T, block), triton.cdiv(D, columns))](
                y, rows, weights, out, T, D, K, weights_TK is not None, block, columns, num_warps=4, **device.ROWS
            )
    return out


def combine_weighted_backward(dy_TD: Tensor, y_RD: Tensor, plan, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    home, (R, D), K = dy_TD.device, y_RD.shape, plan.rows_TK.shape[1]
    dy, y = device.take("dispatch.combine_weighted", home, torch.bfloat16, dy_TD, y_RD)
    (rows,) = device.take("dispatch.combine_weighted", home, torch.int64, plan.rows_TK)
    (weights,) = device.take("dispatch.combine_weighted", home, torch.float32, weights_TK)
    dy_R, dw = torch.empty_like(y), torch.zeros_like(weights)
    if dy_R.numel():
        with torch.cuda.device(home):
            weigh_backward_kernel[(triton.cdiv(R, 4),)](
                dy, y, rows, weights, dy_R, dw, R, D, K, 4, num_warps=4, **device.ROWS
            )
    return dy_R, dw
