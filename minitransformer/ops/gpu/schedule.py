"""Which tile of rows is whose, for the persistent products over experts; made on the GPU, where the plan is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu.launch import next_power_of_2, quick

# Of each tile of rows: its expert, its first row, the end of its rows, the expert's first tile, how many it has.
CELLS = tl.constexpr(5)


@quick
@triton.jit
def schedule_kernel(
    offsets_ptr, schedule_ptr, experts, bound, TILE_M: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Program e writes expert e's tiles of rows after those of the experts before it; the last cell says how many."""
    e, mine = tl.arange(0, PADDED), tl.program_id(0)
    begin = tl.load(offsets_ptr + e, mask=e < experts, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0).to(tl.int32)
    tiles = (end - begin + TILE_M - 1) // TILE_M
    if mine == 0:
        tl.store(schedule_ptr + bound * CELLS, tl.sum(tiles, 0))
    at = tl.sum(tl.where(e < mine, tiles, 0), 0)
    begin, end = tl.sum(tl.where(e == mine, begin, 0), 0), tl.sum(tl.where(e == mine, end, 0), 0)
    count = (end - begin + TILE_M - 1) // TILE_M
    rows = TILE_M if STEP == TILE_M else ((end - begin + count - 1) // count + STEP - 1) // STEP * STEP
    for i in range(count):
        cell, first = schedule_ptr + (at + i) * CELLS, begin + i * rows
        tl.store(cell, mine)
        tl.store(cell + 1, first)
        tl.store(cell + 2, min(first + rows, end))
        tl.store(cell + 3, at)
        tl.store(cell + 4, count)


def schedule_of(bounds: Tensor, R: int, rows: int, step: int | None = None) -> tuple[Tensor, int]:
    """(int32 [bound + 1, CELLS] of the tiles of at most `rows` rows, the most that there can be) on the current GPU.

    step: an expert's rows are shared out evenly over its tiles, in multiples of it; without, all but its last are full.
    """
    E = bounds.shape[0] - 1
    bound = (R + min(E, R) * (rows - 1)) // rows  # every expert may end with a tile that is not full
    schedule = torch.empty(bound + 1, CELLS.value, dtype=torch.int32, device=bounds.device)
    schedule_kernel[(E,)](bounds, schedule, E, bound, rows, step or rows, next_power_of_2(E), num_warps=4)
    return schedule, bound
