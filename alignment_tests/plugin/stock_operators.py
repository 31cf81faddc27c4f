"""Our spec's operators beside SGLang's, on the same random inputs: equal, or how many ulp apart and how often."""

import argparse
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from alignment_tests.plugin.h200_engines import add_row
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.alignment.ulp import differing, ulp_distance
from minitransformer.batch import Batch
from minitransformer.ops import dispatch
from minitransformer.ops.attention import attention
from minitransformer.ops.grouped_linear import grouped_linear
from minitransformer.ops.linear import linear
from minitransformer.ops.logprob import logprob
from minitransformer.ops.rms_norm import rms_norm, rms_norm_residual
from minitransformer.ops.rope import rope, rope_table
from minitransformer.ops.router import router
from minitransformer.ops.swiglu import swiglu
from minitransformer.plugins.sglang.stock_kernels import SglangKernels

EPS, THETA, SPLIT = 1e-6, 1e6, 256  # SPLIT: keys in a part of SGLang's decode under deterministic inference
REAL = dict(D=2048, N=32, G=4, H=128, E=128, K=8, F=768, V=151936)  # Qwen3-30B-A3B
SMALL = dict(D=64, N=4, G=2, H=16, E=8, K=3, F=32, V=300)
HEADER = "| operator | elements | differing | max ulp | largest difference |", "|---|---|---|---|---|"
Rows = Iterator[tuple[str, Tensor, Tensor]]  # what, ours, theirs


class Inputs:
    """Numbers of the size of a model's: activations around 1, weights 1 / sqrt(fan-in)."""

    def __init__(self, device: str) -> None:
        self.rng = torch.Generator(device).manual_seed(3)
        self.to = dict(device=device, dtype=torch.bfloat16)

    def x(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, **self.to)

    def w(self, *shape: int) -> Tensor:
        return self.x(*shape) * shape[-1] ** -0.5


def products(k, new: Inputs, T: int, D, N, G, H, E, V, **_) -> Rows:
    for name, x, w in (
        ("GEMM qkv", new.x(T, D), new.w((N + 2 * G) * H, D)),
        ("GEMM o", new.x(T, N * H), new.w(D, N * H)),
        ("GEMM router", new.x(T, D), new.w(E, D)),
    ):
        yield name, linear(x, w), k.linear(x, w)
    h, w = new.x(32, D), new.w(V, D)
    ours, theirs = linear(h, w, torch.float32), k.logits(h, w)
    yield "GEMM lm_head, ours rounded to BF16", ours.bfloat16(), theirs.bfloat16()
    yield "GEMM lm_head, FP32 against BF16", ours, theirs


def rows(k, new: Inputs, T: int, D, N, G, H, V, **_) -> Rows:
    x, residual, w, q, k_, v = new.x(T, D), new.x(T, D), 1 + new.w(D), new.x(T, N, H), new.x(T, G, H), new.x(T, G, H)
    yield "RMS norm, hidden", rms_norm(x, w, EPS), k.rms_norm(x, w, EPS)
    for name, ours, theirs in zip(
        ("output", "residual"), rms_norm_residual(x, residual, w, EPS), k.add_rms_norm(x, residual, w, EPS), strict=True
    ):
        yield f"RMS norm of a sum, {name}", ours, theirs
    w = 1 + new.w(H)
    yield "RMS norm, heads", rms_norm(q, w, EPS), k.rms_norm(q.flatten(0, 1), w, EPS).view(q.shape)
    positions, table = torch.arange(T, device=x.device), rope_table(H, THETA, T).to(x.device)
    ours, theirs = rope(q, k_, positions, table), k.rope(q.clone(), k_.clone(), v, positions, table)
    yield "RoPE, one table", torch.cat(ours, 1), torch.cat(theirs[:2], 1)
    config = SimpleNamespace(head_dim=H, rope_theta=THETA, max_positions=T)
    yield "RoPE, table", table, k.rope_table(SimpleNamespace(config=config, device=x.device))
    logits, ids = 4 * torch.randn(64, V, generator=new.rng, device=x.device), torch.arange(64, device=x.device)
    for t in (1.0, 0.6):
        yield f"log-softmax, temperature {t}", logprob(logits, ids, t), k.logprob(logits, ids, t)


