"""quantised_linear/1 on Hopper in two forms with the same bits (ops/quantised_linear.py has the spec).

Few rows: the weight is read packed, 4.5 bits each, and decoded in registers (nvfp4_product.cu). Many rows: it is
decoded to BF16 for the length of one call, then the grouped product runs on it. So only the packed weight stays on the
device (Qwen3-30B-A3B: 16 GB, where BF16 copies would be 57 GB beside it), and the larger form costs a write and a read
of one layer's weight (0.8 GB there), which many rows repay.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.grouped_linear import _expert_of
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.pack import UNIT_COLUMNS, UNIT_ROWS
from minitransformer.ops.gpu.tiles import Tile, chain_tile, tile_of, to_bf16

SOURCE = "nvfp4_product.cu"
FEW = 80  # rows an expert on average, up to which the packed weight is read


class Packed(NamedTuple):
    """A schedule of the packed product: tiles of 16 columns a warp, warps, groups of 8 rows, prefetched units."""

    tiles: int
    warps: int
    groups: int
    depth: int

    def defines(self, exact: bool, fp32: bool) -> tuple[tuple[str, int], ...]:
        return (*((name.upper(), value) for name, value in self._asdict().items()),
                ("EXACT", int(exact)), ("FP32_OUT", int(fp32)))  # fmt: skip

    def shared(self, K: int) -> int:
        """Bytes of shared memory: the rows of x, padded."""
        return 8 * self.groups * (-(-K // UNIT_COLUMNS) * UNIT_COLUMNS * 2 + 32)

    def fits(self, K: int) -> bool:
        return -(-K // UNIT_COLUMNS) % self.depth == 0 and self.shared(K) <= 227 << 10


@quick
@triton.jit(do_not_specialize=["tiles_m", "experts"])
def scaled_kernel(
    x_ptr, w_ptr, y_ptr, offsets_ptr, row_scale_ptr, weight_scale_ptr, tiles_m, experts, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    PADDED: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x [R, K], w [E, N, K] BF16, row_scale [R] if SCALED, weight_scale [E, N] -> y [R, N] FP32 or BF16."""
    i, j = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, TILE_N), GROUP)
    expert, first, end = _expert_of(i, offsets_ptr, experts, TILE_M, PADDED)
    if expert >= experts:
        return
    rows, cols = first + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    x_rows, w_rows = tl.where(rows < end, rows, first).to(tl.int64), tl.where(cols < N, cols, 0)
    w_rows = w_rows + expert.to(tl.int64) * N
    acc = chain_tile(x_ptr, x_rows, w_ptr, w_rows, K, TILE_M, TILE_N, TILE_K, SWAP, EVEN)
    outer = tl.load(weight_scale_ptr + w_rows)
    outer = outer[:, None] if SWAP else outer[None, :]
    if SCALED:
        row_scale = tl.load(row_scale_ptr + x_rows)
        outer = (row_scale[None, :] if SWAP else row_scale[:, None]) * outer
    acc = acc * outer
    if SWAP:
        at, inside = x_rows[None, :] * N + cols[:, None], (rows[None, :] < end) & (cols[:, None] < N)
    else:
        at, inside = x_rows[:, None] * N + cols[None, :], (rows[:, None] < end) & (cols[None, :] < N)
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + at, to_bf16(acc), mask=inside)
    else:
        tl.store(y_ptr + at, acc, mask=inside)


@quick
@triton.jit(do_not_specialize=["rows"])
def refuse_kernel(amax_ptr, order_ptr, faults_ptr, rows, SLOTS: tl.constexpr, SLOT: tl.constexpr):
    """Leaves the first token whose row is not finite."""
    row = tl.program_id(0) * 256 + tl.arange(0, 256)
    amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
    token = tl.load(order_ptr + row, mask=row < rows, other=0) // SLOTS
    bad = ~(amax < float("inf"))
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), token.to(tl.int32), mask=bad, sem="relaxed")


CANDIDATES = (
    Tile(16, 128, 128, 4, 4, swap=True), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3),
)  # fmt: skip
# For every number of units a depth that divides it.
DEPTHS = (8, 6, 4, 3, 2, 1)
PACKED_CANDIDATES = (
    *(Packed(1, 4, 1, depth) for depth in DEPTHS), *(Packed(1, 8, 1, depth) for depth in DEPTHS[2:]),
    *(Packed(2, 8, 2, depth) for depth in DEPTHS[2:]), *(Packed(2, 8, 4, depth) for depth in DEPTHS[2:]),
    *(Packed(1, 8, 4, depth) for depth in DEPTHS[2:]),
)  # fmt: skip


def choose(rows: int, experts: int) -> Tile:
    """The schedule of the decoded product; every choice gives the same bits."""
    average = rows / experts
    return CANDIDATES[0] if average <= 24 else CANDIDATES[1] if average <= 96 else CANDIDATES[2]


