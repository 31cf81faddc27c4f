"""NVFP4 experts of few tokens as one kernel (nvfp4_experts.cu), with the bits of the operators one by one."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import cdiv, on
from minitransformer.ops.gpu.nvfp4 import aligned
from minitransformer.ops.gpu.pack import UNIT_COLUMNS, UNIT_ROWS

SOURCE = "nvfp4_experts.cu"
MOST = 4  # tokens: as many as leave room for a ring of two pieces a warp
PER_THREAD = 2  # CU_STREAM_PER_THREAD, as a handle
SHARED_LIMIT, UNIT_BYTES, PADDING = 227 << 10, 576, 16
_places: dict[torch.device, dict[tuple, "Place"]] = {}  # of the launches of a GPU, by owner
_placing = Lock()


class Place(NamedTuple):
    """What a launch has to itself. how: as what the kernel is compiled; end: of its cells; gone: is the owner?"""

    how: tuple[tuple[str, int], ...]
    cells: Tensor
    begun: Tensor
    end: int
    gone: Callable[[], bool]


def _place(home: torch.device, count: int, how: tuple) -> Place | None:
    """Launches that may run at once must not share it, nor do those of other shapes, which would leave cells filled.
    Those of one shape that follow one another do: in a stream, or in a graph's part of one. None, and a warning, if
    there is no room for one owner more."""
    stream, capturing = torch.cuda.current_stream(home).cuda_stream, torch.cuda.is_current_stream_capturing()
    capture = cuda.capture(stream) if capturing else None
    if stream == PER_THREAD:
        return _none("the default stream of each thread is many streams of one handle; use another")
    # A handle stands for one stream at a time. That of a destroyed stream is released when all of its work is done
    # (cuStreamDestroy), so a new stream of the same handle finds the cells as the last launch left them: empty.
    owner = how, stream, capture and capture.number  # what is captured may be replayed beside anything else
    with _placing:
        if capturing and home not in _places:
            return _none("the first launch stands in a CUDA graph, which must not fill memory; run it once before")
        if capturing and capture is None:
            return _none("the driver does not say which CUDA graph is captured")
        places = _places.setdefault(home, {})
        if owner not in places:
            found = _left(places, how) or _new(home, places, count, how)
            if found is None:
                return _none(f"{len(places)} shapes and CUDA graphs have all cells; drop graphs that nobody replays")
            places[owner] = found._replace(gone=cuda.end_of(capture.graph)) if capture else found
        return places[owner]


def _left(places: dict[tuple, Place], how: tuple) -> Place | None:
    """A graph's that is gone: the next launch of the same shape finds the cells as it must."""
    old = next((owner for owner, place in places.items() if owner[0] == how and place.gone()), None)
    return None if old is None else places.pop(old)._replace(gone=_never)


def _new(home: torch.device, places: dict[tuple, Place], count: int, how: tuple) -> Place | None:
    """Behind the others."""
    (counters, cells), at = device.meeting(home), len(places)
    first = max((place.end for place in places.values()), default=0)
    if at == len(counters) or first + count > len(cells):
        return None
    return Place(how, cells[first : first + count], counters[at : at + 1], first + count, _never)


def _never() -> bool:
    """Of a stream."""
    return False


def _none(why: str) -> None:
    text = f"NVFP4 experts of up to {MOST} tokens run as five kernels in place of one, the same bits but slower: {why}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _cells(T: int, slots: int, F: int) -> int:
    """Two for each number of SwiGLU's rows, which take turns."""
    return 2 * T * slots * F


