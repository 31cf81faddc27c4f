"""The row-wise kernels of the forward pass in the emulator.

TRITON_INTERPRET=1 python -m alignment_tests.gpu.emulated_rows [mutation]
"""

import importlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from alignment_tests import inputs
from alignment_tests.gpu import emulator
from alignment_tests.gpu.emulator import wrong
from alignment_tests.gpu.values import VALUES
from minitransformer.ops import dispatch, kv_store, logprob, rms_norm, rope, router, sample, swiglu

# name: (kernel file, what stands there, the fault, the cases that see it)
MUTATIONS = {
    "slots behind the blocks that follow": ("dispatch", "tl.where(other < b, counts, 0)",
                                            "tl.where(other > b, counts, 0)", "plan"),
    "few slots: an expert too low": ("dispatch", "begin + tl.cumsum((ids == e)", "tl.cumsum((ids == e)", "plan"),
    "counts in place of bounds": ("dispatch", "bounds_ptr + e, begin", "bounds_ptr + e, total", "plan"),
    "rows that name their slots": ("dispatch", "rows_ptr + slot, place", "rows_ptr + slot, slot", "plan"),
    "a token written to its first slot alone": (
        "dispatch", "(tl.load(rows_ptr + t * K + k, mask=t < T, other=0),)",
        "(tl.load(rows_ptr + t * K, mask=t < T, other=0),)", "spread",
    ),
    "the higher of two equal experts": ("router", "(65535 - e)", "e", "router"),
    "negative logits the other way round": ("router", "u ^ 0x7FFFFFFF, u) & -65536", "u, u) & -65536", "router"),
    "the norm of rounded squares": ("rms_norm", "lanes += v * v\n        if KEEP",
                                    "lanes += to_bf16(v * v).to(tl.float32)\n        if KEEP", "norm"),
    "keys normed with the queries' weight": ("qkv", "(head < N)[:, None]", "(head < N + G)[:, None]", "qkv"),
    "rope before the norm is rounded": (
        "qkv", "a = to_bf16((a * inverse) * tl.load(weight).to(tl.float32)).to(tl.float32)",
        "a = (a * inverse) * tl.load(weight).to(tl.float32)", "qkv",
    ),
    "values turned as well": ("qkv", "tl.where(is_k[:, None], turned_b, raw_b)", "turned_b", "qkv"),
    "one maximum of two blocks": ("logprob", "m = div(tl.max(tops, 0), temperature)",
                                  "m = div(tl.max(tl.where(i == 0, tops, float('-inf')), 0), temperature)", "logprob"),
    "temperature forgotten": ("logprob", "x = div(x, temperature)\n    return", "x = x * 1.0\n    return", "logprob"),
    "noise keyed by the row": ("sample", "tl.load(positions_ptr + row)", "row", "draw"),
    "the higher of two equal scores": ("sample", "tl.min(tl.where(best == most, best_id, 0x7FFFFFFF), 0)",
                                       "tl.max(tl.where(best == most, best_id, 0), 0)", "draw"),
    "a guess of another element's noise": ("sample", "-_LN2, y)", "-_LN2, y - 0.01)", "guess"),
    "the best guess wins": ("sample", ".to(tl.int32), 0) != 1", ".to(tl.int32), 0) < 0", "draw"),
    "a lane's second guess is not looked at": ("sample", "tl.maximum(second, tl.minimum(first, guess))", "second",
                                               "draw"),
    "the log-prob at the draw's temperature": ("sample", "rows.log_prob_temperatures, tops)[0]",
                                               "rows.temperatures, tops)[0]", "draw"),
    "one token more than top_k": ("sample", "min(d.top_k or V, V)", "min((d.top_k or V) + 1, V)", "draw"),
    "keys of a sequence without tokens": ("attention_pages", "mask=begin < end, other=-1", "mask=end > 0, other=-1",
                                          "pages"),
    "keys past the end": ("attention_pages", "(j <= last)[:, None] & inside", "inside", "pages"),
    "the mass of all instead of top_k's": ("sample", "reached.gather(1, most - 1)", "reached[:, -1:]", "draw"),
}  # fmt: skip


def _kernels(name: str):
    return importlib.import_module(f"minitransformer.ops.gpu.{name}")


def _plan() -> Iterator[tuple[str, int]]:
    for T, E, K in ((300, 100, 8), (40, 128, 8), (4200, 9, 8), (1, 128, 8), (70, 3, 2), (5, 1, 1), (1025, 7, 1)):
        ids = inputs.integers(1, E, T, K)
        want = dispatch.plan(ids, E)
        got = _kernels("dispatch").plan(ids, E)
        yield f"plan {T} {E} {K}", wrong(got, [want.order_R, want.rows_TK, want.bounds_E1])


