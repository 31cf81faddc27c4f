"""Faults put back into the quantised experts, each with the law that must notice."""

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from unittest import mock

import torch

from alignment_tests import laws, test_recipe
from alignment_tests.model import test_nvfp4_laws as nvfp4_laws
from alignment_tests.model import test_weights_stamp
from alignment_tests.mutations import Mutation, patched
from alignment_tests.ops import test_dispatch, test_grouped_linear, test_quantised_linear, test_swiglu
from minitransformer import recipe
from minitransformer.models.qwen3_moe import experts, model
from minitransformer.models.qwen3_moe.experts import QuantisedExperts
from minitransformer.ops import cpu, dispatch, mxfp8, nvfp4, quantised_linear, swiglu
from minitransformer.sampler.sampler import Sampler

QUANTIZE, SWIGLU, COMBINE, OPERAND = (
    nvfp4.quantize, experts.swiglu_amax, dispatch.combine_weighted_forward, QuantisedExperts.weight_operand,
)  # fmt: skip
GATHER, FORWARD_AMAX, COVERS = dispatch.gather_amax_forward, swiglu.forward_amax, recipe.covers
CHOOSE = experts.choose


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


def stale_operand(self, name, *args):
    """Quantised once, never again: an update of the weights is not seen."""
    if name not in self._made:
        OPERAND(self, name, *args)
    return self._made[name][1:]


@contextmanager
def gate_and_up_merged():
    forward = quantised_linear.forward

    def merged(x, scale_R, w, scale_EN, *rest):
        return forward(x, scale_R, w, scale_EN.amax(1, keepdim=True).expand_as(scale_EN).contiguous(), *rest)

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


def amax_without_the_last_column(x_TD, plan):
    rows, _ = GATHER(x_TD, plan)
    return rows, nvfp4.row_amax(rows[:, :-1])


def amax_before_rounding(gate_up_R2F):
    gate, up = gate_up_R2F.chunk(2, -1)
    return FORWARD_AMAX(gate_up_R2F)[0], (torch.nn.functional.silu(gate) * up).abs().amax(1)


def along_the_other_axis(x):
    """Blocks of 32 across the sum of a gradient product instead of along it."""
    across = x.mT
    across = torch.nn.functional.pad(across, (0, -across.shape[-1] % 32)).contiguous()
    rounded = mxfp8.decode(mxfp8.quantize(across))[..., : x.shape[-2]].mT
    return cpu.bf16_bits(torch.nn.functional.pad(rounded, (0, -x.shape[-1] % 32)).contiguous())


def any_projection(pattern, layer):
    """A pattern of one projection moves its whole layer."""
    names = (f"model.layers.{layer}.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down"))
    return COVERS(pattern, layer) or any(fnmatchcase(name, pattern) for name in names)


def patterns_kept(layers, config, chosen):
    CHOOSE(layers, config, chosen)
    return chosen


MUTATIONS = [
    *(Mutation(f"the amax of a gathered row misses its last column, {R} rows", "a fused amax is that of a pass",
               patched(dispatch, "gather_amax_forward", amax_without_the_last_column),
               lambda R=R: test_dispatch.test_the_amax_taken_while_gathering_is_that_of_a_separate_pass(R))
      for R in (1, 17)),
    Mutation("swiglu's amax is taken before the rounding", "a fused amax is that of a pass",
             patched(swiglu, "forward_amax", amax_before_rounding),
             lambda: test_swiglu.test_the_amax_taken_while_writing_is_that_of_a_separate_pass(129)),
    Mutation("mxfp8 gradients rounded across the sum", "blocks lie along the sum",
             patched(mxfp8, "rounded_bits", along_the_other_axis),
             test_grouped_linear.test_mxfp8_gradients_round_along_the_axis_of_their_sum),
    Mutation("a pattern of one projection moves its layer", "a pattern covers a layer as a whole or not",
             patched(recipe, "covers", any_projection), lambda: test_recipe.test_what_a_pattern_covers("*.down_proj")),
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
    Mutation("a raised version leaves quantised weights alone", "an update is seen",
             patched(model, "forget_copies", lambda layers: None),
             lambda: test_weights_stamp.written_behind_torchs_back(test_weights_stamp.raises_the_version)),
    Mutation("reset_cache leaves quantised weights alone", "an update is seen",
             patched(Sampler, "reset_cache", Sampler._renew),
             lambda: test_weights_stamp.written_behind_torchs_back(test_weights_stamp.resets_the_cache)),
    Mutation("the fingerprint holds patterns as they were typed", "one recipe, one fingerprint",
             patched(model, "choose", patterns_kept), test_recipe.one_recipe_one_fingerprint),
    Mutation("gate's and up's outer scales merged", "agrees (quantised_linear)",
             gate_and_up_merged, test_quantised_linear.test_gate_and_up_keep_their_own_scale),
]  # fmt: skip
