"""Gradients of the products at a layer's full size, where the CPU can compute a part of them: bits, before any time."""

from collections.abc import Iterator

import torch

from minitransformer.batch import Batch
from minitransformer.ops import attention, dispatch, grouped_linear, linear, mma

BF16 = torch.bfloat16


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def _wrong(pairs) -> int:
    """Elements whose bits differ, of (GPU, CPU) tensors."""
    kinds = {2: torch.int16, 4: torch.int32}
    views = [(a.cpu().contiguous().view(kinds[a.itemsize]), b.contiguous().view(kinds[b.itemsize])) for a, b in pairs]
    return sum(int((a != b).sum()) for a, b in views)


def dense(T: int, N: int, K: int) -> int:
    """Some rows of dX and of dW, whose chain runs over all tokens."""
    dy, x, w = _random(T, N), _random(T, K), _random(N, K) * K**-0.5
    dx, dw = linear.backward(dy, x, w)
    t, n = torch.randperm(T)[:4], torch.randperm(N)[:4]
    want_dx = mma.chain(dy[t].cpu(), w.cpu()).to(BF16)
    want_dw = mma.chain(dy[:, n].t().contiguous().cpu(), x.cpu()).to(BF16)
    return _wrong([(dx[t], want_dx), (dw[n], want_dw)])


def grouped(T: int, E: int, top_k: int, N: int, K: int, weighted: bool) -> int:
    """All gradients of one expert."""
    ids = torch.rand(T, E).topk(top_k).indices
    host = dispatch.plan(ids, E)
    dy, x, w, weights = _random(T * top_k, N), _random(T * top_k, K), _random(E, N, K), torch.rand(T, top_k)
    on = weights.cuda() if weighted else None
    dx, dw, dots = grouped_linear.backward(dy, x, w, host.to("cuda"), on)
    e = E // 3
    rows = slice(host.offsets[e], host.offsets[e + 1])
    count = rows.stop - rows.start
    small = dispatch.plan(torch.zeros(count, 1, dtype=torch.int64), 1)
    slots = host.order_R[rows]
    own = weights.reshape(-1)[slots][:, None] if weighted else None
    want = grouped_linear.backward(dy[rows].cpu(), x[rows].cpu(), w[e : e + 1].cpu(), small, own)
    pairs = [(dx[rows], want[0]), (dw[e : e + 1], want[1])]
    return _wrong(pairs + ([(dots.reshape(-1)[slots.cuda()][:, None], want[2])] if weighted else []))


def attend(S: int, length: int, heads: int, kv_heads: int, width: int) -> int:
    """All gradients of one key/value head in the last sequence."""
    T, group, g = S * length, heads // kv_heads, kv_heads // 2
    q, k, v, do = (_random(T, n, width) for n in (heads, kv_heads, kv_heads, heads))
    batch = Batch.packed([[0] * length] * S).to("cuda")
    saved = attention.forward(q, k, v, batch)
    got = attention.backward(do, q, k, v, *saved, batch)
    t, h, one = slice(T - length, T), slice(g * group, (g + 1) * group), slice(g, g + 1)
    parts = [x.cpu().contiguous() for x in (do[t, h], q[t, h], k[t, one], v[t, one], *(x[t, h] for x in saved))]
    want = attention.backward(*parts, Batch.packed([[0] * length]))
    return _wrong([(got[0][t, h], want[0]), (got[1][t, one], want[1]), (got[2][t, one], want[2])])


def checks(S: int, length: int) -> Iterator[tuple[str, int]]:
    """(what, wrong elements) for the products of a layer of Qwen3-30B-A3B over S sequences."""
    T = S * length
    yield "linear qkv", dense(T, 5120, 2048)
    yield "linear o", dense(T, 2048, 4096)
    yield "linear router", dense(T, 128, 2048)
    yield "experts gate_up", grouped(T, 128, 8, 1536, 2048, False)
    yield "experts down", grouped(T, 128, 8, 2048, 768, True)
    yield "attention", attend(S, length, 32, 4, 128)
