"""grouped_linear: each row meets its own expert and its own routing weight, once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment_tests.bits import assert_bits_equal
from minitransformer.ops import dispatch, mxfp8
from minitransformer.ops import grouped_linear as op
from minitransformer.ops.grouped_linear import grouped_linear
from minitransformer.ops.mma import chain


def case(tokens=20, experts=6, slots=2, k=48, n=40, seed=0):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=gen)[:slots] for _ in range(tokens)])
    ids[ids == 1] = 0 if experts > 1 and slots == 1 else ids[ids == 1]  # with one slot, expert 1 stays empty
    plan = dispatch.plan(ids, experts)
    x = torch.randn(tokens, k, generator=gen).bfloat16()
    w = torch.randn(experts, n, k, generator=gen).bfloat16()
    weights = torch.rand(tokens, slots, generator=gen)
    return ids, plan, x, w, weights


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 24), experts=st.integers(1, 9), slots=st.integers(1, 4), k=st.integers(1, 40),
    n=st.integers(1, 40), seed=st.integers(0, 999),
)  # fmt: skip
def test_agrees_with_one_product_a_row(tokens, experts, slots, k, n, seed):
    ids, plan, x, w, weights = case(tokens, experts, min(slots, experts), k, n, seed)
    got = dispatch.slots(grouped_linear(dispatch.gather(x, plan), w, plan), plan)
    scaled = dispatch.slots(grouped_linear(dispatch.gather(x, plan), w, plan, weights), plan)
    for t in range(tokens):
        for s in range(ids.shape[1]):
            acc = chain(x[t : t + 1], w[ids[t, s]].t().contiguous())[0]
            assert_bits_equal(got[t, s], acc.bfloat16(), f"token {t}, slot {s}")
            assert_bits_equal(scaled[t, s], (acc * weights[t, s]).bfloat16(), f"token {t}, slot {s}, scaled")


def test_experts_of_scale_1_2_4_8_scale_their_own_rows():
    """A stride of zero in a scale or weight pointer would give every row expert 0's."""
    gen = torch.Generator().manual_seed(3)
    base, x = torch.randn(32, 16, generator=gen).bfloat16(), torch.randn(1, 16, generator=gen).bfloat16()
    w = torch.stack([base * 2.0**e for e in range(4)])
    plan = dispatch.plan(torch.tensor([[0, 1, 2, 3]]), 4)
    y = dispatch.slots(grouped_linear(dispatch.gather(x, plan), w, plan), plan)[0]
    for e in range(4):
        assert_bits_equal(y[e], y[0] * 2.0**e, f"expert {e}")


@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 129, 257])
def test_a_token_does_not_see_its_batch(tokens):
    _, plan, x, w, weights = case(tokens=257)
    whole = dispatch.slots(grouped_linear(dispatch.gather(x, plan), w, plan, weights), plan)
    ids = case(tokens=257)[0][:tokens]
    part = dispatch.plan(ids, 6)
    got = dispatch.slots(grouped_linear(dispatch.gather(x[:tokens], part), w, part, weights[:tokens]), part)
    assert_bits_equal(got, whole[:tokens], f"{tokens} tokens")


def reference(x, w, ids, weights):
    """FP64 of the same formula: [T, K slots, N]."""
    return torch.einsum("td,tknd->tkn", x, w[ids]) * weights[..., None]


def test_differentiates():
    """Against FP64 autograd; every gradient meets at most three BF16 roundings of 2^-9."""
    ids, plan, x, w, weights = case(tokens=30, slots=3)
    x_R = dispatch.gather(x, plan).detach().requires_grad_()
    w.requires_grad_(), weights.requires_grad_()
    dy = torch.randn(90, 40, generator=torch.Generator().manual_seed(9)).bfloat16()
    grouped_linear(x_R, w, plan, weights).backward(dy)

    slot_dy = dispatch.slots(dy, plan).double()
    xd, wd, weights_d = (v.detach().double().requires_grad_() for v in (x, w, weights))
    reference(xd, wd, ids, weights_d).backward(slot_dy)
    dx_TD = dispatch.slots(x_R.grad, plan).double().sum(1)
    for name, got, want in (("dX", dx_TD, xd.grad), ("dW", w.grad, wd.grad), ("dw", weights.grad, weights_d.grad)):
        assert ((got.double() - want).norm() / want.norm()).item() < 2**-7, name