def _spread() -> Iterator[tuple[str, int]]:
    kernels = _kernels("dispatch")
    for T, E, K, D in ((7, 8, 2, 40), (3, 128, 8, 2048), (5, 4, 1, 576)):
        plan, weights = dispatch.plan(inputs.integers(2, E, T, K), E), inputs.normal(3, T, K).abs()
        for kind, values in VALUES.items():
            x, y = values(4, T, D), values(5, T * K, D)
            yield f"spread {kind} {D}", wrong([kernels.gather(x, plan)], [dispatch.gather_forward(x, plan)])
            want = dispatch.gather_amax_forward(x, plan)
            yield f"spread with maxima {kind} {D}", wrong(kernels.gather_amax(x, plan), want)
            yield f"combine {kind} {D}", wrong([kernels.combine(y, plan)], [dispatch.combine_forward(y, plan)])
            want = dispatch.combine_weighted_forward(y, plan, weights)
            yield f"combine weighted {kind} {D}", wrong([kernels.combine(y, plan, weights)], [want])


def _router() -> Iterator[tuple[str, int]]:
    for T, E, K in ((9, 128, 8), (5, 8, 2), (4, 100, 5), (3, 200, 8), (2, 1, 1)):
        for kind in ("normal", "wide", "tiny", "few values"):
            x = VALUES[kind](6, T, E)
            for norm in (True, False):
                yield f"router {E} {kind} {norm}", wrong(_kernels("router").forward(x, K, norm),
                                                         router.forward(x, K, norm))  # fmt: skip


def _norm() -> Iterator[tuple[str, int]]:
    for T, D in ((5, 64), (3, 576), (2, 2048), (3, 96), (2, 4608)):
        for kind, values in VALUES.items():
            x, w = values(7, T, D), inputs.bf16(8, D)
            for residual in (None, values(9, T, D)):
                got = [y for y in _kernels("rms_norm").forward(x, residual, w, 1e-6) if y is not None]
                want = [y for y in rms_norm.forward(x, residual, w, 1e-6) if y is not None]
                yield f"norm {D} {kind} residual {residual is not None}", wrong(got, want)
    for T, D in ((140, 16), (9, 576), (5, 768), (3, 15)):
        x, dy, dr, w = inputs.bf16(20, T, D), inputs.bf16(21, T, D), inputs.bf16(22, T, D), inputs.bf16(8, D)
        for residual in (None, inputs.bf16(23, T, D)):
            args = dy, None if residual is None else dr, x, residual, w, 1e-6
            got, want = _kernels("rms_norm").backward(*args), rms_norm.backward(*args)
            yield f"norm {D} back residual {residual is not None}", wrong(got, want)