def _fixed(T: int, slots: int, D: int, F: int, blocks: int, warps: int) -> int:
    """Bytes of shared memory beside the ring, at most (struct Shared in the kernel's text)."""
    R, own = T * slots, cdiv(D // UNIT_ROWS, blocks)
    rows = T * (2 * D + PADDING) + R * (2 * F + PADDING) + own * R * 2 * UNIT_ROWS
    return rows + 512 * warps + 8 * T + 48 * R + 128


def _blocks(home: torch.device, D: int) -> int:
    return min(device.multiprocessors(home), D // UNIT_ROWS)


def _piece(width: int, most: int) -> int:
    """How many units of 64 columns a copy brings: as many as divide a row of the weight, up to `most`."""
    units = width // UNIT_COLUMNS
    return max(n for n in range(1, most + 1) if units % n == 0)


@lru_cache
def defines(T: int, slots: int, D: int, F: int, blocks: int) -> tuple[tuple[str, int], ...]:
    """What nvfp4_experts.cu is compiled with: as deep a ring as fits."""
    workers, first, second = 8 if T == 1 else 16, _piece(D, 8), _piece(F, 12 if T == 1 else 8)
    warps = workers + 8
    left, piece = SHARED_LIMIT - _fixed(T, slots, D, F, blocks, warps), workers * (max(first, second) * UNIT_BYTES + 8)
    tiles = cdiv(2 * F // UNIT_ROWS * T * slots, blocks * workers)  # of FC1, of a warp
    depth = min(left // piece, tiles * D // (first * UNIT_COLUMNS) + F // (second * UNIT_COLUMNS))
    values = {"TOKENS": T, "SLOTS": slots, "HIDDEN": D, "WIDTH": F, "BLOCKS": blocks, "WARPS": warps}
    values |= {"WORKERS": workers, "FIRST": first, "SECOND": second, "DEPTH": depth}
    values |= {"SHARED": SHARED_LIMIT - left + depth * piece, "WIDE": 0, "DECODE": 1}
    return tuple(values.items())


@lru_cache
def _meet(home: torch.device, how: tuple[tuple[str, int], ...]) -> bool:
    """Whether all blocks run at once, as they must."""
    sizes = dict(how)
    with on(home):
        function = cuda.kernel(home, SOURCE, "experts", how, sizes["SHARED"])
        each = cuda.at_once(function, 32 * sizes["WARPS"], sizes["SHARED"])
    return each * device.multiprocessors(home) >= sizes["BLOCKS"]


def place(home: torch.device, plan: Plan, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Place | None:
    """For one launch now; None where the kernel doesn't serve these tokens and (packed weight, outer scales) of both
    products."""
    (T, slots), D, F = plan.rows_TK.shape, down[1].shape[1], gate_up[1].shape[1] // 2
    if not 1 <= T <= MOST or not 1 <= slots <= 16 or D % UNIT_COLUMNS or F % UNIT_COLUMNS or 0 in (D, F):
        return None
    how = defines(T, slots, D, F, _blocks(home, D))
    return _place(home, _cells(T, slots, F), how) if dict(how)["DEPTH"] >= 2 and _meet(home, how) else None


def forward(
    x_TD: Tensor, plan: Plan, weights_TK: Tensor, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor],
    at: Place,
) -> Tensor:  # fmt: skip
    """x [T, D] BF16, routing weights FP32 [T, K], packed weights with outer scales FP32 -> [T, D] BF16.

    at: what `place` gave for these. No gradient.
    """
    home, sizes = x_TD.device, dict(at.how)
    (x,) = device.take("few_experts", home, torch.bfloat16, x_TD)
    places = device.take("few_experts", home, torch.int64, plan.order_R, plan.rows_TK, plan.bounds_E1)
    weights, *scales = device.take("few_experts", home, torch.float32, weights_TK, gate_up[1], down[1])
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=home)
    with on(home):
        cuda.launch(
            cuda.kernel(home, SOURCE, "experts", at.how, sizes["SHARED"]),
            sizes["BLOCKS"], 32 * sizes["WARPS"], sizes["SHARED"],
            (aligned(x), *places, weights, gate_up[0], scales[0], down[0], scales[1], at.cells, out,
             at.begun, device.faults(home), plan.num_experts,
             device.slot("experts.gate_up"), device.slot("experts.down")),
            early=True, meets=True,
        )  # fmt: skip
    return out
