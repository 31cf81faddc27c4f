"""quantised_linear/1 on Hopper in two forms with the same bits (ops/quantised_linear.py has the spec).

The weight is packed, 4.5 bits each (pack.py), and nothing else of it stays on the device (Qwen3-30B-A3B: 16 GB, where
BF16 copies would be 57 GB beside it). It is decoded in registers: for few rows (nvfp4_product.cu) and for many
(many_rows.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import cuda, device, grouped_linear, many_rows
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.many_rows import Many
from minitransformer.ops.gpu.nvfp4 import aligned
from minitransformer.ops.gpu.pack import UNIT_COLUMNS, UNIT_ROWS
from minitransformer.ops.gpu.pingpong import SCALED
from minitransformer.ops.gpu.tiles import Tile

SOURCE = "nvfp4_product.cu"
FEW = 24  # rows an expert on average, up to which nvfp4_product.cu is the faster one


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
        return 8 * self.groups * (-(-K // UNIT_COLUMNS) * UNIT_COLUMNS * 2 + 16)

    def fits(self, K: int) -> bool:
        return -(-K // UNIT_COLUMNS) % self.depth == 0 and self.shared(K) <= 227 << 10


@quick
@triton.jit(do_not_specialize=["rows"])
def refuse_kernel(amax_ptr, order_ptr, faults_ptr, rows, SLOTS: tl.constexpr, SLOT: tl.constexpr):
    """Leaves the first token whose row is not finite."""
    row = tl.program_id(0) * 256 + tl.arange(0, 256)
    amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
    token = tl.load(order_ptr + row, mask=row < rows, other=0) // SLOTS
    bad = ~(amax < float("inf"))
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), token.to(tl.int32), mask=bad, sem="relaxed")


# For every number of units a depth that divides it.
DEPTHS = (8, 6, 4, 3, 2, 1)
PACKED_CANDIDATES = (
    *(Packed(1, 4, 1, depth) for depth in DEPTHS), *(Packed(1, 8, 1, depth) for depth in DEPTHS[2:]),
    *(Packed(2, 8, 2, depth) for depth in DEPTHS[2:]), *(Packed(2, 8, 4, depth) for depth in DEPTHS[2:]),
    *(Packed(1, 8, 4, depth) for depth in DEPTHS[2:]),
)  # fmt: skip


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


def packed_product(
    x: Tensor, scale_R: Tensor | None, packed: Tensor, scale_EN: Tensor, plan: Plan, out_dtype: torch.dtype,
    schedule: Packed, early: bool = False,
) -> Tensor:  # fmt: skip
    """x [R, K] BF16 (with scale_R: codes * scales of NVFP4), packed weight -> [R, N].

    early: the kernel in front, which may still run, is not the one that made the weight, its scales or the plan.
    """
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
        cuda.launch(function, groups * blocks, 32 * schedule.warps, shared, arguments, early)
    return y


def many_product(
    x: Tensor, scale_R: Tensor | None, weight: Tensor, scale_EN: Tensor, plan: Plan, out_dtype: torch.dtype,
    schedule: Tile | Many,
) -> Tensor:  # fmt: skip
    """x [R, K] BF16 -> [R, N]: a packed weight by many_rows.py, a decoded one by grouped_linear.py's kernel."""
    home, R = x.device, x.shape[0]
    (bounds,) = device.take("quantised_linear", home, torch.int64, plan.bounds_E1)
    y = torch.empty(R, scale_EN.shape[1], dtype=out_dtype, device=home)
    if weight.dtype == torch.int32:
        many_rows.product(aligned(x), scale_R, weight, scale_EN, bounds, y, schedule)
    else:
        row_scale = torch.ones(R, dtype=torch.float32, device=home) if scale_R is None else scale_R
        grouped_linear.tiled(x, weight, y, bounds, row_scale, scale_EN, schedule, SCALED.value)
    return y


def joins_swiglu(plan: Plan, scale_EN: Tensor) -> bool:
    """Whether FC1 of these rows ends with SwiGLU: many of them, and whole tiles of gate."""
    E, N = scale_EN.shape
    return plan.num_rows > FEW * E and N % (2 * UNIT_ROWS) == 0


def swiglu(x_RK: Tensor, scale_R: Tensor, packed: Tensor, scale_EN: Tensor, plan: Plan) -> Tensor:
    """SwiGLU of the product's FP32 [R, 2F], which is not stored: BF16 [R, F]. Operands as in `forward`; no gradient."""
    (bounds,) = device.take("quantised_linear", x_RK.device, torch.int64, plan.bounds_E1)
    h = torch.empty(x_RK.shape[0], scale_EN.shape[1] // 2, dtype=torch.bfloat16, device=x_RK.device)
    schedule = many_rows.choose(plan.num_rows, plan.num_experts)
    many_rows.product(x_RK, scale_R, packed, scale_EN, bounds, h, schedule, swiglu=True)
    return h


def forward(x_RK, scale_R, weight, scale_EN, plan: Plan, out_dtype: torch.dtype, early: bool = False) -> Tensor:
    """x [R, K] BF16, weight decoded BF16 [E, N, K] or packed int32 (pack.py) -> [R, N] FP32 or BF16.

    With outer scales scale_R, x holds code * scale of NVFP4 (nvfp4.cuh says why that matters).
    """
    home, (R, K), (E, N) = x_RK.device, x_RK.shape, scale_EN.shape
    (x,) = device.take("quantised_linear", home, torch.bfloat16, x_RK)
    (weight,) = device.take("quantised_linear", home, weight.dtype, weight)
    (scale_EN,) = device.take("quantised_linear", home, torch.float32, scale_EN)
    if scale_R is not None:
        (scale_R,) = device.take("quantised_linear", home, torch.float32, scale_R)
    if R == 0 or N == 0:
        return torch.empty(R, N, dtype=out_dtype, device=home)
    args = x, scale_R, weight, scale_EN, plan, out_dtype
    if weight.dtype != torch.int32:
        return many_product(*args, grouped_linear.choose(R, E, N))
    schedule = choose_packed(R, E, K) if R <= FEW * E else None
    return many_product(*args, many_rows.choose(R, E)) if schedule is None else packed_product(*args, schedule, early)


def refuse_non_finite(amax_R: Tensor, plan: Plan, fault: str) -> None:
    """Leaves the first token whose row of amax is not finite in the slot of `fault`."""
    if amax_R.numel():
        with on(amax_R.device):
            refuse_kernel[(cdiv(amax_R.numel(), 256),)](
                amax_R, plan.order_R, device.faults(amax_R.device), amax_R.numel(), plan.rows_TK.shape[1],
                device.slot(fault), num_warps=4, **device.ROWS,
            )  # fmt: skip
