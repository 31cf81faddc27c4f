"""The law of the GPU for the row-wise operators, forward and backward: the CPU reference's bits."""

import json

import numpy as np
import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.goldens import digest, row_ops
from alignment_tests.gpu.values import BF16, VALUES, agree
from minitransformer.errors import InputError
from minitransformer.ops import (
    dispatch,
    embedding,
    gpu,
    kv_store,
    logprob,
    rms_norm,
    rope,
    rounding,
    router,
    sample,
    swiglu,
)  # fmt: skip
from minitransformer.ops.jit import jit

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
ROWS = (1, 2, 3, 5, 8, 31, 64, 129, 257)
# A NaN that FP32 arithmetic makes has another sign on each machine, so outputs in FP32 are compared without NaN.
NUMBERS = [kind for kind in VALUES if kind not in ("special", "finite")]


@pytest.mark.parametrize("name", [name for name in row_ops.CASES if name != "exp2_table"])
def test_known_answer(name):
    want = json.loads(row_ops.FILE.read_text())[name]
    assert digest(row_ops.CASES[name]("cuda")) == want


@jit
def _apply_cpu(kind, x, out):
    for i in range(x.size):
        if kind == 0:
            out[i] = rounding.exp2_32(x[i])
        elif kind == 1:
            out[i] = rounding.log_32(x[i])
        elif kind == 2:
            out[i] = rounding.silu_32(x[i])
        else:
            out[i] = rounding.sigmoid_32(x[i])


def test_scalar_functions_for_any_bits():
    from alignment_tests.gpu.scalar_kernel import apply

    x = torch.cat([inputs.f32_of_any_bits(1, 1 << 20), inputs.normal(2, 1 << 20, scale=64.0)])
    for kind, name in enumerate(("exp2_32", "log_32", "silu_32", "sigmoid_32")):
        want = np.empty(x.numel(), np.float32)
        _apply_cpu(kind, x.numpy(), want)
        want, got = torch.from_numpy(want), apply(kind, x.cuda()).cpu()
        assert torch.equal(got.isnan(), want.isnan()), name
        assert_bits_equal(got.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
                          want.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), name)  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("D", [16, 64, 128, 576, 768, 2048])
def test_rms_norm(D, kind):
    x, r, dy, dr = (VALUES[kind](seed, 257, D) for seed in (1, 2, 3, 4))
    w = inputs.bf16(5, D)
    for residual in (None, r):
        want = [y for y in rms_norm.forward(x, residual, w, 1e-6) if y is not None]
        for T in ROWS:
            old = None if residual is None else residual[:T].cuda()
            got = [y for y in rms_norm.forward(x[:T].cuda(), old, w.cuda(), 1e-6) if y is not None]
            agree(got, [y[:T] for y in want], f"{T} rows")
            down = None if residual is None else dr[:T]
            args = dy[:T], down, x[:T], None if residual is None else residual[:T], w
            back = rms_norm.backward(*args, 1e-6)
            agree(rms_norm.backward(*(None if a is None else a.cuda() for a in args), 1e-6), back, f"{T} rows back")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(("heads", "head"), [(32, 128), (9, 64), (3, 48), (1, 2)])
def test_rope(heads, head, kind):
    x, table = VALUES[kind](6, 257, heads, head), rope.rope_table(head, 1e6, 4096)
    positions = inputs.integers(7, 4096, 257)
    for sign in (1.0, -1.0):
        want = rope.rotate(x, positions, table, sign)
        for T in ROWS:
            got = rope.rotate(x[:T].cuda(), positions[:T].cuda(), table.cuda(), sign)
            agree([got], [want[:T]], f"{T} rows, sign {sign}")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("F", [8, 96, 768, 1536])
def test_swiglu(F, kind):
    x, dh = VALUES[kind](8, 257, 2 * F), VALUES[kind](9, 257, F)
    wide = x.float() * 1.0009765625  # FP32 operands that are no BF16
    want, back = swiglu.forward(x), swiglu.backward(dh, x)
    amax, back32 = swiglu.forward_amax(wide), swiglu.backward(dh, wide)
    for T in ROWS:
        agree([swiglu.forward(x[:T].cuda())], [want[:T]], f"{T} rows")
        agree([swiglu.backward(dh[:T].cuda(), x[:T].cuda())], [back[:T]], f"{T} rows back")
        agree(swiglu.forward_amax(wide[:T].cuda()), [y[:T] for y in amax], f"{T} rows amax")
        agree([swiglu.backward(dh[:T].cuda(), wide[:T].cuda())], [back32[:T]], f"{T} rows back from FP32")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("E", "K"), [(128, 8), (8, 2), (100, 5), (200, 8), (1, 1), (16, 16)])
