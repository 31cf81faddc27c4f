"""The experts' dX by pairs of blocks that share dY: pair_product.cu and its launches."""

import torch
from torch import Tensor

from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import Window, cdiv
from minitransformer.ops.gpu.schedule import schedule_of
from minitransformer.ops.gpu.tiles import Tile

SOURCE = "pair_product.cu"
ROWS, COLUMNS, DEPTH, THREADS, STAGES = 128, 128, 64, 384, 5
TILE = Tile(ROWS, COLUMNS, DEPTH, 4, STAGES, pair=True)


def shared() -> int:
    """Bytes of shared memory: the ring, what two groups turn, their rows' weights, the barriers and a number."""
    return STAGES * (4 * 8192 + 16) + 4 * 2 * 8192 + 2 * 4 * ROWS + 6 * 8 + 8


def defines(weighted: bool) -> tuple[tuple[str, int], ...]:
    return ("WEIGHTED", int(weighted)), ("STAGES", STAGES), ("SHARED", shared())


def fits(N: int, K: int) -> bool:
    """Whether dx serves W [E, N, K]: no step reaches into the next expert, rows begin at multiples of 16 bytes."""
    return N % DEPTH == 0 and K % 8 == 0


def weighted_fits(N: int, K: int) -> bool:
    """Whether weighted_dx serves W [E, N, K]: every lane has as many columns."""
    return fits(N, K) and K % COLUMNS == 0


def dx(dy: Tensor, w: Tensor, out: Tensor, bounds: Tensor) -> None:
    """Fills out [R, K] BF16: dY [R, N] in dispatch order times w [E, N, K]; bounds int64 [E + 1]. Contiguous, on the
    current GPU, a Hopper. ValueError where it does not fit."""
    if not fits(*w.shape[1:]):
        raise ValueError(f"pair_product.dx: W {tuple(w.shape)} is not in multiples of {DEPTH} x 8")
    schedule, bound = schedule_of(bounds, dy.shape[0], ROWS, 8)
    pairs = min(device.multiprocessors(dy.device) // 2, bound * cdiv(out.shape[1], 2 * COLUMNS))
    _launch(dy, w, dy, out, schedule, bound, pairs, False, None, None, None, None)


def weighted_dx(
    dy: Tensor, w: Tensor, out: Tensor, bounds: Tensor, weights: Tensor, order: Tensor, x: Tensor, dots: Tensor
) -> None:
    """As dx, then scaled by weights[order[r]], FP32. Fills dots[order[r]], FP32 too, with the lane sum over k of
    x [R, K] times dX before that."""
    if not weighted_fits(*w.shape[1:]):
        raise ValueError(f"pair_product.weighted_dx: W {tuple(w.shape)} is not in whole tiles of {DEPTH} x {COLUMNS}")
    schedule, bound = schedule_of(bounds, dy.shape[0], ROWS, 8)
    across = cdiv(out.shape[1], 2 * COLUMNS)
    lanes = torch.empty(bound, 2, 16, 128, 4, dtype=torch.float32, device=dy.device)
    done = torch.zeros(2 * bound + 1, dtype=torch.int32, device=dy.device)
    # As many as run at once, for speed: a pair waits only for those that began before it.
    pairs = min(max(device.multiprocessors(dy.device) // 2 // across, 1), bound) * across
    _launch(dy, w, x, out, schedule, bound, pairs, True, weights, order, lanes, done)
    trees = cuda.kernel(dy.device, SOURCE, "lane_trees", defines(True))
    cuda.launch(trees, 4 * bound, 128, 0, (schedule, bound, lanes, order, dots))


def _launch(dy, w, x, out, schedule, bound: int, pairs: int, weighted: bool, *ends) -> None:
    maps = (Window(a, (64, 64), fetch=128) for a in (dy, w.view(-1, w.shape[2]), x))
    function = cuda.kernel(dy.device, SOURCE, "pair_product", defines(weighted), shared())
    arguments = (*maps, out, schedule, *ends, bound, out.shape[1], dy.shape[1])
    cuda.launch(function, 2 * pairs, THREADS, shared(), arguments)
