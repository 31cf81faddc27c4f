"""Speed of the CPU chain, as multiply-adds a second and as ratios to two peers in the same run.

    python benchmarks/chain.py [--threads N] [--repeats N]

Peers: `definition`, the integer definition of the chain in plain Numba (the same bits), and `torch`, an FP32 torch.mm
(other bits: what a CPU does without the contract). Bits are checked against the definition before anything is timed.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from minitransformer.ops import mma
from minitransformer.ops.jit import jit

SHAPES = [(1, 576, 1536), (8, 576, 1536), (64, 576, 3072), (256, 1536, 576), (256, 576, 49152), (512, 2048, 768)]


@jit
def definition(a, b, out):
    """b [N, K]: every output by the scalar definition."""
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            out[m, n] = mma.chain_scalar(a[m], b[n], np.uint32(0))


def seconds(repeats: int, function, *args) -> float:
    """Median of repeated calls, after one that warms up."""
    function(*args)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gen = torch.Generator().manual_seed(0)
    print(f"{'M':>4} {'K':>5} {'N':>6}  {'GMAC/s':>7}  {'x definition':>12}  {'x torch FP32':>12}")
    for m, k, n in SHAPES:
        x, w = torch.randn(m, k, generator=gen), torch.randn(n, k, generator=gen)
        a, b = (t.bfloat16().view(torch.int16).numpy().view(np.uint16) for t in (x, w))
        some = np.linspace(0, n - 1, 32).astype(np.int64)
        few = np.empty((min(m, 4), 32), np.uint32)
        definition(a[:4], b[some], few)
        got = mma.chain_bits(a, b, False)
        if not (got[:4][:, some].view(np.uint32) == few).all():
            raise SystemExit(f"{m} x {k} x {n}: the bits differ from the definition; nothing is timed")
        ours = seconds(args.repeats, mma.chain_bits, a, b, False)
        theirs = seconds(args.repeats, torch.mm, x, w.t())
        # The definition is timed on a part, in the same run, and scaled by its multiply-adds.
        plain = seconds(args.repeats, definition, a[:4], b[some], few) * (m * n) / few.size
        print(f"{m:4} {k:5} {n:6}  {m * k * n / ours / 1e9:7.2f}  {plain / ours:12.1f}  {theirs / ours:12.2f}")


if __name__ == "__main__":
    main()
