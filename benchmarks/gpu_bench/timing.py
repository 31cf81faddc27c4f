"""The package's own stopwatch (minitransformer/tuning/timing.py), under the name that the benchmarks use."""

from minitransformer.tuning.timing import alternating, copies, geometric_mean, median_ms, medians_ms

__all__ = ["alternating", "copies", "geometric_mean", "median_ms", "medians_ms"]
