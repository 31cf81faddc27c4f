"""Medians of GPU calls, taken from replays of a captured graph, so that no launch gap of Python's is in them."""

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from minitransformer.ops.gpu.capture import capture

L2_BYTES = 60 << 20


def copies(bytes_each: int, most: int = 256) -> int:
    """How many sets of operands to go round, so that none is found in the L2 cache at its next turn."""
    return max(1, min(most, math.ceil(3 * L2_BYTES / max(1, bytes_each))))


def _elapsed(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _captured(calls: Sequence[Callable[[], object]], least_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some rounds of the calls, replayed once, and how many calls it has."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile, load and fill the caches before the capture
        for call in calls[:2]:
            call()
        once = _elapsed(calls[0])
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(least_ms / max(1e-3, once * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with capture(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return graph, rounds * len(calls)


def alternating(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each run. They take turns, forwards and then backwards, so that a GPU that slows down
    under its power limit slows all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        turn = range(len(runs))
        for which in reversed(turn) if i % 2 else turn:
            times[which].append(_elapsed(runs[which]))
    return [statistics.median(one) for one in times]


def medians_ms(
    peers: Sequence[Sequence[Callable[[], object]]], replays: int = 11, least_ms: float = 0.4
) -> list[float]:  # fmt: skip
    """Median milliseconds of one call of each peer. calls of a peer: the same work on other operands."""
    graphs = [_captured(calls, least_ms) for calls in peers]
    medians = alternating([graph.replay for graph, _ in graphs], replays)
    return [ms / count for ms, (_, count) in zip(medians, graphs, strict=True)]


def median_ms(calls: Sequence[Callable[[], object]], replays: int = 11, least_ms: float = 0.4) -> float:
    """Median milliseconds of one call. calls: the same work on other operands; each is made at least once a replay."""
    return medians_ms([calls], replays, least_ms)[0]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
