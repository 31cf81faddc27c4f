"""The products and attention, by the schedules that are chosen and, on a GPU, by those that other sizes take."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops import attention, gpu, grouped_linear, linear
from minitransformer.tuning import proof, table
from minitransformer.tuning.selfcheck import cases
from minitransformer.tuning.selfcheck.cases import BF16, COUNTS, FP32, Pair, both, check, normal, numbers, values


def _tiles_of_the_table(op: str, home: torch.device) -> list[tuple]:
    """The schedules that the package's table names for a product; none on a CPU."""
    if home.type == "cpu":
        return []
    rows = (row for row in table.read(table.SHIPPED).rows if row.product.op == op and row.tile)
    return [gpu.tiles.Tile(*tile) for tile in sorted({row.tile for row in rows})]


def _also(pair: Pair, home: torch.device, runs: Iterable[tuple[Any, Callable]], *operands: Any) -> Iterator[Pair]:
    """The case once more by other schedules."""
    for name, run in runs:
        yield Pair(f"{pair.what}, {name}", cases.on_gpu(run, operands, home), pair.want)


@check("linear")
def _linear(home: torch.device) -> Iterator[Pair]:
    for M, out in ((1, BF16), (9, FP32), (40, BF16), (300, FP32), (2100, BF16)):
        x, w = proof.operands("mixed", M, 136, 192, M, "cpu")
        yield both(f"{M} rows to {out}", home, partial(linear.forward, out_dtype=out), x, w)
    x, w = proof.operands("mixed", 40, 200, 1024, 7, "cpu")
    want = linear.forward(x, w)
    for tile in _tiles_of_the_table("linear", home):
        rows = x[: tile.m] if tile.whole else x
        run = partial(gpu.linear.forward, out_dtype=BF16, tile=tile)
        yield Pair(f"tile {tile}", cases.on_gpu(run, (rows, w), home), [want[: len(rows)]])
    x, w, dy = values(8, 150, 192), values(9, 136, 192), values(10, 150, 136)
    for d in (dy, cases.wide_fp32(numbers(11, 150, 136))):
        chosen = both(f"gradients of {d.dtype}", home, linear.backward, d, x, w)
        yield chosen
        if home.type == "cuda" and d is dy:
            tiles = ((tile, partial(_gradients_by, tile)) for tile in gpu.linear_backward.CANDIDATES)
            yield from _also(chosen, home, tiles, d, x, w)
    for T, N, K in ((150, 136, 192), (2100, 72, 136), (40, 57, 77)):
        yield both(f"dX of {T} rows in parts", home, _dx_in_parts, values(56, T, N), values(57, N, K, left=False))


def _dx_in_parts(dy: Tensor, w: Tensor) -> Tensor:
    acc = linear.continue_dx(dy[:, :16], w[:16], None, last=False)
    acc = linear.continue_dx(dy[:, 16:48], w[16:48], acc, last=False)
    return linear.continue_dx(dy[:, 48:], w[48:], acc, last=True)


def _gradients_by(tile: tuple, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = gpu.linear_backward.product
    return product(dy, w, False, tile), product(dy, x, True, tile)


@check("grouped_linear")
def _grouped_linear(home: torch.device) -> Iterator[Pair]:
    plan, R, E, N, K = cases.uneven_plan(), sum(COUNTS), len(COUNTS), 136, 192
    x, w = values(12, R, K), values(13, E, N, K, left=False)
    weights = cases.integers(14, 1000, *plan.rows_TK.shape).float() / 512
    for op, scale in (("grouped_linear", None), ("grouped_linear weighted", weights)):
        chosen = both(op, home, grouped_linear.forward, x, w, plan, scale)
        yield chosen
        tiles = ((tile, partial(gpu.grouped_linear.forward, tile=tile)) for tile in _tiles_of_the_table(op, home))
        yield from _also(chosen, home, tiles, x, w, plan, scale)
    N, K = 192, 256
    x, w, dy = numbers(15, R, K), numbers(16, E, N, K), numbers(17, R, N)
    for scale, form in itertools.product((None, weights), ("bf16", "mxfp8")):
        run = partial(grouped_linear.backward, backward_format=form)
        chosen = both(f"gradients {form}, weighted {scale is not None}", home, run, dy, x, w, plan, scale)
        yield chosen
        if home.type == "cuda" and form == "bf16":
            back = gpu.grouped_linear_backward
            tiles = ((tile, partial(back.backward, tiles=(tile, tile, back.DW))) for tile in back.DX_CANDIDATES)
            yield from _also(chosen, home, tiles, dy, x, w, plan, scale)


def _paged(k: Tensor, v: Tensor, lengths: list[int], starts: list[int], page: int) -> tuple[Tensor, Tensor, Batch]:
    """Keys and values over shuffled pages of a NaN store; the queries from starts on."""
    pages = [-(-n // page) for n in lengths]
    free = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(18)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in pages]
    batch = Batch.paged([[0] * (n - a) for a, n in zip(starts, lengths, strict=True)], starts, tables, page)
    stores = [torch.full(((sum(pages) + 2) * page, *x.shape[1:]), torch.nan, dtype=BF16) for x in (k, v)]
    for s, (begin, n) in enumerate(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)):
        for store, x in zip(stores, (k, v), strict=True):
            store[batch.key_rows_SL[s, :n]] = x[begin : begin + n]
    return *stores, batch


@check("attention")
def _attention(home: torch.device) -> Iterator[Pair]:
    for N, G, H in ((8, 1, 128), (9, 3, 64), (2, 2, 48)):
        lengths = [1, 64, 65, 150] if H == 128 else [33, 100]
        q, k, v, do = (normal(19 + i, sum(lengths), heads, H) for i, heads in enumerate((N, G, G, N)))
        batch = Batch.packed([[0] * n for n in lengths])
        saved = attention.forward(q, k, v, batch)
        yield both(f"packed, heads of {H}", home, attention.forward, q, k, v, batch)
        yield both(f"gradients, heads of {H}", home, attention.backward, do, q, k, v, *saved, batch)
    # Decode of a few keys and over segments of 1024, and prefill in chunks, out of pages.
    for H, lengths, queries in ((128, [1, 95, 130], 1), (128, [1025, 2100, 40], 1), (128, [1100, 130], 60),
                                (64, [70, 1030], 2)):  # fmt: skip
        N, G = (8, 1) if H == 128 else (9, 3)
        q, k, v = (normal(23 + i, sum(lengths), heads, H) for i, heads in enumerate((N, G, G)))
        starts = [max(0, n - queries) for n in lengths]
        begins = itertools.accumulate(lengths, initial=0)
        rows = torch.cat([torch.arange(b + a, b + n) for b, a, n in zip(begins, starts, lengths, strict=False)])
        k, v, batch = _paged(k, v, lengths, starts, 16)
        what = f"paged, the last {queries} of {lengths}, heads of {H}"
        chosen = both(what, home, attention.forward, q[rows], k, v, batch)
        yield chosen
        if home.type == "cuda" and lengths[0] > 1024:
            every = gpu.attention.CANDIDATES
            runs = ((s, partial(gpu.attention.forward, schedule=s)) for s in every
                    if gpu.attention.fits(s, queries, N // G, H))  # fmt: skip
            yield from _also(chosen, home, runs, q[rows], k, v, batch)
            apart = "no two rows known to lie together", gpu.attention.forward
            yield from _also(chosen, home, [apart], q[rows], k, v, replace(batch, page_size=1))