def test_router(E, K, kind, norm):
    x, dw = VALUES[kind](10, 257, E), inputs.normal(11, 257, K)
    want = router.forward(x, K, norm)
    back = router.backward(dw, x, norm, *want)
    for T in ROWS:
        agree(router.forward(x[:T].cuda(), K, norm), [y[:T] for y in want], f"{T} rows")
        args = [y[:T].cuda() for y in want]
        agree([router.backward(dw[:T].cuda(), x[:T].cuda(), norm, *args)], [back[:T]], f"{T} rows back")


PLANS = [
    (1, 128, 8), (65, 128, 8), (257, 128, 8), (3000, 128, 8), (5000, 128, 8), (16384, 128, 8), (70, 3, 2), (5, 1, 1),
    (0, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize(("T", "E", "K"), PLANS)
def test_plan(T, E, K):
    ids = inputs.integers(12, E, T, K)
    got, want = dispatch.plan(ids.cuda(), E), dispatch.plan(ids, E)
    agree([got.order_R, got.rows_TK, got.bounds_E1], [want.order_R, want.rows_TK, want.bounds_E1], "plan")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("D", [40, 576, 2048])
def test_gather_and_combine(D, kind):
    for T, E, K in ((257, 16, 8), (3, 128, 8), (64, 4, 1), (33, 8, 2)):
        plan, x, y = dispatch.plan(inputs.integers(13, E, T, K), E), VALUES[kind](14, T, D), VALUES[kind](15, T * K, D)
        weights, on = inputs.normal(16, T, K).abs(), plan.to("cuda")
        agree([dispatch.gather_forward(x.cuda(), on)], [dispatch.gather_forward(x, plan)], "gather")
        agree(dispatch.gather_amax_forward(x.cuda(), on), dispatch.gather_amax_forward(x, plan), "gather_amax")
        agree([dispatch.combine_forward(y.cuda(), on)], [dispatch.combine_forward(y, plan)], "combine")
        want = dispatch.combine_weighted_forward(y, plan, weights)
        agree([dispatch.combine_weighted_forward(y.cuda(), on, weights.cuda())], [want], "combine_weighted")
        if kind in NUMBERS:
            want = dispatch.combine_weighted_backward(x, y, plan, weights)
            got = dispatch.combine_weighted_backward(x.cuda(), y.cuda(), on, weights.cuda())
            agree(got, want, "combine_weighted back")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(("V", "D"), [(97, 576), (5, 2048), (300, 40)])
def test_embedding(V, D, kind):
    weight, ids, dx = VALUES[kind](17, V, D), inputs.integers(18, V, 257), VALUES[kind](19, 257, D)
    for T in ROWS:
        got = embedding.forward(ids[:T].cuda(), weight.cuda())
        agree([got], [embedding.forward(ids[:T], weight)], f"{T} rows")
        got = embedding.backward(dx[:T].cuda(), ids[:T].cuda(), (V, D))
        agree([got], [embedding.backward(dx[:T], ids[:T], (V, D))], f"{T} rows back")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("V", [1, 96, 1024, 5003, 49152, 151936])
def test_logprob(V, temperature):
    T = 9
    x, ids, dout = inputs.normal(20, T, V, scale=4.0), inputs.integers(21, V, T), inputs.normal(22, T)
    x[1:4] *= 1e4  # far apart: exponentials that flush to 0
    if V > 1:
        x[4, inputs.integers(23, V - 1, V // 3) + 1] = -torch.inf
    want = logprob.forward(x, ids, temperature)
    got = logprob.forward(x.cuda(), ids.cuda(), temperature)
    agree(got, want, "forward")
    back = logprob.backward(dout, x, ids, temperature, want[1])
    agree([logprob.backward(dout.cuda(), x.cuda(), ids.cuda(), temperature, got[1])], [back], "backward")
    # Some columns, rounded, a temperature a row; one of the ids lies among them, the others before or behind.
    first, temperatures = int(ids[5]) // 16 * 16, torch.linspace(0.5, 2, T)
    some = dout, x[:, first : first + 80].contiguous(), ids, temperatures, want[1]
    back = logprob.backward(*some, first, torch.bfloat16)
    agree([logprob.backward(*(t.cuda() for t in some), first, torch.bfloat16)], [back], "backward of some columns")


def test_kv_store():
    k, v, rows = inputs.bf16(24, 257, 4, 64), inputs.bf16(25, 257, 4, 64), inputs.integers(26, 1 << 40, 600).argsort()
    for T in ROWS:
        want = [torch.zeros(600, 4, 64, dtype=BF16) for _ in range(2)]
        got = [x.cuda() for x in want]
        kv_store.store(k[:T], v[:T], *want, rows[:T])
        kv_store.store(k[:T].cuda(), v[:T].cuda(), *got, rows[:T].cuda())
        agree(got, want, f"{T} rows")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(("N", "G", "H"), [(32, 4, 128), (9, 3, 64), (4, 2, 16), (1, 1, 4)])
def test_qkv_in_one_kernel(N, G, H, kind):
    x, table = VALUES[kind](50, 257, N + 2 * G, H), rope.rope_table(H, 1e6, 4096)
    rows, positions = inputs.integers(51, 1 << 40, 300).argsort()[:257], inputs.integers(52, 4096, 257)
    qw, kw = inputs.bf16(53, 2, H)
    q, k, v = (part.contiguous() for part in x.split([N, G, G], 1))
    q, k = (rms_norm.forward(part, None, w, 1e-6)[0] for part, w in ((q, qw), (k, kw)))
    q, k = (rope.rotate(part, positions, table) for part in (q, k))
    for T in ROWS:
        want = [torch.zeros(300, G, H, dtype=BF16) for _ in range(2)]
        got = [store.cuda() for store in want]
        kv_store.store(k[:T], v[:T], *want, rows[:T])
        place = x[:T].cuda(), qw.cuda(), kw.cuda(), 1e-6, positions[:T].cuda(), table.cuda(), *got, rows[:T].cuda()
        agree([gpu.qkv.forward(*place), *got], [q[:T], *want], f"{T} rows")


@pytest.mark.parametrize("V", [1, 96, 5003, 151936])
def test_sample(V):
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.9), (0.8, 200, 0.95), (1.0, 1, 0.01)]
    for row in range(3):
        x = inputs.normal(30 + row, V, scale=4.0)
        x = x.round() if row == 2 else x  # many equal logits
        for option in options:
            for position in (0, 5, 1 << 40):
                seed = (1 << 63) + 11 * row
                want = sample.sample(x, seed, position, *option)
                assert sample.sample(x.cuda(), seed, position, *option) == want, (row, option, position)


@pytest.mark.parametrize("scale", [0.01, 4.0, 100.0])
def test_sample_of_many_rows(scale):
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 0, 0.9), (0.8, 200, 0.95)]
    x = inputs.normal(33, 70, 20011, scale=scale)
    x[30:40, :10000] = -torch.inf
    for kinds in (options, options[:3]):
        draws = [gpu.sample.Draw(7919 * i, 3 * i, *kinds[i % len(kinds)], 1.0) for i in range(70)]
        got = [token for token, _ in gpu.sample.draw(x.cuda(), draws)]
        assert got == [sample.sample(row, *d[:5]) for row, d in zip(x, draws, strict=True)]


