"""dispatch/1 on Hopper: the plan without a copy to the host, gather, combine and their gradients (ops/dispatch.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.copy import tile
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LANES, amax_of, lane_tree, magnitude
from minitransformer.ops.gpu.tiles import in_turn, to_bf16


@triton.jit
def _ids(ids_ptr, r, R, E):
    """int32 expert ids of the flat slots r; E past the end. An id that does not exist is taken for the nearest."""
    ids = tl.load(ids_ptr + r, mask=r < R, other=0)
    return tl.where(r < R, tl.minimum(tl.maximum(ids, 0), E - 1), E).to(tl.int32)


@quick
@triton.jit(do_not_specialize=["R", "E"])
def count_kernel(ids_ptr, counts_ptr, R, E, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Program b counts the experts of its BLOCK slots: counts [blocks, EXPERTS]."""
    b, r = tl.program_id(0), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(_ids(ids_ptr, r, R, E), EXPERTS, mask=r < R)
    tl.store(counts_ptr + b * EXPERTS + tl.arange(0, EXPERTS), counts)


@quick
@triton.jit(do_not_specialize=["R", "E", "blocks"])
def place_kernel(
    ids_ptr, counts_ptr, order_ptr, rows_ptr, bounds_ptr, faults_ptr, R, E, blocks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Program b places its BLOCK slots behind those of the blocks before it. Integers alone, so no order matters."""
    b, e, i = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    r = b * BLOCK + i
    raw = tl.load(ids_ptr + r, mask=r < R, other=0)
    bad = (r < R) & ((raw < 0) | (raw >= E))
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(r), r // SLOTS, mask=bad, sem="relaxed")
    ids = _ids(ids_ptr, r, R, E)
    mine = tl.histogram(ids, EXPERTS, mask=r < R)
    before, total = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for b0 in range(0, blocks, 32):
        other = b0 + tl.arange(0, 32)[:, None]
        counts = tl.load(counts_ptr + other * EXPERTS + e[None, :], mask=other < blocks, other=0)
        before += tl.sum(tl.where(other < b, counts, 0), 0)
        total += tl.sum(counts, 0)
    begin = tl.cumsum(total, 0) - total
    if b == 0:
        tl.store(bounds_ptr + e, begin.to(tl.int64), mask=e < E)
        tl.store(bounds_ptr + E, R.to(tl.int64))
    # Sorted by (expert, slot), an expert's slots follow one another; the shift takes them to their rows.
    key = tl.sort(ids * BLOCK + i)
    expert, slot = key // BLOCK, b * BLOCK + key % BLOCK
    shift = begin + before - (tl.cumsum(mine, 0) - mine)
    place = tl.gather(shift, tl.minimum(expert, EXPERTS - 1), 0) + i
    tl.store(order_ptr + place, slot.to(tl.int64), mask=expert < E)
    tl.store(rows_ptr + slot, place.to(tl.int64), mask=expert < E)


@quick
@triton.jit(do_not_specialize=["R", "E"])
def few_kernel(
    ids_ptr, order_ptr, rows_ptr, bounds_ptr, faults_ptr, R, E, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """For R <= BLOCK: program e finds and places expert e's slots."""
    in_turn()
    e, r = tl.program_id(0), tl.arange(0, BLOCK)
    ids = _ids(ids_ptr, r, R, E)
    if e == 0:
        raw = tl.load(ids_ptr + r, mask=r < R, other=0)
        bad = (r < R) & ((raw < 0) | (raw >= E))
        tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(r), r // SLOTS, mask=bad, sem="relaxed")
        tl.store(bounds_ptr + E, R.to(tl.int64))
    begin = tl.sum((ids < e).to(tl.int32), 0)
    tl.store(bounds_ptr + e, begin.to(tl.int64))
    place = begin + tl.cumsum((ids == e).to(tl.int32), 0) - 1
    tl.store(order_ptr + place, r.to(tl.int64), mask=ids == e)
    tl.store(rows_ptr + r, place.to(tl.int64), mask=ids == e)


@quick
@triton.jit(do_not_specialize=["T"])
def spread_kernel(
    x_ptr, rows_ptr, y_ptr, amax_ptr, T, D: tl.constexpr, K: tl.constexpr, AMAX: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Each token's row is read once and written to the rows of its K slots. AMAX: whole rows a program, and maxima.
    SLOTS: a power of two that holds K."""
    in_turn()
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = ()  # read before the first store: a load that stands behind one is not moved before it
    for k in tl.static_range(K):
        rows = rows + (tl.load(rows_ptr + t * K + k, mask=t < T, other=0),)
    slot = tl.arange(0, SLOTS)[None, :]
    own = (t < T)[:, None] & (slot < K)
    slots = tl.load(rows_ptr + t[:, None] * K + slot, mask=own, other=0)
    begin, top = 0 if AMAX else tl.program_id(1) * COLUMNS, tl.zeros((ROWS, COLUMNS), tl.int32)
    for d0 in tl.static_range(0, D if AMAX else COLUMNS, COLUMNS):
        d = begin + d0 + tl.arange(0, COLUMNS)[None, :]
        inside = (t < T)[:, None] & (d < D)
        x = tl.load(x_ptr + t[:, None] * D + d, mask=inside, other=0.0)
        for k in tl.static_range(K):
            tl.store(y_ptr + rows[k][:, None] * D + d, x, mask=inside)
        if AMAX:
            top = tl.maximum(top, magnitude(x))
    if AMAX:
        tl.store(amax_ptr + slots, tl.broadcast_to(amax_of(top)[:, None], (ROWS, SLOTS)), mask=own)


@quick
@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y_ptr, rows_ptr, weights_ptr, out_ptr, T, D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    in_turn()
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


@quick
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
    R, E, slots = ids.numel(), num_experts, max(1, ids.shape[1])
    order, rows = torch.empty(R, dtype=torch.int64, device=home), torch.empty_like(ids)
    if R == 0:
        return order, rows, torch.zeros(E + 1, dtype=torch.int64, device=home)
    bounds = torch.empty(E + 1, dtype=torch.int64, device=home)
    out, where = (order, rows, bounds, device.faults(home)), device.slot("dispatch.plan")
    with on(home):
        if R <= 1024:
            block = max(128, next_power_of_2(R))
            few_kernel[(E,)](
                ids, *out, R, E, slots, block, where, num_warps=4, **device.ROWS, **device.EARLY
            )
            return order, rows, bounds
        # A small block sorts fast; each reads the counts of all.
        block, warps = (256, 4) if R <= 1 << 15 else (1024, 8)
        blocks, experts = cdiv(R, block), max(32, next_power_of_2(E))
        counts = torch.empty(blocks, experts, dtype=torch.int32, device=home)
        count_kernel[(blocks,)](ids, counts, R, E, block, experts, num_warps=4, **device.ROWS)
        place_kernel[(blocks,)](
            ids, counts, *out, R, E, blocks, slots, block, experts, where, num_warps=warps, **device.ROWS
        )
    return order, rows, bounds


def _spread(op: str, x_TD: Tensor, plan, with_amax: bool) -> tuple[Tensor, Tensor]:
    home, (T, D), K = x_TD.device, x_TD.shape, plan.rows_TK.shape[1]
    (x,) = device.take(op, home, torch.bfloat16, x_TD)
    (rows,) = device.take(op, home, torch.int64, plan.rows_TK)
    out = torch.empty(T * K, D, dtype=torch.bfloat16, device=home)
    amax = torch.empty(T * K, dtype=torch.float32, device=home) if with_amax else out
    if with_amax and D == 0:
        amax.zero_()
    if out.numel():
        columns = min(4096, next_power_of_2(D)) if with_amax else tile(D)[1]
        block = max(1, 1024 // columns)
        grid = cdiv(T, block), 1 if with_amax else cdiv(D, columns)
        with on(home):
            spread_kernel[grid](
                x, rows, out, amax, T, D, K, with_amax, block, columns, next_power_of_2(K),
                num_warps=4, **device.ROWS, **device.EARLY,
            )  # fmt: skip
    return out, amax


def gather(x_TD: Tensor, plan) -> Tensor:
    return _spread("dispatch.gather", x_TD, plan, False)[0]


def gather_amax(x_TD: Tensor, plan) -> tuple[Tensor, Tensor]:
    return _spread("dispatch.gather_amax", x_TD, plan, True)


def combine(y_RD: Tensor, plan, weights_TK: Tensor | None = None) -> Tensor:
    """With weights: dispatch.combine_weighted."""
    home, (T, K), D = y_RD.device, plan.rows_TK.shape, y_RD.shape[1]
    (y,) = device.take("dispatch.combine", home, torch.bfloat16, y_RD)
    (rows,) = device.take("dispatch.combine", home, torch.int64, plan.rows_TK)
    weights = y if weights_TK is None else device.take("dispatch.combine", home, torch.float32, weights_TK)[0]
    out = torch.empty(T, D, dtype=torch.bfloat16, device=home)
    if out.numel():
        block, columns = tile(D)
        block = max(1, block // 2) if T >= 1024 else 1
        with on(home):
            combine_kernel[(cdiv(T, block), cdiv(D, columns))](
                y, rows, weights, out, T, D, K, weights_TK is not None, block, columns,
                num_warps=4, **device.ROWS, **device.EARLY,
            )  # fmt: skip
    return out


def combine_weighted_backward(dy_TD: Tensor, y_RD: Tensor, plan, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    home, (R, D), K = dy_TD.device, y_RD.shape, plan.rows_TK.shape[1]
    dy, y = device.take("dispatch.combine_weighted", home, torch.bfloat16, dy_TD, y_RD)
    (rows,) = device.take("dispatch.combine_weighted", home, torch.int64, plan.rows_TK)
    (weights,) = device.take("dispatch.combine_weighted", home, torch.float32, weights_TK)
    dy_R, dw = torch.empty_like(y), torch.zeros_like(weights)
    if dy_R.numel():
        with on(home):
            weigh_backward_kernel[(cdiv(R, 4),)](
                dy, y, rows, weights, dy_R, dw, R, D, K, 4, num_warps=4, **device.ROWS
            )
    return dy_R, dw
