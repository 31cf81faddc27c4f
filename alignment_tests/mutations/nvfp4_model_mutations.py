"""Faults put back into the quantised experts, each with the law that must notice."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from alignment_tests import laws
from alignment_tests.model import test_nvfp4_laws as nvfp4_laws
from alignment_tests.model import test_weights_stamp
from alignment_tests.mutations import Mutation, patched
from alignment_tests.ops import test_quantised_linear
from minitransformer.models.qwen3_moe import experts
from minitransformer.models.qwen3_moe.experts import QuantisedExperts
from minitransformer.ops import dispatch, nvfp4, quantised_linear

QUANTIZE, SWIGLU, COMBINE, OPERAND = (
    nvfp4.quantize, experts.swiglu_amax, dispatch.combine_weighted_forward, QuantisedExperts.weight_operand,
)  # fmt: skip


def law(check):
    return lambda: check(nvfp4_laws.quantised_model())


def few(x) -> bool:
    """A sampler's step rather than a learner's pack."""
    return x.shape[0] < 40


def amax_of_the_batch(x, amax):
    """The outer scale of an activation from all rows that happen to be there."""
    return QUANTIZE(x, amax.max().expand_as(amax).contiguous() if x.dim() == 2 and torch.is_tensor(amax) else amax)


def constant_outer(x, amax):
    q = QUANTIZE(x, amax)
    return replace(q, outer=torch.ones_like(q.outer)) if x.dim() == 2 and few(x) else q


def rounded_gate_up(gate_up_R2F):
    """FC1 rounds to BF16 before SwiGLU, in small batches only."""
    return SWIGLU(gate_up_R2F.bfloat16().float() if few(gate_up_R2F) else gate_up_R2F)


def mul_then_add(y_RD, plan, weights_TK):
    """The sum over slots without FMA, in small batches only."""
    if not few(y_RD):
        return COMBINE(y_RD, plan, weights_TK)
    total = torch.zeros(plan.rows_TK.shape[0], y_RD.shape[1])
    for k in range(plan.rows_TK.shape[1]):
        total = total + weights_TK[:, k, None] * y_RD[plan.rows_TK[:, k]].float()
    return total.bfloat16()


def stale_operand(self, name, weight):
    """Quantised once, never again: an update of the weights is not seen."""
    if name not in self._made:
        OPERAND(self, name, weight)
    return self._made[name][1:]


@contextmanager
def gate_and_up_merged():
    forward = quantised_linear.forward

    def merged(x, scale_R, w, scale_EN, plan, out_dtype):
        return forward(x, scale_R, w, scale_EN.amax(1, keepdim=True).expand_as(scale_EN).contiguous(), plan, out_dtype)

    with mock.patch.object(quantised_linear, "forward", merged):
        yield


def updates_are_seen() -> None:
    """A model quantised before an update equals one that is quantised after it."""
    from minitransformer.batch import Batch
    from minitransformer.learner.learner import Learner
    from minitransformer.learner.packing import Sample

    model = nvfp4_laws.quantised_model()
    batch = Batch.packed(laws.sequences(model, (12,)))
    laws.logits(model, batch)
    Learner(model, lr=1e-2).update([Sample([1, 2, 3, 4], 1, 1.0, [-3.0] * 3)])
    kept = laws.logits(model, batch)
    model.set_recipe(model.recipe)
    assert torch.equal(kept, laws.logits(model, batch)), "the quantised weights are those of before the update"


MUTATIONS = [
    Mutation("one activation scale for the batch", "the company moves no code",
             patched(nvfp4, "quantize", amax_of_the_batch),
             lambda: nvfp4_laws.test_the_company_moves_no_code("nvfp4_per_token")),
    Mutation("a constant outer scale in small batches", "learner == sampler",
             patched(nvfp4, "quantize", constant_outer), law(laws.learner_equals_sampler)),
    Mutation("FC1 rounds before swiglu in small batches", "learner == sampler",
             patched(experts, "swiglu_amax", rounded_gate_up), law(laws.learner_equals_sampler)),
    Mutation("combine without FMA in small batches", "learner == sampler",
             patched(dispatch, "combine_weighted_forward", mul_then_add), law(laws.learner_equals_sampler)),
    Mutation("quantised weights outlive an update", "an update is seen",
             patched(QuantisedExperts, "weight_operand", stale_operand), updates_are_seen),
    Mutation("weights to quantise known by their address", "an update is seen",
             patched(experts, "WeightsStamp", lambda tensors: [(t.data_ptr(), t._version) for t in tensors]),
             test_weights_stamp.replaced_weights_are_quantised_again),
    Mutation("gate's and up's outer scales merged", "agrees (quantised_linear)",
             gate_and_up_merged, test_quantised_linear.test_gate_and_up_keep_their_own_scale),
]  # fmt: skip
