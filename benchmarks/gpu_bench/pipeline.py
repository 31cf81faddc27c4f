"""The BF16 experts whole, from router ids and weights to tokens, against transformers' own experts module with the same
weights: bits first, then times, eagerly (host included where it is the slower one) and in CUDA graphs."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch

from gpu_bench.decoder import config, hf_config
from gpu_bench.products import BF16, EXPERTS, TOP_K, differing
from gpu_bench.timing import alternating, medians_ms
from minitransformer.models.qwen3_moe.experts import Bf16Experts, no_trace
from minitransformer.ops import dispatch

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 2048, 4096, 16384)
DECODE = 64  # tokens up to which transformers' other form is timed too: generate() takes it for its decode steps
HIDDEN, WIDTH = config().hidden_size, config().expert_size
Weights = dict[str, torch.Tensor]


def theirs(weights: Weights, form: str) -> torch.nn.Module:
    """transformers' experts on our weights, which are not copied."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    with torch.device("meta"):
        module = Qwen3MoeExperts(hf_config(config(), 4096, form))
    for name, w in weights.items():
        setattr(module, f"{name}_proj", torch.nn.Parameter(w, requires_grad=False))
    return module


def ours(weights: Weights) -> Callable:
    mlp = SimpleNamespace(**{name: SimpleNamespace(weight=w) for name, w in weights.items()})
    leaf = Bf16Experts()
    return lambda x, ids, routed: leaf(mlp, x, dispatch.plan(ids, EXPERTS), routed, no_trace)


def routes(T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """TOP_K distinct experts a token, uniform, and weights that sum to 1: ids int64 and FP32, both [T, K]."""
    found = torch.rand(T, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(TOP_K)
    return found.indices.cuda(), (found.values / found.values.sum(-1, keepdim=True)).cuda()


def eager_ms(peers: list[list[Callable]], rounds: int = 11) -> list[float]:
    """Median milliseconds of one call of each peer, its host work in it unless the GPU takes longer."""
    peers = [calls * max(1, 16 // len(calls)) for calls in peers]
    runs = [lambda calls=calls: [call() for call in calls] for calls in peers]
    alternating(runs, 2)
    return [ms / len(calls) for ms, calls in zip(alternating(runs, rounds), peers, strict=True)]


@torch.no_grad()
def pipeline(tokens=TOKENS) -> Iterator[dict]:
    sizes = {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    weights = {name: torch.randn(size, device="cuda", dtype=BF16) * size[-1] ** -0.5 for name, size in sizes.items()}
    reference, mine = ours({name: w.cpu() for name, w in weights.items()}), ours(weights)
    grouped, batched = theirs(weights, "grouped_mm"), theirs(weights, "batched_mm")
    for shape, medians in (("eager", eager_ms), ("CUDA graphs", medians_ms)):
        for T in tokens:
            # Few tokens: other experts each time, so that no weight waits in the L2 cache.
            made = [routes(T, seed) for seed in range(max(1, min(16, 32 // T)))]
            x, (ids, routed) = torch.randn(T, HIDDEN, device="cuda", dtype=BF16), made[0]
            got, peer = mine(x, ids, routed), grouped(x, ids, routed.to(BF16))
            some = torch.randperm(T)[:8]
            want = reference(*(t[some].cpu() for t in (x, ids, routed)))
            calls = [[partial(mine, x, *one) for one in made]]
            # As its own router gives them: weights in BF16.
            for module in (grouped, batched)[: 2 if T <= DECODE else 1]:
                calls.append([partial(module, x, ids, routed.to(BF16)) for ids, routed in made])
            ms, *others = medians(calls)
            used = sum(len(ids.unique()) for ids, _ in made) / len(made)
            least = 6 * used * WIDTH * HIDDEN + 4 * T * HIDDEN  # bytes: weights, x and y alone
            yield {
                "op": "experts_bf16", "shape": shape, "M": T, "wrong": differing(got[some].cpu(), want), "ms": ms,
                "torch_ms": others[0], **({"batched_ms": others[1]} if len(others) > 1 else {}),
                "apart": ((got.float() - peer.float()).norm() / got.float().norm()).item(),
                "tflops": 6e-9 * T * TOP_K * WIDTH * HIDDEN / ms, "tb_s": 1e-9 * least / ms,
            }  # fmt: skip
        torch.cuda.empty_cache()
