"""Packed 4-bit weights times many rows (nvfp4_many.cu), alone or with SwiGLU behind them."""

from typing import NamedTuple

import torch
from torch import Tensor

from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import Window, cdiv, on
from minitransformer.ops.gpu.pack import UNIT_WORDS
from minitransformer.ops.gpu.schedule import schedule_of

SOURCE, THREADS = "nvfp4_many.cu", 384
FP32, BF16, SWIGLU = range(3)  # what becomes of a tile: OUT in the kernel's text


class Many(NamedTuple):
    """A schedule: most rows of x a tile, steps of 64 columns under way."""

    rows: int
    stages: int

    def shared(self, out: int) -> int:
        """Bytes of shared memory: the ring, its barriers and places, a part of y on its way to memory, scales."""
        part = 8192 + 32 * 80 if out == SWIGLU else 2048 + (32 if out else 1) * 144
        return self.stages * (128 * self.rows + 8 * 576 + 32) + 2 * (part + 4 * self.rows)

    def defines(self, exact: bool, out: int) -> tuple[tuple[str, int], ...]:
        return (("ROWS", self.rows), ("STAGES", self.stages), ("EXACT", int(exact)), ("OUT", out), ("WIDE", 0),
                ("DECODE", 0), ("SHARED", self.shared(out)))  # fmt: skip


CANDIDATES = Many(64, 12), Many(128, 9), Many(192, 7)
STEP = 16  # the instruction's rows of x: an expert's are shared out evenly over its tiles, in multiples of this


def choose(rows: int, experts: int) -> Many:
    """The schedule, measured on an H200; every choice gives the same bits."""
    average = rows / experts  # 256 are two tiles of 128
    return CANDIDATES[0 if average <= 48 else 1 if average <= 100 or 200 < average <= 320 else 2]


def product(
    x: Tensor, scale_R: Tensor | None, packed: Tensor, scale_EN: Tensor, bounds: Tensor, y: Tensor, schedule: Many,
    swiglu: bool = False,
) -> None:  # fmt: skip
    """Fills y [R, N] FP32 or BF16 with x [R, K] BF16 in dispatch order times the packed weight, with the outer scales.

    swiglu: y [R, N / 2] BF16 of silu(gate) * up; N a multiple of 32. With scale_R, x is code * scale of NVFP4.
    Contiguous tensors on one Hopper GPU, K a multiple of 8, x and the weight at multiples of 16 bytes; bounds [E + 1].
    """
    (R, K), (E, N) = x.shape, scale_EN.shape
    if swiglu and N % 32:
        raise ValueError(f"many_rows.product: {N // 2} rows of gate are no multiple of 16")
    out = SWIGLU if swiglu else FP32 if y.dtype == torch.float32 else BF16
    words = packed.view(-1, packed.shape[2] * UNIT_WORDS)
    with on(x.device):
        tiles, bound = schedule_of(bounds, R, schedule.rows, STEP)
        how, shared = schedule.defines(scale_R is None, out), schedule.shared(out)
        programs = min(device.multiprocessors(x.device), bound * cdiv(N, 128))
        maps = Window(x, (schedule.rows // 4, 64)), Window(words, (4 if swiglu else 8, UNIT_WORDS))
        cuda.launch(
            cuda.kernel(x.device, SOURCE, "many", how, shared), programs, THREADS, shared,
            (*maps, scale_R, scale_EN, tiles, y, bound, E, N, K),
        )  # fmt: skip
