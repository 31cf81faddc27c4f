"""4-bit experts on the GPU against our own BF16 experts, and the quantiser against a copy: bits first, then times."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from gpu_bench.products import BF16, EXPERTS, TOP_K, best, routing, schedules
from gpu_bench.timing import copies, medians_ms
from minitransformer.models.qwen3_moe.experts import Bf16Experts, QuantisedExperts, no_trace
from minitransformer.ops import dispatch, gpu, grouped_linear, mxfp8, nvfp4
from minitransformer.ops import quantised_linear as op
from minitransformer.recipe import get

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)  # of products alone
EVERY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SHAPES = (("fc1", 1536, 2048, torch.float32), ("fc2", 2048, 768, BF16))


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = {BF16: torch.int16, torch.float32: torch.int32, torch.uint8: torch.uint8}[a.dtype]
    return int((a.view(kind) != b.view(kind)).sum())


def _plans(T: int) -> list[tuple[dispatch.Plan, dispatch.Plan]]:
    """Few tokens: other experts each time, so that no weight waits in the L2 cache."""
    return [routing(T, seed) for seed in range(max(1, min(16, 32 // T)))]


def _sampled(x, scale, q, outer, host: dispatch.Plan, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of six experts and what the CPU reference gives for them."""
    owners = [e for e in range(EXPERTS) if host.offsets[e + 1] > host.offsets[e]][:6]
    rows = torch.tensor([host.offsets[e] for e in owners])
    w = nvfp4.decode(nvfp4.Nvfp4(q.codes[owners].cpu(), q.scales[owners].cpu(), q.outer[owners].cpu()))
    plan = dispatch.plan(torch.arange(len(owners))[:, None], len(owners))
    return rows, op.forward(x[rows].cpu(), scale[rows].cpu(), w, outer[owners].cpu(), plan, out_dtype)


def products(tokens=TOKENS) -> Iterator[dict]:
    """Each product alone, with the schedules of both forms, against grouped_linear on BF16 weights."""
    forms = gpu.quantised_linear
    for name, N, K, out_dtype in SHAPES:
        w = torch.randn(EXPERTS, N, K, device="cuda", dtype=BF16) * K**-0.5
        q = nvfp4.quantize(w, "expert")
        packed, outer = gpu.pack.pack(q), nvfp4.expand_rows(q.outer, (EXPERTS, N)).contiguous()
        for T in tokens:
            plans, R = _plans(T), T * TOP_K
            (host, plan), x = plans[0], torch.randn(R, K, device="cuda", dtype=BF16)
            qx, xd = nvfp4.quantize_decoded(x, nvfp4.row_amax(x))
            args = xd, qx.outer, packed, outer
            got = op.forward(*args, plan, out_dtype)
            rows, want = _sampled(xd, qx.outer, q, outer, host, out_dtype)

            def calls(tile, args=args, plans=plans, out_dtype=out_dtype):
                product = forms.packed_product if isinstance(tile, forms.Packed) else forms.many_product
                return [lambda p=p: product(*args, p, out_dtype, tile) for _, p in plans]

            tiles = [s for s in forms.PACKED_CANDIDATES if s.fits(K) and s.depth > 2 and T <= 1024]
            tiles += gpu.many_rows.CANDIDATES if T >= 64 else ()
            times = schedules(tiles, lambda tile, calls=calls: calls(tile)[0](), got, calls, differing)
            calls = [[lambda p=p, args=args, t=out_dtype: op.forward(*args, p, t) for _, p in plans],
                     [lambda p=p, x=x, w=w: grouped_linear.forward(x, w, p) for _, p in plans]]  # fmt: skip
            ms, peer = medians_ms(calls)
            used = len(set().union(*({e for e in range(EXPERTS) if h.offsets[e + 1] > h.offsets[e]} for h, _ in plans)))
            size = used / len(plans) * N * K * 0.5625 + R * (2 * K + got.element_size() * N)
            yield {
                "op": "quantised_linear", "shape": name, "M": T, "N": N, "K": K,
                "wrong": differing(got[rows].cpu(), want), "ms": ms, "torch_ms": peer, "best": best(times),
                "schedules": times, "tflops": 2e-9 * R * N * K / ms, "tb_s": 1e-9 * size / ms,
            }  # fmt: skip
        del w, q, packed


