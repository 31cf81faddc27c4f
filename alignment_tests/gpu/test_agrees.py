"""The law of the GPU: every Triton kernel gives the CPU reference's bits, for every schedule it may run with."""

import itertools

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu.values import BF16, VALUES, agree
from minitransformer.batch import Batch
from minitransformer.ops import attention, dispatch, gpu, grouped_linear, linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
FP32 = torch.float32


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("N", "K"), [(576, 576), (1536, 768), (48, 40), (129, 2048), (7, 9)])
def test_linear_for_every_number_of_rows(N, K, out_dtype):
    x, w = inputs.bf16(1, 257, K), inputs.bf16(2, N, K)
    want = linear.forward(x, w, out_dtype)
    x, w = x.cuda(), w.cuda()
    for M in range(1, 258):
        agree([linear.forward(x[:M], w, out_dtype)], [want[:M]], f"{M} rows")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("M", [13, 200])
def test_linear_for_every_schedule_and_kind_of_value(M, kind):
    N, K = 320, 576
    x, w = VALUES[kind](3, M, K), VALUES[kind](4, N, K)
    for out_dtype in (BF16, FP32):
        want = linear.forward(x, w, out_dtype)
        for tile in gpu.linear.CANDIDATES:
            got = gpu.linear.forward(x.cuda(), w.cuda(), out_dtype, tile)
            agree([got], [want], f"{tile} {out_dtype}")


