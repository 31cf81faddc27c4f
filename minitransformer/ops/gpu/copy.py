"""Row copies, the whole of several operators: y[i] = x[index[i] // slots], or y[index[i]] = x[i]. No arithmetic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.scalar import amax_of, magnitude


@triton.jit(do_not_specialize=["count", "limit"])
def copy_kernel(
    x_ptr, index_ptr, y_ptr, faults_ptr, count, limit, D: tl.constexpr, SLOTS: tl.constexpr, SCATTER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """An index outside 0 .. limit - 1 is flagged; its row is zeros (gather) or not written (scatter)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    other = tl.load(index_ptr + row, mask=row < count, other=0) // SLOTS
    good = (row < count) & (other >= 0) & (other < limit)
    if SLOT >= 0:
        bad = (row < count) & ~good & (tl.program_id(1) == 0)
        tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), row.to(tl.int32), mask=bad, sem="relaxed")
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    source, target = (row, other) if SCATTER else (other, row)
    x = tl.load(x_ptr + source[:, None] * D + d, mask=good[:, None] & (d < D), other=0.0)
    kept = good if SCATTER else row < count
    tl.store(y_ptr + target[:, None] * D + d, x, mask=kept[:, None] & (d < D))


@triton.jit(do_not_specialize=["count"])
def copy_amax_kernel(
    x_ptr, index_ptr, y_ptr, amax_ptr, count, D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A gather that also takes each row's largest magnitude, FP32 [count]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    source = tl.load(index_ptr + row, mask=row < count, other=0) // SLOTS
    top = tl.zeros((ROWS, COLUMNS), tl.int32)
    for d0 in tl.static_range(0, D, COLUMNS):
        d = d0 + tl.arange(0, COLUMNS)[None, :]
        inside = (row < count)[:, None] & (d < D)
        x = tl.load(x_ptr + source[:, None] * D + d, mask=inside, other=0.0)
        top = tl.maximum(top, magnitude(x))
        tl.store(y_ptr + row[:, None] * D + d, x, mask=inside)
    tl.store(amax_ptr + row, amax_of(top), mask=row < count)


def tile(D: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile of BF16."""
    columns = min(1024, max(16, triton.next_power_of_2(D)))
    return max(1, 4096 // columns), columns


def copy(op: str, x: Tensor, index: Tensor, y: Tensor, limit: int, slots: int = 1, scatter: bool = False) -> None:
    """Between contiguous BF16 x and y of rows of the same size, on the GPU of y. limit: rows on the indexed side."""
    count, D = index.numel(), y[0].numel() if len(y) else 0
    if count == 0 or D == 0:
        return
    rows, columns = tile(D)
    where = device.slot(op) if op in device.FAULTS else -1
    with torch.cuda.device(y.device):
        copy_kernel[(triton.cdiv(count, rows), triton.cdiv(D, columns))](
            x, index, y, device.faults(y.device), count, limit, D, slots, scatter, rows, columns, where,
            num_warps=4, **device.ROWS,
        )  # fmt: skip