def row_dots(x, g):
    """The lane sum of each row's products, of at most 128 columns."""
    lanes = torch.nn.functional.pad(x.float() * g, (0, 128 - x.shape[1]))
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def test_gradients_are_the_chains_of_the_spec():
    _, plan, x, w, weights = case(tokens=40, slots=1)
    x_R = dispatch.gather(x, plan)
    dy = torch.randn(40, 40, generator=torch.Generator().manual_seed(9)).bfloat16()
    dx, dw, dweights = op.backward(dy, x_R, w, plan, weights)
    scale = weights.reshape(-1)[plan.order_R]
    assert plan.offsets[1] == plan.offsets[2]  # expert 1 has no rows
    for e in range(6):
        rows = slice(plan.offsets[e], plan.offsets[e + 1])
        if rows.start == rows.stop:
            assert_bits_equal(dw[e], torch.zeros_like(dw[e]), "an expert without rows")
            continue
        g = chain(dy[rows], w[e])
        s = (dy[rows].float() * scale[rows, None]).bfloat16()
        assert_bits_equal(dx[rows], (g * scale[rows, None]).bfloat16(), f"dX of expert {e}")
        assert_bits_equal(dw[e], chain(s.t().contiguous(), x_R[rows]).bfloat16(), f"dW of expert {e}")
        assert_bits_equal(dweights.reshape(-1)[plan.order_R[rows]], row_dots(x_R[rows], g), f"dw of expert {e}")


def to_mxfp8(x, axis):
    """x rounded in blocks of 32 along one axis, zeros after its end; that axis comes last."""
    x = x.movedim(axis, -1)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).contiguous()
    return mxfp8.decode(mxfp8.quantize(padded))


def test_mxfp8_gradients_round_along_the_axis_of_their_sum():
    """dX sums over n: blocks of dY and W along n. dW sums over an expert's rows: blocks of dY and x along the rows."""
    _, plan, x, w, weights = case(tokens=80, slots=1)  # n = 40 and the experts' rows fill no whole block
    x_R = dispatch.gather(x, plan)
    dy = torch.randn(80, 40, generator=torch.Generator().manual_seed(9)).bfloat16()
    dy[:, 7] *= 1e3  # a loud column: along the rows it has blocks of its own, along n it quiets its neighbours
    dx, dw, dweights = op.backward(dy, x_R, w, plan, weights, backward_format="mxfp8")
    scale = weights.reshape(-1)[plan.order_R]
    for e in range(6):
        rows = slice(plan.offsets[e], plan.offsets[e + 1])
        if rows.start == rows.stop:
            continue
        g = chain(to_mxfp8(dy[rows], 1), to_mxfp8(w[e], 0).t().contiguous())
        assert_bits_equal(dx[rows], (g * scale[rows, None]).bfloat16(), f"dX of expert {e}")
        s = (dy[rows].float() * scale[rows, None]).bfloat16()
        want = chain(to_mxfp8(s, 0), to_mxfp8(x_R[rows], 0).t().contiguous()).bfloat16()
        assert_bits_equal(dw[e], want, f"dW of expert {e}")
        assert_bits_equal(dweights.reshape(-1)[plan.order_R[rows]], row_dots(x_R[rows], g), f"dw of expert {e}")


def test_refuses_what_does_not_fit():
    _, plan, x, w, weights = case()
    with pytest.raises(ValueError, match="the plan has 40 rows"):
        grouped_linear(x, w, plan)
    with pytest.raises(ValueError, match="routing weights"):
        grouped_linear(dispatch.gather(x, plan), w, plan, weights[:3])


def test_a_nan_is_what_the_hardware_stores():
    _, plan, x, w, weights = case()
    x[3, 7] = torch.nan
    for scale in (None, weights):
        y = op.forward(x[:20].repeat(2, 1), w, plan, scale)
        assert set(y[y != y].view(torch.int16).tolist()) == {0x7FFF} and int((y != y).sum()) == 2 * w.shape[1]
