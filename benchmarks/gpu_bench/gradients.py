"""Gradients of linear and grouped_linear on the GPU at a layer's widths: bits first, against PyTorch's libraries."""

from collections.abc import Callable, Iterator

import torch

from gpu_bench import gradient_checks
from gpu_bench.products import BF16, EXPERTS, TOP_K, routing
from gpu_bench.timing import medians_ms
from minitransformer.ops import grouped_linear, linear

TOKENS = (2048, 16384)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def _row(shape: str, T: int, N: int, K: int, wrong: int, macs: float, ours: Callable, theirs: Callable) -> dict:
    ms, peer = medians_ms([[ours], [theirs]], replays=7)
    return {"op": "gradient", "shape": shape, "M": T, "N": N, "K": K, "wrong": wrong, "ms": ms, "torch_ms": peer,
            "tflops": 2e-9 * macs / ms, "best": ["", ms]}  # fmt: skip


def gradients(tokens=TOKENS) -> Iterator[dict]:
    for T in tokens:
        for name, N, K in (("qkv", 5120, 2048), ("o", 2048, 4096), ("router", 128, 2048)):
            wrong = gradient_checks.dense(T, N, K)
            dy, x, w = _random(T, N), _random(T, K), _random(N, K)

            def ours(dx, dw, dy=dy, x=x, w=w):
                return lambda: linear.backward(dy, x, w, dx, dw)

            macs = T * N * K
            yield _row(f"dX {name}", T, N, K, wrong, macs, ours(True, False), lambda dy=dy, w=w: torch.mm(dy, w))
            yield _row(f"dW {name}", T, N, K, wrong, macs, ours(False, True), lambda dy=dy, x=x: torch.mm(dy.t(), x))
        yield from _experts(T)


def _experts(T: int) -> Iterator[dict]:
    """dX alone, then dX and dW; those of `down` with the routing weights and their gradient, which no library has."""
    host, plan = routing(T, 0)
    ends, R = torch.tensor(host.offsets[1:], dtype=torch.int32, device="cuda"), T * TOP_K
    for name, N, K, weighted in (("gate_up", 1536, 2048, False), ("down", 2048, 768, True)):
        wrong = gradient_checks.grouped(T, EXPERTS, TOP_K, N, K, weighted)
        dy, x, w = _random(R, N), _random(R, K), _random(EXPERTS, N, K)
        weights = torch.rand(T, TOP_K, device="cuda") if weighted else None

        def ours(need_dw, dy=dy, x=x, w=w, weights=weights):
            return lambda: grouped_linear.backward(dy, x, w, plan, weights, need_dw)

        def dx(dy=dy, w=w):
            return torch._grouped_mm(dy, w, offs=ends)

        def both(dy=dy, x=x, w=w):
            return torch._grouped_mm(dy, w, offs=ends), torch._grouped_mm(dy.t(), x, offs=ends)

        yield _row(f"dX {name}", T, N, K, wrong, R * N * K, ours(False), dx)
        yield _row(f"dX, dW {name}", T, N, K, wrong, 2 * R * N * K, ours(True), both)
