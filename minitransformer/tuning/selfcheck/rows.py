"""What works row by row, draws, and what an update does: the norm of the gradients, AdamW."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from minitransformer.learner import gradients
from minitransformer.ops import (
    adamw,
    dispatch,
    embedding,
    gpu,
    kv_store,
    logprob,
    rms_norm,
    rope,
    router,
    sample,
    swiglu,
)  # fmt: skip
from minitransformer.tuning.selfcheck.cases import (
    BF16,
    FP32,
    Pair,
    both,
    check,
    integers,
    normal,
    numbers,
    values,
    wide_fp32,
)


@check("rms_norm")
def _rms_norm(home: torch.device) -> Iterator[Pair]:
    for T, D in ((3, 2048), (130, 128), (70, 576)):
        x, old, dy, dr = (values(26 + i, T, D) for i in range(4))
        (w,) = normal(30, 1, D)
        for residual, down in ((None, None), (old, dr)):
            what = f"{T} rows of {D}{'' if residual is None else ' with a residual'}"
            yield both(what, home, partial(rms_norm.forward, eps=1e-6), x, residual, w)
            yield both(f"{what}, gradients", home, partial(rms_norm.backward, eps=1e-6), dy, down, x, residual, w)


@check("rope")
def _rope(home: torch.device) -> Iterator[Pair]:
    for heads, H in ((8, 128), (9, 64)):
        table, at = rope.rope_table(H, 1e6, 4096), integers(31, 4096, 40)
        for sign in (1.0, -1.0):
            what = f"heads of {H}{'' if sign > 0 else ', gradients'}"
            yield both(what, home, partial(rope.rotate, sign=sign), values(32, 40, heads, H), at, table)


def _normed_turned_stored(x, qw, kw, positions, table, k_store, v_store, rows):
    """What gpu.qkv does in one kernel."""
    G = k_store.shape[1]
    q, k, v = (part.contiguous() for part in x.split([x.shape[1] - 2 * G, G, G], 1))
    q, k = (rope.rotate(rms_norm.forward(y, None, w, 1e-6)[0], positions, table) for y, w in ((q, qw), (k, kw)))
    stores = k_store.clone(), v_store.clone()
    kv_store.store(k, v, *stores, rows)
    return q, *stores


def _qkv_joined(x, qw, kw, positions, table, k_store, v_store, rows):
    stores = k_store.clone(), v_store.clone()
    return gpu.qkv.forward(x, qw, kw, 1e-6, positions, table, *stores, rows), *stores


@check("kv_store")
def _kv_store(home: torch.device) -> Iterator[Pair]:
    """And the kernel that norms, turns and stores at once."""
    for N, G, H in ((32, 4, 128), (9, 3, 64)):
        x, (qw, kw) = values(33, 40, N + 2 * G, H), normal(34, 2, H)
        stores = [torch.zeros(60, G, H, dtype=BF16) for _ in range(2)]
        rows = torch.randperm(60, generator=torch.Generator().manual_seed(35))[:40]
        place = x, qw, kw, integers(36, 4096, 40), rope.rope_table(H, 1e6, 4096), *stores, rows
        yield both(f"one by one, heads of {H}", home, _normed_turned_stored, *place)
        yield both(f"joined, heads of {H}", home, _normed_turned_stored, *place, joined=_qkv_joined)


@check("swiglu")
def _swiglu(home: torch.device) -> Iterator[Pair]:
    for R, F in ((3, 768), (130, 96)):
        x, dh, wide = values(37, R, 2 * F), values(38, R, F), wide_fp32(values(39, R, 2 * F))
        yield both(f"{R} rows", home, swiglu.forward, x)
        yield both(f"{R} rows of FP32", home, swiglu.forward_amax, wide)
        for y in (x, wide):
            yield both(f"{R} rows of {y.dtype}, gradients", home, swiglu.backward, dh, y)


@check("router")
def _router(home: torch.device) -> Iterator[Pair]:
    for (E, K), norm in itertools.product(((128, 8), (100, 5)), (True, False)):
        x, dw = numbers(40, 70, E), wide_fp32(normal(41, 70, K))
        run = partial(router.forward, top_k=K, norm_topk_prob=norm)
        yield both(f"{K} of {E}", home, run, x)
        weights, ids = run(x)
        yield both(f"{K} of {E}, gradients", home, router.backward, dw, x, norm, weights, ids)


@check("dispatch")
def _dispatch(home: torch.device) -> Iterator[Pair]:
    for T, E, K in ((3, 128, 8), (257, 128, 8), (5000, 128, 8)):
        run = partial(dispatch.plan, num_experts=E)
        yield both(f"plan of {T} tokens", home, run, integers(42, E, T, K))
    for T, E, K, D in ((70, 16, 8, 576), (3, 128, 8, 2048)):
        plan, x, y = dispatch.plan(integers(43, E, T, K), E), values(44, T, D), values(45, T * K, D)
        weights = integers(46, 1000, T, K).float() / 512
        yield both(f"gather of {T}", home, dispatch.gather_forward, x, plan)
        yield both(f"gather_amax of {T}", home, dispatch.gather_amax_forward, x, plan)
        yield both(f"combine of {T}", home, dispatch.combine_forward, y, plan)
        yield both(f"combine_weighted of {T}", home, dispatch.combine_weighted_forward, y, plan, weights)
        x, y, back = numbers(47, T, D), numbers(48, T * K, D), dispatch.combine_weighted_backward
        yield both(f"combine_weighted of {T}, gradients", home, back, x, y, plan, weights)


@check("embedding")
def _embedding(home: torch.device) -> Iterator[Pair]:
    weight, ids, dx = values(49, 97, 576), integers(50, 97, 130), values(51, 130, 576)
    yield both("130 tokens", home, embedding.forward, ids, weight)
    yield both("gradients", home, partial(embedding.backward, weight_shape=(97, 576)), dx, ids)


@check("logprob")
def _logprob(home: torch.device) -> Iterator[Pair]:
    for V, temperature in ((5003, 0.7), (49152, 1.0)):
        x, ids = 4 * wide_fp32(normal(52, 5, V)), integers(53, V, 5)
        x[1] *= 1e4  # far apart: exponentials that flush to 0
        x[2, (ids[2] + 1 + torch.arange(V // 3)) % V] = -torch.inf
        run = partial(logprob.forward, temperature=temperature)
        yield both(f"vocabulary of {V}", home, run, x, ids)
        dout, kept = torch.tensor([1.0, -0.3, 2e-20, 7.0, 0.0], dtype=FP32), run(x, ids)[1]
        yield both(f"vocabulary of {V}, gradients", home, logprob.backward, dout, x, ids, temperature, kept)
        back = partial(logprob.backward, first=1024, dtype=BF16)
        of_rows = torch.linspace(0.5, 2.0, len(ids), dtype=FP32)
        some = dout, x[:, 1024:3024].contiguous(), ids, of_rows, kept
        yield both(f"vocabulary of {V}, gradients of some columns", home, back, *some)


DRAWS = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.9), (0.8, 200, 0.95))  # temperature, top_k, top_p


def _drawn(logits_LV):
    """Each row's id, by DRAWS in turn."""
    return [sample.sample(row, 7919 * i, 3 * i, *DRAWS[i % len(DRAWS)]) for i, row in enumerate(logits_LV)]


