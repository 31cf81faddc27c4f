"""The package's own stopwatch (minitransformer/tuning/timing.py), under the name that the benchmarks use."""

from minitransformer.tuning.timing import copies, geometric_mean, median_ms

__all__ = ["copies", "geometric_mean", "median_ms"]