def plan_of(counts: list[int], top_k: int, seed: int) -> dispatch.Plan:
    """A plan whose experts own the given numbers of rows, in a shuffled order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = inputs.integers(seed, 1 << 40, len(ids)).argsort()
    return dispatch.plan(ids[order].view(-1, top_k), len(counts))


COUNTS = {
    "empty first and last": [0, 3, 0, 0, 17, 1, 11, 0],
    "one owns all": [0, 0, 96, 0],
    "one row each": [1] * 64,
    "uneven": [130, 1, 64, 63, 65, 0, 129, 16, 15, 17, 4, 0],
    "one expert": [40],
    "nobody": [0, 0, 0],
}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("N", "K"), [(192, 576), (72, 768), (30, 40)])
def test_grouped_linear(N, K, counts):
    counts = COUNTS[counts]
    plan = plan_of(counts, 2 if sum(counts) % 2 == 0 else 1, seed=5)
    x, w = inputs.bf16(6, sum(counts), K), inputs.bf16(7, len(counts), N, K)
    weights = inputs.normal(8, *plan.rows_TK.shape).abs()
    on = plan.to("cuda")
    for scale in (None, weights):
        want = grouped_linear.forward(x, w, plan, scale)
        scale = None if scale is None else scale.cuda()
        agree([grouped_linear.forward(x.cuda(), w.cuda(), on, scale)], [want], f"weighted {scale is not None}")


@pytest.mark.parametrize("kind", VALUES)
def test_grouped_linear_for_every_schedule_and_kind_of_value(kind):
    counts, N, K = COUNTS["uneven"], 136, 192
    plan = plan_of(counts, 4, seed=9)
    x, w = VALUES[kind](10, sum(counts), K), VALUES[kind](11, len(counts), N, K)
    weights = inputs.normal(12, *plan.rows_TK.shape).abs()
    want = [grouped_linear.forward(x, w, plan, scale) for scale in (None, weights)]
    for tile in gpu.grouped_linear.CANDIDATES:
        for scale, wanted in zip((None, weights.cuda()), want, strict=True):
            got = gpu.grouped_linear.forward(x.cuda(), w.cuda(), plan.to("cuda"), scale, tile)
            agree([got], [wanted], f"{tile} weighted {scale is not None}")


def qkv(tokens: int, heads: int, kv_heads: int, width: int, seed: int, scale: float = 1.0):
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    return tuple(inputs.bf16(seed + i, *shape, scale=scale if i < 2 else 1.0) for i, shape in enumerate(shapes))


HEADS = [(8, 1, 128), (32, 4, 64), (9, 3, 64), (2, 2, 48), (14, 2, 16)]


def schedules(heads: int, kv_heads: int, width: int, longest: int) -> list:
    """Every schedule for two of the shapes (each is a compilation of seconds), the chosen one alone for the others."""
    every = gpu.attention.CANDIDATES if (heads, kv_heads, width) in (HEADS[0], HEADS[2]) else ()
    return [s for s in every if gpu.attention.fits(s, longest, heads // kv_heads, width)]


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_packed(heads, kv_heads, width, scale):
    lengths = [1, 63, 64, 65, 2, 130, 257, 16]
    q, k, v = qkv(sum(lengths), heads, kv_heads, width, seed=20, scale=scale)
    batch = Batch.packed([[0] * n for n in lengths])
    want = attention.forward(q, k, v, batch)
    q, k, v, batch = q.cuda(), k.cuda(), v.cuda(), batch.to("cuda")
    agree(attention.forward(q, k, v, batch), want, "chosen schedule")
    for schedule in schedules(heads, kv_heads, width, max(lengths)):
        agree(gpu.attention.forward(q, k, v, batch, schedule), want, str(schedule))


def paged(k, v, bounds: list[int], starts: list[int], ends: list[int], page: int, seed: int):
    """Sequences' keys and values scattered over shuffled pages of a NaN store; queries starts .. ends of each."""
    pages = [-(-end // page) for end in ends]
    free = inputs.integers(seed, 1 << 40, sum(pages) + 3).argsort().tolist()
    tables = [[free.pop() for _ in range(n)] for n in pages]
    stores = [torch.full(((sum(pages) + 3) * page, *x.shape[1:]), torch.nan, dtype=BF16) for x in (k, v)]
    batch = Batch.paged([[0] * (b - a) for a, b in zip(starts, ends, strict=True)], starts, tables, page)
    for s, end in enumerate(ends):
        rows = batch.key_rows_SL[s, :end]
        for store, x in zip(stores, (k, v), strict=True):
            store[rows] = x[bounds[s] : bounds[s] + end]
    return *stores, batch


@pytest.mark.parametrize("page", [1, 5, 16, 24, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_paged_equals_packed(heads, kv_heads, width, page):
    lengths = [1, 95, 128, 130, 64, 257, 33]
    bounds = list(itertools.accumulate(lengths, initial=0))
    q, k, v = qkv(sum(lengths), heads, kv_heads, width, seed=30)
    whole = attention.forward(q, k, v, Batch.packed([[0] * n for n in lengths]))
    for chunk in (1, 7, 64, 257):  # decode, and prefill in chunks at any offset
        starts = [max(0, n - chunk) for n in lengths]
        rows = torch.cat([torch.arange(b + a, b + n) for b, a, n in zip(bounds, starts, lengths, strict=False)])
        store_k, store_v, batch = paged(k, v, bounds, starts, lengths, page, seed=31)
        args = q[rows].cuda(), store_k.cuda(), store_v.cuda(), batch.to("cuda")
        want = [x[rows] for x in whole]
        agree(attention.forward(*args), want, f"last {chunk}")
        for schedule in schedules(heads, kv_heads, width, min(chunk, max(lengths))) if page == 16 else ():
            agree(gpu.attention.forward(*args, schedule), want, f"last {chunk} {schedule}")


@pytest.mark.parametrize("queries", [1, 2, 5, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [HEADS[0], HEADS[2], HEADS[3]])
def test_attention_over_segments(heads, kv_heads, width, queries):
    """Prefixes that end beside the bounds of segments of 1024 keys, in one batch."""
    lengths = [n for n in (1023, 1024, 1025, 1088, 2048, 3500, 40) if n >= queries]
    bounds = list(itertools.accumulate(lengths, initial=0))
    q, k, v = qkv(sum(lengths), heads, kv_heads, width, seed=40)
    starts = [n - queries for n in lengths]
    rows = torch.cat([torch.arange(b + a, b + n) for b, a, n in zip(bounds, starts, lengths, strict=False)])
    store_k, store_v, batch = paged(k, v, bounds, starts, lengths, 16, seed=41)
    want = attention.forward(q[rows], store_k, store_v, batch)
    args = q[rows].cuda(), store_k.cuda(), store_v.cuda(), batch.to("cuda")
    agree(attention.forward(*args), want, "chosen schedule")
    for schedule in schedules(heads, kv_heads, width, queries):
        agree(gpu.attention.forward(*args, schedule), want, str(schedule))


def test_attention_of_a_packed_batch_over_segments():
    lengths = [1500, 3, 2100]
    q, k, v = qkv(sum(lengths), 8, 1, 128, seed=45)
    batch = Batch.packed([[0] * n for n in lengths])
    want = attention.forward(q, k, v, batch)
    q, k, v, batch = q.cuda(), k.cuda(), v.cuda(), batch.to("cuda")
    for schedule in schedules(8, 1, 128, max(lengths)):
        agree(gpu.attention.forward(q, k, v, batch, schedule), want, str(schedule))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [HEADS[0], HEADS[2]])
def test_attention_does_not_see_another_sequences_nan(heads, kv_heads, width):
    """Keys and values that lie behind a sequence's own in its last tile of 64 and in the one after it."""
    lengths = [100, 5, 90, 64]
    q, k, v = qkv(sum(lengths), heads, kv_heads, width, seed=46)
    k[100:105] = v[100:105] = torch.nan
    batch = Batch.packed([[0] * n for n in lengths])
    rows = torch.tensor([s for s in range(sum(lengths)) if not 100 <= s < 105])
    want = [x[rows] for x in attention.forward(q, k, v, batch)]
    q, k, v, batch = q.cuda(), k.cuda(), v.cuda(), batch.to("cuda")
    for schedule in schedules(heads, kv_heads, width, max(lengths)):
        agree([x.cpu()[rows] for x in gpu.attention.forward(q, k, v, batch, schedule)], want, str(schedule))


@pytest.mark.parametrize("page", [0, 1, 16])
def test_attention_by_programs_of_many_pieces_of_work(page, monkeypatch):
    """Again and again and from a graph, of which a piece of work could overtake the one before."""
    monkeypatch.setattr(gpu.device, "multiprocessors", lambda home: 3)
    lengths, schedule = [700, 3, 300], gpu.attention.Prefill(3)
    q, k, v = qkv(sum(lengths), 8, 1, 128, seed=47)
    batch = Batch.packed([[0] * n for n in lengths])
    want = attention.forward(q, k, v, batch)
    if page:
        bounds = list(itertools.accumulate(lengths, initial=0))
        k, v, batch = paged(k, v, bounds, [0, 0, 0], lengths, page, seed=48)
    args = q.cuda(), k.cuda(), v.cuda(), batch.to("cuda"), schedule
    for turn in range(3):
        agree(gpu.attention.forward(*args), want, f"turn {turn}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [gpu.attention.forward(*args) for _ in range(2)]
    for turn in range(3):
        graph.replay()
        for one in got:
            agree(one, want, f"replay {turn}")
            for x in one:
                x.zero_()


def test_repeats():
    x, w = inputs.bf16(50, 300, 768).cuda(), inputs.bf16(51, 512, 768).cuda()
    first = linear.forward(x, w, FP32)
    for _ in range(5):
        assert_bits_equal(linear.forward(x, w, FP32), first, "again")


def test_tensors_that_do_not_lie_together_are_refused():
    from minitransformer.errors import UnsupportedDevice

    x, w = inputs.bf16(1, 4, 16), inputs.bf16(2, 8, 16)
    with pytest.raises(UnsupportedDevice, match="move them together"):
        linear.forward(x.cuda(), w)
    with pytest.raises(UnsupportedDevice, match="no kernel for device cuda"):
        linear.forward(x, w.cuda())
    with pytest.raises(TypeError, match="bfloat16"):
        linear.forward(x.cuda(), w.cuda().float())