def experts(tokens=EVERY, recipe: str = "nvfp4_per_token") -> Iterator[dict]:
    """gather to combine of one layer, weights quantised beforehand, against the same with BF16 experts."""
    weights = {name: torch.randn(EXPERTS, N, K, device="cuda", dtype=BF16) * K**-0.5
               for name, (_, N, K, _) in zip(("gate_up", "down"), SHAPES, strict=True)}  # fmt: skip
    mlp = SimpleNamespace(**{name: SimpleNamespace(weight=w) for name, w in weights.items()})
    ours, plain = QuantisedExperts(get(recipe)), Bf16Experts()
    few, most = gpu.quantised_linear.FEW, gpu.few_experts.MOST
    for T in tokens:
        plans, x = [p for _, p in _plans(T)], torch.randn(T, SHAPES[0][2], device="cuda", dtype=BF16)
        routed = torch.rand(T, TOP_K, device="cuda")

        def run(leaf, plan, x=x, routed=routed):
            return leaf(mlp, x, plan, routed, no_trace)

        with torch.no_grad():
            got = run(ours, plans[0])
            if T > most:  # the other form
                gpu.quantised_linear.FEW = -1 if T * TOP_K <= few * EXPERTS else 1 << 30
            gpu.few_experts.MOST = 0
            wrong = differing(got, run(ours, plans[0]))
            gpu.quantised_linear.FEW, gpu.few_experts.MOST = few, most
            ms, peer = medians_ms([[lambda p=p, leaf=leaf, run=run: run(leaf, p) for p in plans]
                                   for leaf in (ours, plain)])  # fmt: skip
        yield {"op": "experts", "shape": recipe, "M": T, "wrong": wrong, "ms": ms, "torch_ms": peer, "best": ["", ms]}


def _quantisers() -> Iterator[tuple[str, torch.Tensor, Callable]]:
    for R, K in ((512, 2048), (8192, 2048), (65536, 2048), (65536, 768)):
        x = torch.randn(R, K, device="cuda", dtype=BF16)
        amax = nvfp4.row_amax(x)

        def given(x, amax=amax, decoded=False):
            amax = amax[: len(x)].to(x.device)
            q, out = nvfp4.quantize_decoded(x, amax) if decoded else (nvfp4.quantize(x, amax), None)
            return [q.codes, q.scales, q.outer, *([out] if decoded else [])]

        yield f"nvfp4 {R}x{K}", x, given
        yield f"nvfp4+dec {R}x{K}", x, lambda x, given=given: given(x, decoded=True)
        yield f"mxfp8 {R}x{K}", x, lambda x: [(q := mxfp8.quantize(x)).codes, q.scales]


def quantisers() -> Iterator[dict]:
    """Row maxima given, as their producers give them; against a copy of the same bytes."""
    for name, x, call in _quantisers():
        got, want = call(x), call(x[:8].cpu())
        wrong = sum(differing(a[:8].cpu(), b) for a, b in zip(got, want, strict=True))
        size = sum(t.numel() * t.element_size() for t in (x, *got))
        sets = [x] + [x.clone() for _ in range(copies(size, 16) - 1)]
        source = [torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(copies(size, 16))]
        target = torch.empty_like(source[0])
        ms, copy = medians_ms([[lambda x=x, call=call: call(x) for x in sets],
                               [lambda s=s, t=target: t.copy_(s) for s in source]])  # fmt: skip
        yield {"op": "quantise", "shape": name, "M": len(x), "wrong": wrong, "ms": ms, "torch_ms": copy,
               "best": ["", ms], "tb_s": 1e-9 * size / ms}  # fmt: skip
