"""The kernels of the products' gradients in the emulator.

    TRITON_INTERPRET=1 python -m alignment_tests.gpu.emulated_gradients [mutation]

Prints a line a case: its name and how many elements differ from the CPU reference. With a mutation, a fault is written
into a copy of one kernel's file first.
"""

import importlib
import itertools
from collections.abc import Iterator

import torch

from alignment_tests import inputs
from alignment_tests.gpu import emulator
from alignment_tests.gpu.emulator import wrong
from alignment_tests.gpu.values import VALUES
from minitransformer.batch import Batch
from minitransformer.ops import attention, dispatch, grouped_linear, linear

# name: (kernel file, what stands there, the fault, the cases that see it)
MUTATIONS = {
    "a query does not see itself": ("attention_backward", "j[:, None] <= i[None, :]", "j[:, None] < i[None, :]", "att"),
    "dQ sees the next key": ("attention_backward", "j[None, :] <= i[:, None]", "j[None, :] <= i[:, None] + 1", "att"),
    "p is rounded before dS": ("attention_backward", "    ds = p * (", "    ds = p.to(tl.bfloat16) * (", "att"),
    "heads of a group the other way round": (
        "attention_backward", "    for head in range(g * GROUP, (g + 1) * GROUP):",
        "    for turn in range(GROUP):\n        head = (g + 1) * GROUP - 1 - turn", "att",
    ),
    "delta is left out": ("attention_backward", "tl.load(at + 2 * plane, mask=i < n, other=0.0)", "m * 0.0", "att"),
    "the last queries are left out": (
        "attention_backward", "range(tl.maximum(j0, last), n, QUERIES)", "range(last, last, QUERIES)", "att",
    ),
    "dX by N - 1 columns": (
        "grouped_linear_backward", "for n0 in range(0, N, DEPTH)", "for n0 in range(0, N - 1, DEPTH)", "grouped",
    ),
    "a row too many in dW": (
        "grouped_linear_backward", "    for r in range(begin, end, TILE_R):",
        "    end = tl.minimum(end + 1, tl.load(offsets_ptr + experts).to(tl.int32))\n"
        "    for r in range(begin, end, TILE_R):", "grouped",
    ),
    "dX is rounded before the routing weight": (
        "grouped_linear_backward", "to_bf16(g * weight[:, None])",
        "to_bf16(g.to(tl.bfloat16).to(tl.float32) * weight[:, None])", "grouped",
    ),
    "W rounded to MXFP8 across the sum": (
        "grouped_linear_backward", "mxfp8.round_columns(w.view(E * N, K), ends)", "mxfp8.round_rows(w.view(E * N, K))",
        "mxfp8",
    ),
    "a block of rows of two experts": (
        "grouped_linear_backward", "mxfp8.round_columns(x, bounds)",
        "mxfp8.round_columns(x, bounds[:: len(bounds) - 1].contiguous())", "mxfp8",
    ),
    "a chain in pieces": (
        "linear_backward", "acc = tl.dot(left, right, acc)",
        "acc = acc + tl.dot(left, right, tl.zeros((TILE_M, TILE_N), tl.float32))", "linear",
    ),
    "a continued chain begins at zero": (
        "linear_backward", "acc = tl.load(start_ptr + at, mask=inside, other=0.0)",
        "acc = tl.zeros((TILE_M, TILE_N), tl.float32)", "continued",
    ),
    "a chain is rounded where it stops": (
        "linear_backward", "to_bf16(acc) if y_ptr.dtype.element_ty == tl.bfloat16 else acc", "to_bf16(acc)",
        "continued",
    ),
}  # fmt: skip


def _linear() -> Iterator[tuple[str, int]]:
    kernels = importlib.import_module("minitransformer.ops.gpu.linear_backward")
    for T, N, K in ((70, 64, 72), (33, 9, 7), (600, 400, 328)):
        dy, x, w = inputs.bf16(1, T, N), inputs.bf16(2, T, K), inputs.bf16(3, N, K)
        want = linear.backward(dy, x, w)
        if N % 8:
            yield f"linear {T} {N} {K}", wrong(kernels.backward(dy, x, w, True, True), want)
        for tile in [t for t in kernels.CANDIDATES if t.tma] if N % 8 == 0 else ():  # the interpreter has no Gluon
            yield f"linear {T} {N} {K} {tile}", wrong(
                [kernels.product(dy, w, False, tile), kernels.product(dy, x, True, tile)], want
            )