def _drawn_together(logits_LV):
    draws = [gpu.sample.Draw(7919 * i, 3 * i, *DRAWS[i % len(DRAWS)], 1.0) for i in range(len(logits_LV))]
    return [token for token, _ in gpu.sample.draw(logits_LV, draws)]


@check("sample")
def _sample(home: torch.device) -> Iterator[Pair]:
    """One by one, and all rows at once."""
    for V, scale in ((5003, 4.0), (20011, 0.01)):
        x = scale * wide_fp32(normal(54, 10, V))
        x[4:6] = x[4:6].round()  # many equal logits
        yield both(f"vocabulary of {V}, one by one", home, _drawn, x)
        yield both(f"vocabulary of {V}, together", home, _drawn, x, joined=_drawn_together)


@check("gradient norm")
def _gradient_norm(home: torch.device) -> Iterator[Pair]:
    def run(*tensors):
        totals = {str(i): x for i, x in enumerate(tensors)}
        return gradients.measure(totals, totals, 1.0)

    for n in range(1, 18):
        yield both(f"three tensors, {n}", home, run, *(wide_fp32(normal(55 + i, n + i * 70, 61)) for i in range(3)))


@check("adamw")
def _adamw(home: torch.device) -> Iterator[Pair]:
    """Two updates, with a gradient and without; squares that overflow or vanish among the values."""

    def run(*tensors, reached):
        grad, *state = (x.clone() for x in tensors)
        weight = torch.zeros_like(grad, dtype=BF16)
        for t in (1, 2):
            now = adamw.scalars(t, 1e-3, (0.9, 0.999), 1e-8, 0.1, clip=0.3)
            adamw.adamw(weight, grad if reached else None, *state, now)
        return weight, *state

    for n, reached in itertools.product((1, 70, 1031), (True, False)):
        grad, master, m = (wide_fp32(values(80 + i, n, 13)) for i in range(3))
        what = f"{n} rows{'' if reached else ' without a gradient'}"
        yield both(what, home, partial(run, reached=reached), grad, master, m, wide_fp32(values(83, n, 13)).abs())
