"""linear and grouped_linear on the GPU: bits first, then every schedule's time, against PyTorch's libraries."""

import math
import random
from collections.abc import Iterator

import torch

from gpu_bench.timing import copies, median_ms, medians_ms
from minitransformer.ops import dispatch, gpu, grouped_linear, linear

BF16 = torch.bfloat16
# name, N, K: the widths of Qwen3-30B-A3B.
SHAPES = (
    ("qkv", 5120, 2048), ("o", 2048, 4096), ("gate", 128, 2048), ("fc1", 1536, 2048), ("fc2", 2048, 768),
    ("lm_head", 151936, 2048),
)  # fmt: skip
ROWS = (1, 8, 32, 128, 512, 2048, 16384)
ODD = (1100, 1500, 3000, 5000, 12345)  # no rows of the table of choices
TOKENS = (1, 8, 64, 256, 2048, 16384)
EXPERTS, TOP_K = 128, 8


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def name(tile) -> str:
    kind = type(tile).__name__
    return ("" if kind in ("Tile", "Schedule") else kind) + str(tuple(tile))


def schedules(tiles, run, want, calls_of, differing=differing) -> dict[str, float | str]:
    """Milliseconds of each schedule that has the bits of `want`; of the others, what is wrong."""
    times = {}
    for tile in tiles:
        try:
            wrong = differing(run(tile), want)
            times[name(tile)] = f"{wrong} wrong" if wrong else median_ms(calls_of(tile))
        except Exception as error:  # a tile that does not fit the machine is a finding, not the end of the run
            times[name(tile)] = f"{type(error).__name__}: {str(error)[:80]}"
    return times


def best(times: dict) -> tuple[str, float]:
    """The fastest schedule and its milliseconds (infinite when none had the bits)."""
    right = {name: ms for name, ms in times.items() if isinstance(ms, float)}
    return min(right.items(), key=lambda item: item[1]) if right else ("none", float("inf"))


def dense(rows=ROWS, every=False) -> Iterator[dict]:
    """every: the time of every schedule too, and not of the chosen kernel alone."""
    from gpu_bench.fixed_tile import fixed_tile

    for name, N, K in SHAPES:
        sets = copies(2 * N * K)
        weights = [torch.randn(N, K, device="cuda", dtype=BF16) * K**-0.5 for _ in range(sets)]
        for M in rows:
            x = torch.randn(M, K, device="cuda", dtype=BF16)
            got = linear.forward(x, weights[0])
            sample = torch.tensor(sorted({0, int(torch.randint(M, ())), M - 1}))
            want = linear.forward(x[sample].cpu(), weights[0].cpu())
            wrong = differing(got[sample].cpu(), want)
            tiles = [t for t in gpu.linear.CANDIDATES if every and gpu.linear.fits(t, M, N, K)]
            times = schedules(
                tiles,
                lambda tile, x=x, w=weights[0]: gpu.linear.forward(x, w, BF16, tile),
                got,
                lambda tile, x=x, ws=weights: [lambda w=w: gpu.linear.forward(x, w, BF16, tile) for w in ws],
            )
            kernels = (linear.forward, lambda x, w: torch.mm(x, w.t()), fixed_tile)
            ours, theirs, fixed = medians_ms([[lambda w=w, x=x, f=f: f(x, w) for w in weights] for f in kernels])
            yield {
                "op": "linear", "shape": name, "M": M, "N": N, "K": K, "wrong": wrong, "ms": ours, "torch_ms": theirs,
                "torch_differs": differing(torch.mm(x, weights[0].t()), got), "fixed_ms": fixed,
                "fixed_differs": differing(fixed_tile(x, weights[0]), got),
                **({"best": best(times), "schedules": times} if every else {}),
                "tflops": 2e-9 * M * N * K / ours, "tb_s": 2e-9 * (M * K + N * K + M * N) / ours,
            }  # fmt: skip
        del weights


