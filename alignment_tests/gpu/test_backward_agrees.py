"""The law of the GPU for the gradients of the products: the CPU reference's bits, for every schedule."""

import itertools
import json

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.goldens import digest
from alignment_tests.goldens import gradients as goldens
from alignment_tests.gpu.test_agrees import COUNTS, HEADS, plan_of, qkv
from alignment_tests.gpu.values import BF16, VALUES, agree
from minitransformer.batch import Batch
from minitransformer.ops import attention, dispatch, gpu, grouped_linear, linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 64, 65, 129, 257)


def on_gpu(*tensors):
    return [None if x is None else x.cuda() for x in tensors]


@pytest.mark.parametrize("name", goldens.CASES)
def test_known_answer(name):
    assert digest(goldens.CASES[name]("cuda")) == json.loads(goldens.FILE.read_text())[name]


@pytest.mark.parametrize(("N", "K"), [(576, 576), (768, 2048), (2048, 768), (48, 40), (129, 128), (7, 9)])
def test_linear_for_every_number_of_rows(N, K):
    dy, x, w = inputs.bf16(1, 257, N), inputs.bf16(2, 257, K), inputs.bf16(3, N, K)
    wide = dy.float() * 1.0009765625  # an FP32 gradient that is no BF16, as logits have
    for T in ROWS:
        for d in (dy[:T], wide[:T]):
            want = linear.backward(d, x[:T], w)
            agree(linear.backward(*on_gpu(d, x[:T], w)), want, f"{T} rows {d.dtype}")


# One schedule a test: each is a compilation of seconds, which no two workers then share.
@pytest.mark.parametrize("which", range(4))
def test_linear_for_every_schedule_and_kind_of_value(which):
    N, K, (product, tiles) = 320, 576, (gpu.linear_backward.product, gpu.linear_backward.CANDIDATES)
    assert len(tiles) == 4
    for T, kind in itertools.product((13, 150), VALUES):
        dy, x, w = VALUES[kind](4, T, N), VALUES[kind](5, T, K), VALUES[kind](6, N, K)
        want = linear.backward(dy, x, w)
        dy, x, w = on_gpu(dy, x, w)
        got = product(dy, w, False, tiles[which]), product(dy, x, True, tiles[which])
        agree(got, want, f"{tiles[which]} {kind} {T} rows")


@pytest.mark.parametrize("which", range(5))
def test_a_continued_chain_for_every_schedule_and_kind_of_value(which):
    """dX by the weight's rows 0..15, then 16..207 in place, then the rest: the chain over all of them."""
    product, tile = gpu.linear_backward.product, (*gpu.linear_backward.CANDIDATES, gpu.linear_backward.PLAIN)[which]
    N, K = (320, 576) if which < 4 else (319, 77)
    for T, kind in itertools.product((13, 150), VALUES):
        dy, w = VALUES[kind](7, T, N), VALUES[kind](8, N, K)
        want = linear.backward(dy, dy, w, need_dw=False)[0]
        dy, w = on_gpu(dy, w)
        acc = torch.full((T, K), 7.0, device="cuda")
        for part, start in ((slice(0, 16), None), (slice(16, 208), acc)):
            product(dy[:, part].contiguous(), w[part], False, tile, acc, start)
        got = product(dy[:, 208:].contiguous(), w[208:], False, tile, start=acc)
        agree([got], [want], f"{tile} {kind} {T} rows")


def experts(kind: str, counts: list[int], N: int, K: int, seed: int):
    plan = plan_of(counts, 2 if sum(counts) % 2 == 0 else 1, seed)
    shapes = ((sum(counts), N), (sum(counts), K), (len(counts), N, K))
    operands = [VALUES[kind](seed + i, *shape) for i, shape in enumerate(shapes)]
    return plan, *operands, inputs.normal(seed + 3, *plan.rows_TK.shape).abs()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("N", "K"), [(192, 576), (72, 768), (30, 40)])