def test_a_value_that_the_spec_refuses_is_named_at_the_next_check():
    home, table = torch.device("cuda", 0), rope.rope_table(64, 1e6, 16)
    x = inputs.bf16(40, 5, 2, 64).cuda()
    ids, rows = torch.tensor([0, 1, 9, 9]).cuda(), torch.tensor([0, 4, 1, 2, 3]).cuda()
    nan, zero = torch.full((1, 4), torch.nan).cuda(), torch.zeros(1, dtype=torch.int64).cuda()
    logits = inputs.bf16(41, 5, 8)
    logits[3, 2] = torch.nan
    cache = [torch.zeros(4, 2, 64, dtype=BF16, device=home) for _ in range(2)]
    cases = {
        "embedding: row 2": lambda: embedding.forward(ids, x.view(10, 64)[:9]),
        "rope: row 4": lambda: rope.rotate(x, torch.tensor([0, 1, 2, 15, 16]).cuda(), table.cuda()),
        "router: row 3": lambda: router.forward(logits.cuda(), 2, True),
        "plan: row 1": lambda: dispatch.plan(torch.tensor([[0, 1], [2, 8]]).cuda(), 8),
        "kv_store: row 1": lambda: kv_store.store(x, x, *cache, rows),
        "logprob: row 0": lambda: logprob.forward(nan, zero, 1.0),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(InputError, match=message):
            call()
            gpu.device.check(home)
        gpu.device.check(home)
