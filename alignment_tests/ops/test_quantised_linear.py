"""quantised_linear: the chain on decoded operands, outer scales in the epilogue, straight-through gradients."""

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from minitransformer.errors import InputError
from minitransformer.ops import dispatch, grouped_linear, nvfp4
from minitransformer.ops import quantised_linear as op
from minitransformer.ops.mma import chain
from minitransformer.ops.quantised_linear import quantised_linear


def case(tokens=20, experts=5, slots=2, k=64, n=48, seed=0):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=gen)[:slots] for _ in range(tokens)])
    plan = dispatch.plan(ids, experts)
    x = dispatch.gather(torch.randn(tokens, k, generator=gen).bfloat16(), plan)
    w = (torch.randn(experts, n, k, generator=gen) * 0.1).bfloat16()
    return plan, x, w


def operands(x, w, weight_outer="expert"):
    qx, qw = nvfp4.quantize(x, "row"), nvfp4.quantize(w, weight_outer)
    scale_EN = nvfp4.expand_rows(qw.outer, tuple(w.shape[:2])).reshape(w.shape[:2]).contiguous()
    return (nvfp4.decode(qx), qx.outer), (nvfp4.decode(qw), scale_EN)


def spans(plan):
    """(expert, (first row, last row)) of every expert that owns rows."""
    bounds = zip(plan.offsets, plan.offsets[1:], strict=False)
    return [(e, (a, b)) for e, (a, b) in enumerate(bounds) if b > a]


@pytest.mark.parametrize("weight_outer", ["expert", "row"])
def test_agrees_with_one_product_a_row(weight_outer):
    plan, x, w = case()
    (xd, sx), (wd, sw) = operands(x, w, weight_outer)
    got = quantised_linear(x, w, (xd, sx), (wd, sw), plan, torch.float32)
    rounded = quantised_linear(x, w, (xd, sx), (wd, sw), plan, torch.bfloat16)
    for e in range(5):
        for r in range(plan.offsets[e], plan.offsets[e + 1]):
            acc = chain(xd[r : r + 1], wd[e].t().contiguous())[0]
            want = acc * (sx[r] * sw[e])
            assert_bits_equal(got[r], want, f"row {r} of expert {e}")
            assert_bits_equal(rounded[r], want.bfloat16(), f"row {r} of expert {e}, rounded")


def test_gate_and_up_keep_their_own_scale():
    """Halves scaled 1 and 2, and 3.85e-5 and 4.83e-5: neither half may see the other's."""
    plan, x, w = case(n=32)
    x_operand, (wd, _) = operands(x, w)
    for gate, up in ((1.0, 2.0), (3.85e-5, 4.83e-5)):
        scale = torch.tensor([[gate] * 16 + [up] * 16]).expand(5, -1).contiguous()
        y = quantised_linear(x, w, x_operand, (wd, scale), plan, torch.float32)
        for half, s in ((slice(0, 16), gate), (slice(16, 32), up)):
            acc = torch.cat([chain(x_operand[0][a:b], wd[e].t().contiguous()) for e, (a, b) in spans(plan)])
            want = acc * (x_operand[1][:, None] * torch.tensor(s))
            assert_bits_equal(y[:, half].contiguous(), want[:, half].contiguous(), f"scale {s}")


def test_quantising_is_worth_something():
    """W4A4 of random numbers stays within about 15 % of BF16; a wrong scale would be off by far more."""
    plan, x, w = case(tokens=60, k=256)
    y = quantised_linear(x, w, *operands(x, w), plan, torch.float32)
    want = grouped_linear.forward(x, w, plan).float()
    assert ((y - want).norm() / want.norm()).item() < 0.18


def test_gradients_are_straight_through():
    plan, x, w = case()
    x.requires_grad_(), w.requires_grad_()
    y = quantised_linear(x, w, *operands(x.detach(), w.detach()), plan, torch.float32)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(dy.float())
    dx, dw, _ = grouped_linear.backward(dy, x.detach(), w.detach(), plan, None)
    assert_bits_equal(x.grad, dx, "dX")
    assert_bits_equal(w.grad, dw, "dW")


def test_mxfp8_gradients_are_near_and_not_the_same():
    plan, x, w = case(tokens=80)
    dy = torch.randn(160, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    near, exact = (op.backward(dy, x, w, plan, kind) for kind in ("mxfp8", "bf16"))
    for a, b in zip(near, exact, strict=True):
        assert not torch.equal(a, b)
        assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 0.06


def test_what_it_can_not_multiply_is_refused():
    plan, x, w = case()
    x_operand, w_operand = operands(x, w)
    with pytest.raises(ValueError, match="the plan has 40 rows"):
        quantised_linear(x[:3], w, x_operand, w_operand, plan, torch.float32)
    y = quantised_linear(x.clone().requires_grad_(), None, x_operand, w_operand, plan, torch.float32)
    with pytest.raises(InputError, match="only quantised"):
        y.sum().backward()