def test_grouped_linear(N, K, counts):
    plan, dy, x, w, weights = experts("normal", COUNTS[counts], N, K, 10)
    for scale in (None, weights):
        for need_dw in (True, False):
            want = [y for y in grouped_linear.backward(dy, x, w, plan, scale, need_dw) if y is not None]
            args = (*on_gpu(dy, x, w), plan.to("cuda"), *on_gpu(scale), need_dw)
            got = [y for y in grouped_linear.backward(*args) if y is not None]
            agree(got, want, f"weighted {scale is not None}, dW {need_dw}")


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "few values"])
def test_grouped_linear_mxfp8(kind, counts):
    """Operands rounded along the axis of the sum, on widths that are multiples of 32, of 8, and of neither."""
    for N, K in ((192, 576), (72, 40), (30, 50)):
        plan, dy, x, w, weights = experts(kind, COUNTS[counts], N, K, 40)
        for scale in (None, weights):
            want = [y for y in grouped_linear.backward(dy, x, w, plan, scale, True, "mxfp8") if y is not None]
            args = (*on_gpu(dy, x, w), plan.to("cuda"), *on_gpu(scale), True, "mxfp8")
            got = [y for y in grouped_linear.backward(*args) if y is not None]
            agree(got, want, f"{N} x {K} weighted {scale is not None}")


def test_mxfp8_gradients_of_a_value_that_is_not_finite_are_not_finite():
    """The CPU raises; here the norm of the gradients is not finite, and no update is made."""
    plan, dy, x, w, _ = experts("normal", COUNTS["uneven"], 64, 96, 50)
    for bad in (torch.inf, torch.nan):
        dy[3, 5] = bad
        with pytest.raises(FloatingPointError):
            grouped_linear.backward(dy, x, w, plan, None, True, "mxfp8")
        dx, dw, _ = grouped_linear.backward(*on_gpu(dy, x, w), plan.to("cuda"), None, True, "mxfp8")
        assert dx[3].isnan().all() and dw[:, 5].isnan().any(), bad


# A NaN that FP32 arithmetic makes has another sign on each machine; the routing weights' gradient is FP32.
@pytest.mark.parametrize("which", range(3))
def test_grouped_linear_for_every_schedule_and_kind_of_value(which):
    module = gpu.grouped_linear_backward
    every = module.DX_CANDIDATES, module.WEIGHTED_CANDIDATES
    assert max(map(len, every)) == 3
    tiles = (*(some[which % len(some)] for some in every), (module.DW, None)[which % 2])
    for kind in VALUES:
        plan, dy, x, w, weights = experts(kind, COUNTS["uneven"], 192, 136 if which < 2 else 384, 20)
        for scale in (None, weights):
            want = grouped_linear.backward(dy, x, w, plan, scale)
            dots = 2 if scale is None or kind in ("special", "finite") else 3
            got = module.backward(*on_gpu(dy, x, w), plan.to("cuda"), *on_gpu(scale), True, tiles)
            agree(got[:dots], want[:dots], f"{kind} {tiles} weighted {scale is not None}")


def test_experts_dx_with_more_pairs_than_run_at_once(monkeypatch):
    """A pair of blocks waits only for those that began before it: no place that it needs is held by one that waits."""
    monkeypatch.setattr(gpu.device, "multiprocessors", lambda _: 2000)
    plan, dy, x, w, weights = experts("normal", [300] * 40, 64, 640, 60)
    want = grouped_linear.backward(dy, x, w, plan, weights, False)
    for _ in range(3):
        got = grouped_linear.backward(*on_gpu(dy, x, w), plan.to("cuda"), *on_gpu(weights), False)
        agree(got[::2], want[::2], "dX and dots")


def gradients_of_attention(q, k, v, do, batch, home="cpu", schedules=None):
    q, k, v, do, batch = *(x.to(home) for x in (q, k, v, do)), batch.to(home)
    saved = attention.forward(q, k, v, batch)
    if schedules:
        return gpu.attention_backward.backward(do, q, k, v, *saved, batch, schedules)
    return attention.backward(do, q, k, v, *saved, batch)


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention(heads, kv_heads, width, scale):
    lengths = [1, 63, 64, 65, 2, 130, 257, 16]
    q, k, v = qkv(sum(lengths), heads, kv_heads, width, seed=30, scale=scale)
    do, batch = inputs.bf16(33, *q.shape), Batch.packed([[0] * n for n in lengths])
    want = gradients_of_attention(q, k, v, do, batch)
    agree(gradients_of_attention(q, k, v, do, batch, "cuda"), want, "chosen schedules")