def _continued() -> Iterator[tuple[str, int]]:
    kernels = importlib.import_module("minitransformer.ops.gpu.linear_backward")
    for T, N, K in ((70, 176, 72), (33, 41, 7)):
        dy, w = inputs.bf16(1, T, N), inputs.bf16(3, N, K)
        want = linear.backward(dy, None, w, need_dw=False)[:1]
        for tile in [t for t in kernels.CANDIDATES if t.tma] if N % 8 == 0 else (kernels.PLAIN,):
            acc = torch.empty(T, K)
            for part, start in ((slice(0, 16), None), (slice(16, 32), acc)):
                kernels.product(dy[:, part].contiguous(), w[part], False, tile, acc, start)
            got = kernels.product(dy[:, 32:].contiguous(), w[32:], False, tile, start=acc)
            yield f"continued {T} {N} {K} {tile}", wrong([got], want)


def _mxfp8() -> Iterator[tuple[str, int]]:
    kernels = importlib.import_module("minitransformer.ops.gpu.grouped_linear_backward")
    counts, N, K = [0, 3, 0, 40, 1, 32, 0], 72, 56
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    plan = dispatch.plan(ids[inputs.integers(5, 1 << 40, len(ids)).argsort()].view(-1, 2), len(counts))
    R, shape = sum(counts), (len(counts), N, K)
    tiles = kernels.DX_CANDIDATES[0], kernels.WEIGHTED_CANDIDATES[0], None  # what an interpreter knows
    for kind in ("normal", "tiny"):
        dy, x, w = VALUES[kind](6, R, N), VALUES[kind](7, R, K), VALUES[kind](8, *shape)
        for weights in (None, inputs.normal(9, *plan.rows_TK.shape).abs()):
            args = dy, x, w, plan, weights, True
            want = [y for y in grouped_linear.backward(*args, "mxfp8") if y is not None]
            got = kernels.backward(*args, tiles, "mxfp8")
            yield f"mxfp8 {kind} weighted {weights is not None}", wrong([y for y in got if y is not None], want)


def _grouped() -> Iterator[tuple[str, int]]:
    kernels = importlib.import_module("minitransformer.ops.gpu.grouped_linear_backward")
    for counts, N, K in (([0, 3, 0, 17, 1, 11, 0], 65, 71), ([70, 1, 0, 65, 130, 6], 136, 192)):
        ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        plan = dispatch.plan(ids[inputs.integers(5, 1 << 40, len(ids)).argsort()].view(-1, 2), len(counts))
        R, shape = sum(counts), (len(counts), N, K)
        dy, x, w = inputs.bf16(6, R, N), inputs.bf16(7, R, K), inputs.bf16(8, *shape)
        for weights in (None, inputs.normal(9, *plan.rows_TK.shape).abs()):
            want = [y for y in grouped_linear.backward(dy, x, w, plan, weights) if y is not None]
            every = zip(kernels.DX_CANDIDATES[:2], kernels.WEIGHTED_CANDIDATES[:2], (None, None), strict=True)
            for tiles in every if N % 8 == 0 else (None,):
                got = kernels.backward(dy, x, w, plan, weights, True, tiles)
                what = f"grouped {counts} weighted {weights is not None} {tiles}"
                yield what, wrong([y for y in got if y is not None], want)


def _attention() -> Iterator[tuple[str, int]]:
    kernels = importlib.import_module("minitransformer.ops.gpu.attention_backward")
    for N, G, H, lengths in ((4, 2, 32, [1, 70, 64, 130, 16]), (3, 1, 48, [33, 65])):
        q, k, v, do = (inputs.bf16(i, sum(lengths), heads, H) for i, heads in enumerate((N, G, G, N)))
        batch = Batch.packed([[0] * n for n in lengths])
        saved = attention.forward(q, k, v, batch)
        want = attention.backward(do, q, k, v, *saved, batch)
        for pair in itertools.islice(zip(kernels.DKV_CANDIDATES, kernels.DQ_CANDIDATES, strict=False), 0, None, 2):
            got = kernels.backward(do, q, k, v, *saved, batch, pair)
            yield f"att {N}/{G} heads of {H} {pair}", wrong(got, want)


SOURCES = {"linear": _linear, "continued": _continued, "grouped": _grouped, "mxfp8": _mxfp8, "att": _attention}


if __name__ == "__main__":
    emulator.main(SOURCES, MUTATIONS)
