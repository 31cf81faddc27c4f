"""AdamW on the GPU against PyTorch's, whose BF16 weights take a second pass, and a copy of the same bytes."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu_bench.timing import alternating
from minitransformer.ops import adamw

COUNTS = (10_000_000, 100_000_000)  # elements
BYTES = 30  # an element: gradient, master and moments read, the last three and the weight written
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
CALLS = 5


def _state(n: int) -> list[torch.Tensor]:
    """weight, grad, master, exp_avg, exp_avg_sq."""
    grad, master, m = (scale * torch.randn(n, device="cuda", dtype=torch.float32) for scale in (1e-3, 0.02, 1e-3))
    return [torch.zeros(n, dtype=torch.bfloat16, device="cuda"), grad, master, m, m * m]


def _wrong(state: list[torch.Tensor], now: adamw.Scalars) -> int:
    """How many numbers of the first and last million elements differ from the CPU's after an update."""
    ends = [slice(0, 1 << 20), slice(-(1 << 20), None)]
    want = [[x[end].cpu() for x in state] for end in ends]
    adamw.adamw(*state, now)
    wrong = 0
    for end, part in zip(ends, want, strict=True):
        adamw.adamw(*part, now)
        for got, x in zip(state, part, strict=True):
            kind = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
            wrong += int((got[end].cpu().view(kind) != x.view(kind)).sum())
    return wrong


def _torchs(state: list[torch.Tensor], **options) -> Callable[[], None]:
    weight, grad, master = (x.clone() for x in state[:3])
    master.requires_grad_().grad = grad
    one = torch.optim.AdamW([master], **SETTINGS, **options)

    def step():
        one.step()
        weight.copy_(master.detach())

    return step


def _five(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def optimizer(counts=COUNTS) -> Iterator[dict]:
    for n in counts:
        state, now = _state(n), adamw.scalars(10, **SETTINGS)
        wrong = _wrong(state, now)
        source = torch.empty(BYTES * n // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls = [
            lambda state=state, now=now: adamw.adamw(*state, now), _torchs(state, fused=True),
            _torchs(state, foreach=False, fused=False), lambda target=target, source=source: target.copy_(source),
        ]  # fmt: skip
        runs = [partial(_five, call) for call in calls]
        for run in runs:  # compile, and make torch's state
            run()
        ours, fused, loop, copy = (ms / CALLS for ms in alternating(runs, 11))
        yield {
            "op": "adamw", "shape": "adamw", "M": n, "wrong": wrong, "ms": ours, "torch_ms": fused, "loop_ms": loop,
            "copy_ms": copy, "tb_s": 1e-9 * BYTES * n / ours, "bytes": BYTES * n,
        }  # fmt: skip
        del state, source, target, calls, runs
        torch.cuda.empty_cache()