@pytest.mark.parametrize("shape", [HEADS[0], HEADS[2]])
@pytest.mark.parametrize("which", range(7))
def test_attention_for_every_schedule(which, shape):
    module, lengths = gpu.attention_backward, [1, 65, 130, 40]
    every = module.DKV_CANDIDATES, module.DQ_CANDIDATES
    assert max(map(len, every)) == 7
    pair = tuple(some[which % len(some)] for some in every)
    q, k, v = qkv(sum(lengths), *shape, seed=36)
    do, batch = inputs.bf16(39, *q.shape), Batch.packed([[0] * n for n in lengths])
    want = gradients_of_attention(q, k, v, do, batch)
    agree(gradients_of_attention(q, k, v, do, batch, "cuda", pair), want, str(pair))


@pytest.mark.parametrize("lengths", [(737, 63), (1100, 5), (2100, 1030)])
@pytest.mark.parametrize("width", [64, 128])
def test_attention_of_long_sequences(width, lengths):
    """The forward folds segments of 1,024 keys; the gradients' chains pass their ends."""
    q, k, v = qkv(sum(lengths), 4, 2, width, seed=40)
    do, batch = inputs.bf16(43, *q.shape), Batch.packed([[0] * n for n in lengths])
    want = gradients_of_attention(q, k, v, do, batch)
    agree(gradients_of_attention(q, k, v, do, batch, "cuda"), want, "long")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_attention_keeps_a_neighbours_nan_out(bad):
    """Sequences whose ends fall inside a tile: a NaN in one must not reach the gradients of the others."""
    lengths = [70, 33, 50]
    q, k, v = qkv(sum(lengths), 4, 2, 64, seed=50)
    do, batch = inputs.bf16(53, *q.shape), Batch.packed([[0] * n for n in lengths])
    do[70 + 3, 1, 5] = bad
    want = gradients_of_attention(q, k, v, do, batch)
    agree(gradients_of_attention(q, k, v, do, batch, "cuda"), want, "neighbours")
    assert all(x[:70].isfinite().all() and x[103:].isfinite().all() for x in want)


def test_grouped_linear_keeps_a_neighbours_nan_out():
    plan, dy, x, w, _ = experts("normal", [5, 70, 1, 20], 64, 72, 60)
    for t in (dy, x):
        t[5:75] = torch.nan
    want = grouped_linear.backward(dy, x, w, plan, None)
    module = gpu.grouped_linear_backward
    for tiles in (None, (module.DX_CANDIDATES[-1], module.WEIGHTED_CANDIDATES[-1], module.DW)):
        got = module.backward(*on_gpu(dy, x, w), plan.to("cuda"), None, True, tiles)
        agree(got[:2], want[:2], f"neighbours {tiles}")
    assert want[1][[0, 2, 3]].isfinite().all()


def test_repeats():
    plan = dispatch.plan(inputs.integers(70, 16, 300, 4), 16).to("cuda")
    dy, x, w = on_gpu(inputs.bf16(71, 1200, 256), inputs.bf16(72, 1200, 192), inputs.bf16(73, 16, 256, 192))
    first = grouped_linear.backward(dy, x, w, plan, None)
    for _ in range(5):
        for a, b in zip(grouped_linear.backward(dy, x, w, plan, None)[:2], first[:2], strict=True):
            assert_bits_equal(a, b, "again")
    q, k, v = (t.cuda() for t in qkv(700, 8, 2, 64, seed=74))
    do, batch = inputs.bf16(77, *q.shape).cuda(), Batch.packed([[0] * 700]).to("cuda")
    first = gradients_of_attention(q, k, v, do, batch, "cuda")
    for _ in range(5):
        for a, b in zip(gradients_of_attention(q, k, v, do, batch, "cuda"), first, strict=True):
            assert_bits_equal(a, b, "again")


def test_sums_of_squares():
    from minitransformer.learner.gradients import _squares

    tensors = [inputs.normal(80 + i, n) for i, n in enumerate((1, 127, 128, 4096, 4097, 100_003, 1 << 20))]
    assert list(_squares([x.cuda() for x in tensors])) == list(_squares(tensors))


def test_what_has_no_kernel_is_refused():
    _, dy, x, w, _ = experts("normal", [5, 27], 64, 64, 90)
    with pytest.raises(TypeError, match="bfloat16"):
        linear.backward(dy.cuda(), x.cuda().float(), w[0].cuda())
    assert dy.dtype == BF16