def choose_packed(rows: int, experts: int, K: int) -> Packed | None:
    """The schedule of the packed product, measured on an H200, or None where the rows of x are too long for it.

    Every choice gives the same bits.
    """
    units, average = -(-K // UNIT_COLUMNS), rows / experts

    def deep(most: int) -> int:
        return next(d for d in DEPTHS if d <= most and units % d == 0)

    few, wide = Packed(1, 8, 1, deep(4)), Packed(2, 8, 2, deep(4))
    if average <= 1:  # few experts: many small blocks, and each warp has much under way
        order = (Packed(1, 4, 1, deep(8)),)
    elif average <= 6:
        order = (few,)
    elif average <= 24:
        order = wide, few
    else:
        order = Packed(2 if K > 1024 else 1, 8, 4, deep(4)), wide, few
    return next((schedule for schedule in order if schedule.fits(K)), None)


def unpack(packed: Tensor, N: int, K: int) -> Tensor:
    """The packed weight as decoded BF16 [E, N, K], exact."""
    home, E = packed.device, packed.shape[0]
    (packed,) = device.take("quantised_linear", home, torch.int32, packed)
    w, units = torch.empty(E, N, K, dtype=torch.bfloat16, device=home), packed[..., 0].numel()
    if w.numel():
        with on(home):
            function = cuda.kernel(home, SOURCE, "unpack", Packed(1, 4, 1, 1).defines(True, True))
            cuda.launch(function, cdiv(units, 8), 256, 0, (packed, w, units, N, K))
    return w


def decoded_product(
    x: Tensor, scale_R: Tensor | None, w: Tensor, scale_EN: Tensor, plan: Plan, out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x [R, K], w [E, N, K] BF16 -> [R, N]."""
    home, (R, K), (E, N, _) = x.device, x.shape, w.shape
    (bounds,) = device.take("quantised_linear", home, torch.int64, plan.bounds_E1)
    y, tile = torch.empty(R, N, dtype=out_dtype, device=home), tile or choose(R, E)
    tiles_m = (R + min(E, R) * (tile.m - 1)) // tile.m
    with on(home):
        scaled_kernel[(tiles_m * cdiv(N, tile.n),)](
            x, w, y, bounds, scale_EN if scale_R is None else scale_R, scale_EN, tiles_m, E, N, K,
            tile.m, tile.n, tile.k, tile.swap, K % tile.k == 0, next_power_of_2(E), scale_R is not None, 4,
            num_warps=tile.warps, num_stages=tile.stages, **device.STRICT,
        )  # fmt: skip
    return y


def packed_product(
    x: Tensor, scale_R: Tensor | None, packed: Tensor, scale_EN: Tensor, plan: Plan, out_dtype: torch.dtype,
    schedule: Packed,
) -> Tensor:  # fmt: skip
    """x [R, K] BF16 (with scale_R: codes * scales of NVFP4), packed weight -> [R, N]."""
    home, (R, K), (E, N) = x.device, x.shape, scale_EN.shape
    (bounds,) = device.take("quantised_linear", home, torch.int64, plan.bounds_E1)
    y = torch.empty(R, N, dtype=out_dtype, device=home)
    rows, shared = 8 * schedule.groups, schedule.shared(K)
    groups = (R + min(E, R) * (rows - 1)) // rows  # a bound: every expert may end with a group that is not full
    blocks = cdiv(cdiv(N, UNIT_ROWS), schedule.tiles * schedule.warps)
    with on(home):
        defines = schedule.defines(scale_R is None, out_dtype == torch.float32)
        function = cuda.kernel(home, SOURCE, "product", defines, shared)
        arguments = (packed, x, scale_R, scale_EN, bounds, y, E, N, K)
        cuda.launch(function, groups * blocks, 32 * schedule.warps, shared, arguments)
    return y


def forward(x_RK, scale_R, weight, scale_EN, plan: Plan, out_dtype: torch.dtype) -> Tensor:
    """x [R, K] BF16, weight decoded BF16 [E, N, K] or packed int32 (pack.py) -> [R, N] FP32 or BF16.

    With outer scales scale_R, x holds code * scale of NVFP4 (nvfp4_product.cu says why that matters).
    """
    home, (E, N) = x_RK.device, scale_EN.shape
    (x,) = device.take("quantised_linear", home, torch.bfloat16, x_RK)
    (scale_EN,) = device.take("quantised_linear", home, torch.float32, scale_EN)
    if scale_R is not None:
        (scale_R,) = device.take("quantised_linear", home, torch.float32, scale_R)
    if x.shape[0] == 0 or N == 0:
        return torch.empty(x.shape[0], N, dtype=out_dtype, device=home)
    if weight.dtype == torch.int32:
        schedule = choose_packed(x.shape[0], E, x.shape[1])
        if schedule is not None and x.shape[0] <= FEW * E:
            return packed_product(x, scale_R, weight, scale_EN, plan, out_dtype, schedule)
        weight = unpack(weight, N, x.shape[1])
    (weight,) = device.take("quantised_linear", home, torch.bfloat16, weight)
    return decoded_product(x, scale_R, weight, scale_EN, plan, out_dtype)


def refuse_non_finite(amax_R: Tensor, plan: Plan, fault: str) -> None:
    """Leaves the first token whose row of amax is not finite in the slot of `fault`."""
    if amax_R.numel():
        with on(amax_R.device):
            refuse_kernel[(cdiv(amax_R.numel(), 256),)](
                amax_R, plan.order_R, device.faults(amax_R.device), amax_R.numel(), plan.rows_TK.shape[1],
                device.slot(fault), num_warps=4, **device.ROWS,
            )  # fmt: skip