def odd(count=36) -> Iterator[dict]:
    """Numbers of rows that nobody chose: ODD, and random ones whose logarithms are even. wrong: of whole outputs,
    against the plain tile."""
    for name, N, K in SHAPES:
        gen, most = random.Random(N + K), min(16384, (1 << 28) // N)
        rows = sorted({*ODD, *(int(2 ** gen.uniform(0, math.log2(most))) for _ in range(count))})
        weights = [torch.randn(N, K, device="cuda", dtype=BF16) * K**-0.5 for _ in range(copies(2 * N * K))]
        whole = torch.randn(max(rows), K, device="cuda", dtype=BF16)
        want = gpu.linear.forward(whole, weights[0], BF16, gpu.linear.REFERENCE)
        for M in rows:
            x = whole[:M]
            wrong = differing(linear.forward(x, weights[0]), want[:M])
            kernels = (linear.forward, lambda x, w: torch.mm(x, w.t()))
            ours, theirs = medians_ms([[lambda w=w, x=x, f=f: f(x, w) for w in weights] for f in kernels], replays=7)
            yield {"op": "linear", "shape": name, "M": M, "N": N, "K": K, "wrong": wrong, "ms": ours,
                   "torch_ms": theirs, "tflops": 2e-9 * M * N * K / ours}  # fmt: skip
        del weights, whole, want


def routing(T: int, seed: int) -> tuple[dispatch.Plan, dispatch.Plan]:
    """A plan of TOP_K distinct experts a token, uniform, on the CPU and on the GPU."""
    gen = torch.Generator().manual_seed(seed)
    plan = dispatch.plan(torch.rand(T, EXPERTS, generator=gen).topk(TOP_K).indices, EXPERTS)
    return plan, plan.to("cuda")


def _sample_experts(x, w, plan, weights, rows_each=2) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of the first experts that have any, and what the CPU reference gives for them."""
    rows, experts, counts = [], [], []
    for e, (a, b) in enumerate(zip(plan.offsets, plan.offsets[1:], strict=False)):
        if b > a and len(experts) < 6:
            experts.append(e), counts.append(min(rows_each, b - a)), rows.extend(range(a, a + counts[-1]))
    rows = torch.tensor(rows)
    ids = torch.repeat_interleave(torch.arange(len(experts)), torch.tensor(counts))
    small = dispatch.plan(ids[:, None], len(experts))
    scale = None if weights is None else weights.cpu().reshape(-1)[plan.order_R[rows]][:, None]
    return rows, grouped_linear.forward(x[rows].cpu(), w[experts].cpu(), small, scale)


def grouped(tokens=TOKENS, every=False) -> Iterator[dict]:
    for name, N, K in (("fc1", 1536, 2048), ("fc2", 2048, 768)):
        w = torch.randn(EXPERTS, N, K, device="cuda", dtype=BF16) * K**-0.5
        for T in tokens:
            plans = [routing(T, seed) for seed in range(4 if T < 16 else 1)]  # few tokens: other experts each time
            (host, plan), R = plans[0], T * TOP_K
            x, weights = torch.randn(R, K, device="cuda", dtype=BF16), torch.rand(T, TOP_K, device="cuda")
            scale = weights if name == "fc2" else None
            got = grouped_linear.forward(x, w, plan, scale)
            rows, want = _sample_experts(x, w, host, scale)
            ends = [torch.tensor(p.offsets[1:], dtype=torch.int32, device="cuda") for p, _ in plans]

            def ours(tile=None, x=x, w=w, scale=scale, plans=plans):
                return [lambda p=p: gpu.grouped_linear.forward(x, w, p, scale, tile) for _, p in plans]

            tiles = [t for t in gpu.grouped_linear.CANDIDATES if every and gpu.grouped_linear.fits(t, R, EXPERTS)]
            times = schedules(tiles, lambda tile, ours=ours: ours(tile)[0](), got, ours)
            theirs = [lambda o=o, x=x, w=w: torch._grouped_mm(x, w.transpose(1, 2), offs=o) for o in ends]
            ms, peer = medians_ms([ours(), theirs])
            used = sum(b > a for a, b in zip(host.offsets, host.offsets[1:], strict=False))
            plain = got if scale is None else gpu.grouped_linear.forward(x, w, plan)
            yield {
                "op": "grouped_linear", "shape": name, "M": T, "N": N, "K": K,
                "wrong": differing(got[rows].cpu(), want), "ms": ms,
                "torch_ms": peer, "torch_differs": differing(theirs[0](), plain),
                **({"best": best(times), "schedules": times} if every else {}), "tflops": 2e-9 * R * N * K / ms,
                "tb_s": 2e-9 * (R * K + used * N * K + R * N) / ms,
            }  # fmt: skip
        del w
