"""Row copies, the whole of several operators: y[i] = x[index[i]], or y[index[i]] = x[i]. No arithmetic."""

import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.tiles import in_turn


@quick
@triton.jit(do_not_specialize=["count", "limit"])
def copy_kernel(
    x_ptr, index_ptr, y_ptr, faults_ptr, count, limit, D: tl.constexpr, SCATTER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """An index outside 0 .. limit - 1 is flagged; its row is zeros (gather) or not written (scatter)."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    other = tl.load(index_ptr + row, mask=row < count, other=0)
    good = (row < count) & (other >= 0) & (other < limit)
    bad = (row < count) & ~good & (tl.program_id(1) == 0)
    tl.atomic_min(faults_ptr + SLOT + tl.zeros_like(row), row.to(tl.int32), mask=bad, sem="relaxed")
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    source, target = (row, other) if SCATTER else (other, row)
    x = tl.load(x_ptr + source[:, None] * D + d, mask=good[:, None] & (d < D), other=0.0)
    kept = good if SCATTER else row < count
    tl.store(y_ptr + target[:, None] * D + d, x, mask=kept[:, None] & (d < D))


def tile(D: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile of BF16."""
    columns = min(1024, max(16, next_power_of_2(D)))
    return max(1, 4096 // columns), columns


def copy(op: str, x: Tensor, index: Tensor, y: Tensor, limit: int, scatter: bool = False) -> None:
    """Between contiguous BF16 x and y of rows of the same size, on the GPU of y. limit: rows on the indexed side."""
    count, D = index.numel(), y[0].numel() if len(y) else 0
    if count == 0 or D == 0:
        return
    rows, columns = tile(D)
    with on(y.device):
        copy_kernel[(cdiv(count, rows), cdiv(D, columns))](
            x, index, y, device.faults(y.device), count, limit, D, scatter, rows, columns, device.slot(op),
            num_warps=4, **device.ROWS, **device.EARLY,
        )  # fmt: skip
