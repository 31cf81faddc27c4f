"""NVFP4 experts of few tokens as one kernel (nvfp4_experts.cu), with the bits of the operators one by one."""

from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import cdiv, on
from minitransformer.ops.gpu.nvfp4 import aligned
from minitransformer.ops.gpu.pack import UNIT_COLUMNS, UNIT_ROWS

SOURCE = "nvfp4_experts.cu"
MOST = 4  # tokens: as many as leave room for a ring of two pieces a warp
SHARED_LIMIT, UNIT_BYTES, PADDING = 227 << 10, 576, 16
_places: dict[torch.device, dict] = {}  # of the launches of a GPU: owner -> (counter, first cell, end)
_placing = Lock()


def _owner(home: torch.device, how: tuple) -> tuple | None:
    """Who shares a place: launches of one shape that follow one another, in a stream or in a graph's part of one. What
    is captured may be replayed beside anything else. None if the driver doesn't say in which graph this is."""
    stream = torch.cuda.current_stream(home).cuda_stream
    if not torch.cuda.is_current_stream_capturing():
        return how, stream
    graph = cuda.capture(stream)
    return None if graph is None else (how, stream, graph)


def _place(home: torch.device, count: int, how: tuple) -> tuple[Tensor, Tensor] | None:
    """The cells of a launch and its counter; None if there is no room for one owner more. Launches that may run at once
    must not share them, nor do those of other shapes, which would leave cells filled."""
    owner = _owner(home, how)
    with _placing:
        if home not in _places and torch.cuda.is_current_stream_capturing():
            return None  # a graph must not fill them
        places, (counters, cells) = _places.setdefault(home, {}), device.meeting(home)
        if owner not in places:
            taken = next(reversed(places.values()))[2] if places else 0
            if owner is None or len(places) == len(counters) or taken + count > len(cells):
                return None
            places[owner] = len(places), taken, taken + count
        at, first, end = places[owner]
    return cells[first:end], counters[at : at + 1]


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


def takes(home: torch.device, plan: Plan, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> bool:
    """Whether the kernel serves these tokens and (packed weight, outer scales) of both products."""
    (T, slots), D, F = plan.rows_TK.shape, down[1].shape[1], gate_up[1].shape[1] // 2
    if not 1 <= T <= MOST or not 1 <= slots <= 16 or D % UNIT_COLUMNS or F % UNIT_COLUMNS or 0 in (D, F):
        return False
    how = defines(T, slots, D, F, _blocks(home, D))
    return dict(how)["DEPTH"] >= 2 and _meet(home, how) and _place(home, _cells(T, slots, F), how) is not None


def forward(
    x_TD: Tensor, plan: Plan, weights_TK: Tensor, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> Tensor:
    """x [T, D] BF16, routing weights FP32 [T, K], packed weights with outer scales FP32 -> [T, D] BF16.

    What `takes` refuses is not to be given. No gradient.
    """
    home, (T, D), slots, F = x_TD.device, x_TD.shape, plan.rows_TK.shape[1], gate_up[1].shape[1] // 2
    (x,) = device.take("few_experts", home, torch.bfloat16, x_TD)
    places = device.take("few_experts", home, torch.int64, plan.order_R, plan.rows_TK, plan.bounds_E1)
    weights, *scales = device.take("few_experts", home, torch.float32, weights_TK, gate_up[1], down[1])
    out = torch.empty(T, D, dtype=torch.bfloat16, device=home)
    how = defines(T, slots, D, F, _blocks(home, D))
    sizes, (cells, begun) = dict(how), _place(home, _cells(T, slots, F), how)
    with on(home):
        cuda.launch(
            cuda.kernel(home, SOURCE, "experts", how, sizes["SHARED"]),
            sizes["BLOCKS"], 32 * sizes["WARPS"], sizes["SHARED"],
            (aligned(x), *places, weights, gate_up[0], scales[0], down[0], scales[1], cells, out,
             begun, device.faults(home), plan.num_experts,
             device.slot("experts.gate_up"), device.slot("experts.down")),
            early=True, meets=True,
        )  # fmt: skip
    return out