def _qkv() -> Iterator[tuple[str, int]]:
    for T, N, G, H in ((7, 4, 2, 16), (3, 32, 4, 128), (5, 9, 3, 64), (2, 1, 1, 4)):
        for kind, values in VALUES.items():
            x, table, (qw, kw) = values(10, T, N + 2 * G, H), rope.rope_table(H, 1e4, 50), inputs.bf16(11, 2, H)
            positions, rows = inputs.integers(12, 50, T), inputs.integers(13, 1 << 40, 20).argsort()[:T]
            got, want = ([torch.zeros(20, G, H, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
            q, k, v = (part.contiguous() for part in x.split([N, G, G], 1))
            q, k = (rms_norm.forward(part, None, w, 1e-6)[0] for part, w in ((q, qw), (k, kw)))
            q, k = (rope.rotate(part, positions, table) for part in (q, k))
            kv_store.store(k, v, *want, rows)
            made = _kernels("qkv").forward(x, qw, kw, 1e-6, positions, table, *got, rows)
            yield f"qkv {H} {kind}", wrong([made, *got], [q, *want])


def _swiglu() -> Iterator[tuple[str, int]]:
    for kind, values in VALUES.items():
        x = values(14, 5, 2 * 96)
        yield f"swiglu {kind}", wrong([_kernels("swiglu").forward(x)], [swiglu.forward(x)])


def _logprob() -> Iterator[tuple[str, int]]:
    for V in (1, 96, 5003, 20000):
        x, ids = inputs.normal(15, 4, V, scale=4.0), inputs.integers(16, V, 4)
        x[1] *= 1e4
        for temperature in (1.0, 0.7):
            got, want = (f(x, ids, temperature) for f in (_kernels("logprob").forward, logprob.forward))
            yield f"logprob {V} {temperature}", wrong(got, want)


def _draw() -> Iterator[tuple[str, int]]:
    kernels = _kernels("sample")
    kernels._on = lambda like, values, dtype: torch.tensor(values, dtype=dtype)
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.9), (0.8, 20, 0.8), (1.0, 1, 0.01), (1.0, 2, 1.0)]
    for V, scale in ((1, 4.0), (96, 4.0), (4500, 4.0), (1500, 0.01), (1500, 100.0)):
        x = inputs.normal(17, 28, V, scale=scale)
        x[:14] = x[:14].round()  # many equal logits
        x[7:14, : V // 2] = -torch.inf
        draws = [kernels.Draw((1 << 63) + i, 3 * i, *(k := kinds[i % 7]), k[0] or 1.0) for i in range(28)]
        for d, row, got in zip(draws, x, kernels.draw(x, draws), strict=True):
            token = sample.sample(row, d.seed, d.position, d.temperature, d.top_k, d.top_p)
            want = logprob.logprob(row[None], torch.tensor([token]), d.log_prob_temperature)
            yield f"draw {V} {scale:g} {d}", int(got != (token, want.item()))
        whole = [i for i in range(28) if i % 7 < 2]  # of these kinds, from which nothing is cut
        rows = kernels._rows(x, [draws[i] for i in whole])
        want = zip(*kernels.draw(x[whole], [draws[i] for i in whole]), strict=True)
        got = kernels.draw_rows(x[whole], rows)
        yield f"draw rows {V} {scale:g}", int([tuple(g.tolist()) for g in got] != list(want))
    two = torch.full((120, 600), -torch.inf)  # that may win, of one lane
    two[:, [5, 517]] = inputs.normal(21, len(two), 2)
    draws = [kernels.Draw(i, i, 1.0, 0, 1.0, 1.0) for i in range(len(two))]
    want = [sample.sample(row, d.seed, d.position) for row, d in zip(two, draws, strict=True)]
    yield "draw of two", sum(token != w for (token, _), w in zip(kernels.draw(two, draws), want, strict=True))


@triton.jit
def guess_kernel(y_ptr, h_ptr, guess_ptr, exact_ptr, guess: tl.constexpr, gumbel: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y, h = tl.load(y_ptr + at), tl.load(h_ptr + at).to(tl.uint64, bitcast=True)
    tl.store(guess_ptr + at, guess(y, h))
    tl.store(exact_ptr + at, y.to(tl.float64) + gumbel(h))


def _guess() -> Iterator[tuple[str, int]]:
    """What the kernel says of the noise before it computes it, at both ends, where parts of it change, at random."""
    kernels = _kernels("sample")
    ends = [end + d for end in (0, 2**31, 2**32 - 2**17, 2**32) for d in range(-40, 41)]
    ends += [2**32 - 2**n + d for n in range(32) for d in (-1, 0, 1)]
    high = torch.cat([torch.tensor(ends).repeat(2) % 2**32, inputs.integers(18, 2**32, 2**18 - 2 * len(ends))])
    low = torch.cat([torch.zeros(len(ends), dtype=torch.int64), inputs.integers(19, 2**32, len(high) - len(ends))])
    low[len(ends) : 2 * len(ends)] = 2**32 - 1
    h = high * 2**32 + low  # the bits of uint64
    for scale in (0.0, 1e-40, 1.0, 30.0, 1e30):
        y = inputs.normal(20, len(h)) * scale
        guess, exact = torch.empty_like(y), torch.empty_like(y, dtype=torch.float64)
        guess_kernel[(1,)](y, h, guess, exact, kernels._guess, kernels._gumbel, len(h))
        rounded, above = guess.double().abs() * 2.0**-20, guess.double() - exact
        yield f"guess {scale:g}", int((above + rounded < -0.001).sum())
        usual = (high >= 2**30) & (high < 2**32 - 2**12)
        yield f"guess {scale:g} is near", int((above[usual] > rounded[usual] + 0.11).sum())


def _pages() -> Iterator[tuple[str, int]]:
    """Empty sequences too, whose rows are another batch's: graphs of prefills have them."""
    kv_lens, ends = (0, 70, 0, 64, 3), torch.tensor([0, 0, 2, 2, 3, 6], dtype=torch.int32)
    starts = torch.tensor(_kernels("attention_pages").starts(kv_lens), dtype=torch.int32)
    positions = torch.tensor([68, 69, 63, 0, 1, 2])
    rows_SL = torch.full((5, 70), 89)
    for s, n in enumerate(kv_lens):
        rows_SL[s, :n] = inputs.integers(24 + s, 1 << 40, 90).argsort()[:n]
    for G, H in ((2, 64), (3, 128)):
        k, v = inputs.bf16(22, 90, G, H), inputs.bf16(23, 90, G, H)
        got = _kernels("attention_pages").gather(k, v, rows_SL, positions, ends, starts, kv_lens)
        for cache, made in zip((k, v), got, strict=True):
            want = torch.zeros_like(made)
            for s, n in enumerate(kv_lens):
                want[starts[s] : starts[s] + n] = cache[rows_SL[s, :n]]
            yield f"pages {G} {H}", wrong([made], [want])


SOURCES = {"plan": _plan, "spread": _spread, "router": _router, "norm": _norm, "qkv": _qkv, "swiglu": _swiglu,
           "logprob": _logprob, "draw": _draw, "guess": _guess, "pages": _pages}  # fmt: skip

if __name__ == "__main__":
    emulator.main(SOURCES, MUTATIONS)
