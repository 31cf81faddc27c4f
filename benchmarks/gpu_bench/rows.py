"""The row-wise operators on the GPU against a device-to-device copy of the same bytes: bits first, then times."""

from collections.abc import Callable, Iterator

import torch

from gpu_bench.products import EXPERTS, TOP_K
from gpu_bench.timing import copies, medians_ms
from minitransformer.ops import dispatch, embedding, gpu, logprob, rms_norm, rope, router, sample, swiglu

BF16 = torch.bfloat16
ROWS = (16, 1024, 16384)
HIDDEN, HEADS, WIDTH, EXPERT, VOCAB = 2048, 32, 128, 768, 151936


def _bits(x: torch.Tensor) -> torch.Tensor:
    kinds = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return x.view(kinds[x.dtype]) if x.dtype in kinds else x


def _tensors(result) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def _randn(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


# name -> T -> (operands, the call, rows whose inputs and outputs stand alone). The call takes operands of any device.
def _cases(T: int) -> Iterator[tuple[str, list[torch.Tensor], Callable, int]]:
    R = T * TOP_K
    w, table = _randn(HIDDEN), rope.rope_table(WIDTH, 1e6, 4096).cuda()
    head = _randn(WIDTH)
    yield "rms_norm", [_randn(T, HIDDEN), w], lambda x, w: rms_norm.forward(x, None, w, 1e-6), 1
    yield "rms_norm+res", [_randn(T, HIDDEN), _randn(T, HIDDEN), w], lambda x, r, w: rms_norm.forward(x, r, w, 1e-6), 2
    yield "q_norm", [_randn(T, HEADS, WIDTH), head], lambda x, w: rms_norm.forward(x, None, w, 1e-6), 1
    positions = torch.arange(T, device="cuda") % 4096
    yield "rope", [_randn(T, HEADS, WIDTH), positions, table], rope.rotate, 2
    yield "router", [_randn(T, EXPERTS)], lambda x: router.forward(x, TOP_K, True), 1
    yield "swiglu", [_randn(R, 2 * EXPERT)], swiglu.forward, 1
    yield "swiglu_amax", [_randn(R, 2 * EXPERT, dtype=torch.float32)], swiglu.forward_amax, 1
    ids = torch.randint(VOCAB, (T,), device="cuda")
    yield "embedding", [ids, _randn(VOCAB, HIDDEN)], embedding.forward, 1
    if T <= 1024:
        logits = [_randn(T, VOCAB, dtype=torch.float32) * 4, ids]
        yield "logprob", logits, lambda x, i: logprob.forward(x, i, 1.0), 2
        yield "draw", [logits[0], ids, positions, torch.ones(T, device="cuda")], _drawn, 4


def _drawn(logits: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """Token ids of rows with seeds, positions and temperatures."""
    if logits.is_cuda:
        seeds, positions, t = numbers
        return gpu.sample.choose(logits, gpu.sample.Rows(seeds, positions, t, t))[0]
    lists = [x.tolist() for x in numbers]
    return torch.tensor([sample.sample(row, *each) for row, *each in zip(logits, *lists, strict=True)])


def _routed(T: int) -> Iterator[tuple[str, list[torch.Tensor], Callable]]:
    """Operators whose rows depend on a plan: checked whole."""
    ids = torch.rand(T, EXPERTS, device="cuda").topk(TOP_K).indices
    plan = dispatch.plan(ids, EXPERTS)
    host, weights = plan.to("cpu"), torch.rand(T, TOP_K, device="cuda")

    def at(x: torch.Tensor) -> dispatch.Plan:
        return plan if x.is_cuda else host

    def planned(ids: torch.Tensor) -> tuple:
        made = dispatch.plan(ids, EXPERTS)
        return made.order_R, made.rows_TK, made.bounds_E1

    yield "plan", [ids], planned
    yield "gather", [_randn(T, HIDDEN)], lambda x: dispatch.gather_forward(x, at(x))
    yield "gather_amax", [_randn(T, HIDDEN)], lambda x: dispatch.gather_amax_forward(x, at(x))
    y = _randn(T * TOP_K, HIDDEN)
    yield "combine", [y], lambda y: dispatch.combine_forward(y, at(y))
    yield "combine_w", [y, weights], lambda y, w: dispatch.combine_weighted_forward(y, at(y), w)


def _wrong(got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
    return sum(int((_bits(a.cpu()) != _bits(b)).sum()) for a, b in zip(got, want, strict=True))


def _measure(name: str, T: int, operands: list[torch.Tensor], call: Callable, wrong: int) -> dict:
    result = _tensors(call(*operands))
    # Embedding reads only the rows it takes.
    read = [result[0] if name == "embedding" and x.dim() == 2 else x for x in operands]
    size = sum(x.numel() * x.element_size() for x in (*read, *result))
    sets = [operands] + [[x.clone() for x in operands] for _ in range(copies(size, 16) - 1)]
    # A copy of n bytes reads n and writes n.
    source = [torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(copies(size, 16))]
    target = torch.empty_like(source[0])
    calls = [lambda ops=ops: call(*ops) for ops in sets], [lambda s=s: target.copy_(s) for s in source]
    ms, copy = medians_ms(calls)
    return {
        "op": "rows", "shape": name, "M": T, "wrong": wrong, "ms": ms, "torch_ms": copy, "best": ["", ms],
        "tb_s": 1e-9 * size / ms, "bytes": size,
    }  # fmt: skip


def rows(counts=ROWS) -> Iterator[dict]:
    for T in counts:
        for name, operands, call, rowwise in _cases(T):
            got = _tensors(call(*operands))
            some = min(T, 8)  # rows that the CPU reference computes; the last operands are shared by all rows
            part = [x[:some].cpu() if i < rowwise else x.cpu() for i, x in enumerate(operands)]
            yield _measure(name, T, operands, call, _wrong([x[:some] for x in got], _tensors(call(*part))))
        for name, operands, call in _routed(T):
            wrong = 0
            if T <= 1024:
                wrong = _wrong(_tensors(call(*operands)), _tensors(call(*(x.cpu() for x in operands))))
            yield _measure(name, T, operands, call, wrong)
        torch.cuda.empty_cache()