def experts(k, new: Inputs, T: int, D, E, K, F, **_) -> Rows:
    logits = 2 * new.x(T, E)
    (weights, ids), theirs = router(logits, K, True), k.router(logits, K, True)
    yield "router, expert ids", ids, theirs[1].to(ids.dtype)
    yield "router, weights", weights, theirs[0]
    plan, routing = dispatch.plan(ids, E), k.routing(weights, ids.int(), E)
    x, w = new.x(T, D), new.w(E, 2 * F, D)
    gate_up = k.grouped(x, w, x.new_empty(T * K, 2 * F), routing, False)
    ours = grouped_linear(dispatch.gather(x, plan), w, plan, None)
    yield "grouped GEMM gate_up", dispatch.slots(ours, plan).reshape(gate_up.shape), gate_up
    h = k.swiglu(gate_up)
    yield "SwiGLU", swiglu(gate_up), h
    w = new.w(E, D, F)
    y = k.grouped(h, w, x.new_empty(T, K, D), routing, True)
    ours = grouped_linear(h[plan.order_R], w, plan, weights)
    yield "grouped GEMM down, weighted", dispatch.slots(ours, plan).reshape(y.shape), y
    yield "combine", dispatch.combine(y.flatten(0, 1)[plan.order_R], plan), k.combine(y)


def attentions(k, new: Inputs, T: int, N, G, H, **_) -> Rows:
    lengths = [T, T // 2 + 1, 65, 64, 17, 1]
    batch = Batch.packed([[0] * n for n in lengths])
    total = batch.cu_seqlens[-1]
    q, keys, values = new.x(total, N, H), new.x(total, G, H), new.x(total, G, H)
    ours = attention(q, keys, values, batch.to(q.device))
    theirs = k.attention(q, keys, values, batch.cu_seqlens)
    yield "attention, prefill", ours, theirs
    if isinstance(k, SglangKernels):
        last = torch.tensor(batch.cu_seqlens[1:], device=q.device) - 1
        decode = sglang_decode(q[last], keys, values, batch.cu_seqlens)
        yield "attention, decode", ours[last], decode
        yield "attention, SGLang's prefill : its decode", theirs[last], decode


def sglang_decode(q_SNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """SGLang's decode kernel with the parts of its deterministic mode; one query a sequence."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    (S, N, H), to = q_SNH.shape, dict(device=q_SNH.device)
    lengths = torch.tensor(bounds, **to).diff()
    splits = ((lengths + SPLIT - 1) // SPLIT).int()
    most = int(splits.max())
    parts = torch.zeros(S, N, most, H, dtype=torch.float32, **to)
    out = torch.empty_like(q_SNH)
    decode_attention_fwd(
        q_SNH.contiguous(), k_TGH, v_TGH, out, torch.tensor(bounds, dtype=torch.int32, **to),
        torch.arange(bounds[-1], **to), parts, torch.zeros(S, N, most, dtype=torch.float32, **to), splits, most,
        H**-0.5, 1.0, 1.0,
    )  # fmt: skip
    return out


def compared(name: str, ours: Tensor, theirs: Tensor) -> dict:
    apart, ulp = (ours.double() - theirs.double()).abs().max().item(), int(ulp_distance(ours, theirs).max())
    count = int(differing(ours, theirs).sum())
    return dict(operator=name, elements=ours.numel(), differing=count, max_ulp=ulp, largest=apart)


def line(operator: str, elements: int, differing: int, max_ulp: int, largest: float) -> str:
    if not differing:
        return f"| {operator} | {elements:,} | equal | | |"
    return f"| {operator} | {elements:,} | {100 * differing / elements:.3g} % | {max_ulp:,} | {largest:.2g} |"


@torch.no_grad()
def table(args: argparse.Namespace) -> int:
    device, sizes = ("cpu", SMALL) if args.own else ("cuda", REAL)
    kernels = OwnKernels() if args.own else SglangKernels()
    print(*HEADER, sep="\n", flush=True)
    parts: tuple[Callable[..., Rows], ...] = (products, experts, rows, attentions)
    for part in parts:
        try:
            for row in part(kernels, Inputs(device), args.tokens, **sizes):
                print(line(**(found := compared(*row))), flush=True)
                add_row(args, tokens=args.tokens, **found)
        except Exception as error:  # one operator that fails must not take the others' rows along
            print(f"{part.__name__}: {type(error).__name__}: {error}", flush=True)
    return 0
