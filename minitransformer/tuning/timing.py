"""Medians of GPU calls, taken from replays of a captured graph, so that no launch gap of Python's is in them."""

import math
import statistics
from collections.abc import Callable, Sequence

import torch

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


def median_ms(calls: Sequence[Callable[[], object]], replays: int = 11, least_ms: float = 0.4) -> float:
    """Median milliseconds of one call. calls: the same work on other operands; each is made at least once a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile, load and fill the caches before the capture
        for call in calls[:2]:
            call()
        once = _elapsed(calls[0])
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(least_ms / max(1e-3, once * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = [_elapsed(graph.replay) for _ in range(replays)]
    del graph
    return statistics.median(times) / (rounds * len(calls))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
