"""adamw beside torch's AdamW in FP64, and what its choices of roundings are for."""

import numpy as np
import pytest
import torch

from alignment_tests import inputs
from alignment_tests.ops.test_adamw import state, updated
from minitransformer.ops import adamw


def steps_of(optimizer: type, p: torch.Tensor, grads: list[torch.Tensor], **options) -> torch.Tensor:
    p = p.clone().requires_grad_()
    one = optimizer([p], **options)
    for i, grad in enumerate(grads):
        one.param_groups[0]["lr"] = 1e-3 / (1 + i)
        p.grad = grad.to(p.dtype)
        one.step()
    return p.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_is_as_near_to_torchs_adamw_in_fp64_as_fp32_can_be(decay, eps):
    """Thirty steps with a schedule; with decay, which torch rounds by itself, nearer than torch's loop over FP32."""
    betas = tuple(float(np.float32(b)) for b in (0.9, 0.999))
    n, options = 5000, dict(betas=betas, eps=eps, weight_decay=decay)
    grads = [inputs.normal(100 + i, n) * 0.1 + 0.03 for i in range(30)]
    start = inputs.normal(99, n, scale=0.125)
    exact = steps_of(torch.optim.AdamW, start.double(), grads, **options)
    theirs = steps_of(torch.optim.AdamW, start, grads, foreach=False, fused=False, **options)
    weight, p, m, v = torch.zeros(n, dtype=torch.bfloat16), start.clone(), torch.zeros(n), torch.zeros(n)
    for i, grad in enumerate(grads):
        adamw.adamw(weight, grad, p, m, v, adamw.scalars(i + 1, 1e-3 / (1 + i), **options))
    ours, moved = (p.double() - exact).abs(), (exact - start.double()).abs().mean()
    assert ours.max() < 30 * 2.0**-25 and ours.mean() < 1e-5 * moved  # half an ulp of 0.5 to 1 a step
    assert ours.mean() < (0.7 if decay else 1.01) * (theirs.double() - exact).abs().mean()


def test_a_constant_gradient_moves_by_lr_at_every_step():
    """The moments are true averages: w = 1 - b, exactly, and bias corrections of the same b."""
    p, m, v = torch.ones(1), torch.zeros(1), torch.zeros(1)
    for t in range(1, 3000):
        before = p.clone()
        adamw.adamw(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([0.37]), p, m, v,
                    adamw.scalars(t, 2.0**-14, (0.9, 0.999), 1e-30, 0.0))  # fmt: skip
        assert (before - p).item() == pytest.approx(2.0**-14, rel=3e-3)
    assert m.item() == pytest.approx(0.37, rel=1e-6) and v.item() == pytest.approx(0.37**2 * 0.95, rel=1e-2)


def test_small_decay_is_not_lost():
    """1 - lr * weight_decay is 1 in FP32; the product is not, and joins the step before the master is rounded."""
    s = adamw.scalars(1000, 1e-6, (0.9, 0.999), 1e-8, 0.01)
    assert np.float32(1 - 1e-6 * 0.01) == 1
    fresh = state(1, 200000)
    ends = [updated(fresh, one)[1].double() for one in (s, s._replace(decay=0.0))]
    pull = ((ends[0] - ends[1]) * fresh[2].sign()).sum().item()
    assert pull == pytest.approx(-1e-8 * fresh[2].double().abs().sum().item(), rel=0.1)
