"""Faults of the row-wise operators, most of them reported of other systems (router, rope, log-probs, combine)."""

import numpy as np
import torch

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from alignment_tests.mutations import Mutation, patched
from alignment_tests.ops import (
    test_adamw,
    test_adamw_accuracy,
    test_dispatch,
    test_embedding,
    test_logprob,
    test_rms_norm,
    test_rope,
    test_router,
    test_sample,
    test_swiglu,
)
from minitransformer.ops import adamw, dispatch, embedding, logprob, rms_norm, rope, rounding, router, sample, swiglu

BF16 = torch.bfloat16


def _selecting(pick):
    """The router with another selection: pick(logits [T, E], K) -> ids [T, K]."""

    def forward(logits_TE, top_k, norm):
        ids = pick(logits_TE.detach().float(), top_k)
        weights = torch.softmax(logits_TE.detach().float(), -1).gather(1, ids)
        return (weights / weights.sum(1, keepdim=True) if norm else weights), ids

    return forward


def largest(scores, k):
    return scores.argsort(dim=1, descending=True, stable=True)[:, :k]


def higher_id_first(logits_TE, k):
    return logits_TE.shape[1] - 1 - largest(logits_TE.flip(1), k)


def perturbed(logits_TE, k):
    """Ties broken by the id: scores move by up to 1e-4, past scores that do not tie."""
    return largest(logits_TE - 1e-6 * torch.arange(logits_TE.shape[1]), k)


def by_probability(logits_TE, k):
    return largest(torch.softmax(logits_TE, -1), k)


def always_renormalised(logits_TE, top_k, norm, forward=router.forward):
    return forward(logits_TE, top_k, True)


def no_gradient_for_the_unselected(dw_TK, logits_TE, norm, weights_TK, ids_TK, backward=router.backward):
    grad = backward(dw_TK, logits_TE, norm, weights_TK, ids_TK)
    return torch.zeros_like(grad).scatter(1, ids_TK, grad.gather(1, ids_TK))


def gradient_for_the_unselected(dw_TK, logits_TE, norm, weights_TK, ids_TK, backward=router.backward):
    return backward(dw_TK, logits_TE, False, weights_TK, ids_TK)


def summed_in_bf16(y_RD, plan):
    total = torch.zeros(plan.rows_TK.shape[0], y_RD.shape[1], dtype=BF16)
    for k in range(plan.rows_TK.shape[1]):
        total = total + y_RD.detach()[plan.rows_TK[:, k]]
    return total


def silu_rounded(x):
    g, u = np.split(plain.wide(x), 2, axis=1)
    return plain.bf16(plain.wide(plain.bf16(plain.silu(g, rounding.EXP2))) * u)


def up_first(x, forward=swiglu.forward):
    return forward(x.roll(x.shape[1] // 2, 1).contiguous())


def norm_of_the_rounded_sum(x, residual, weight_D, eps, forward=rms_norm.forward):
    if residual is None:
        return forward(x, None, weight_D, eps)
    new = x + residual
    return forward(new, None, weight_D, eps)[0], new


def mean_by_torch(x, residual, weight_D, eps):
    """The variance by an order of torch's choosing; the residual's part is left out."""
    v = x.detach().float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps) * weight_D.float()).to(BF16), None


def bf16_frequencies(head_dim, theta, frequencies=rope.rope_frequencies):
    return torch.from_numpy(frequencies(head_dim, theta)).to(BF16).double().numpy()


def interleaved_pairs(x_TNH, positions_T, table_PH, sign=1.0, rotate=rope.rotate):
    halves = x_TNH.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous()
    return rotate(halves, positions_T, table_PH, sign).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def turned_the_same_way(x_TNH, positions_T, table_PH, sign=1.0, rotate=rope.rotate):
    return rotate(x_TNH, positions_T, table_PH)


def at_temperature_1(logits_TV, ids_T, temperature, forward=logprob.forward):
    return forward(logits_TV, ids_T, 1.0)


def logits_rounded(logits_TV, ids_T, temperature, forward=logprob.forward):
    return forward(logits_TV.to(BF16).float(), ids_T, temperature)


def scattered_in_bf16(dx_TD, ids_T, weight_shape):
    out = torch.zeros(weight_shape, dtype=BF16)
    for t, v in enumerate(ids_T.tolist()):
        out[v] += dx_TD[t]
    return out


def float_mass(keys, last, logits, t, m, top_p):
    """top-p by a running FP32 sum, and one token too many when it is reached exactly."""
    order = keys.argsort()
    p = np.exp((logits[order] / t - m).astype(np.float32))
    return keys[order[np.searchsorted(np.cumsum(p / p.sum()), np.float32(top_p), side="right")]]


def adamw_by(formula):
    """The CPU's kernel by another formula: (weight, grad, master, m, v), scalars -> (weight, master, m, v)."""

    def kernel(begin, end, weight, grad, master, exp_avg, exp_avg_sq, s):
        state = [None if x.size == 0 else torch.from_numpy(x[begin:end]) for x in (grad, master, exp_avg, exp_avg_sq)]
        made, *rest = formula([None, *state], adamw.Scalars(*s))
        weight[begin:end] = made.view(torch.int16).numpy().view(np.uint16)
        for into, values in zip((master, exp_avg, exp_avg_sq), rest, strict=True):
            into[begin:end] = values.numpy()

    return kernel


def with_an_fma(state, s):
    return test_adamw.by_numpy(state, s, fused="m")


def eps_in_the_root(state, s):
    made = test_adamw.by_numpy(state, s)
    p, m, v = state[2].numpy(), made[2].numpy(), made[3].numpy()
    p = p - np.float32(s.size) * m / np.sqrt(v * np.float32(s.root) ** 2 + np.float32(s.eps))
    return [plain.bf16(p), torch.from_numpy(p), *made[2:]]


def decay_rounded_by_itself(state, s):
    decayed = state[2] * (1 - s.decay)
    return test_adamw.by_numpy([*state[:2], decayed, *state[3:]], adamw.Scalars(*s)._replace(decay=0.0))


def nan_as_the_processor_makes_it(state, s):
    _, p, m, v = test_adamw.by_numpy(state, s)
    signed = [torch.where(x.isnan(), -x, x) for x in (p, m, v)]
    return [plain.bf16(p.numpy()), *signed]


def _rms_bits() -> None:
    # One FP32 step beside the spec shows in a few of 2^16 BF16 results, so there must be many.
    x, w = inputs.bf16(1, 2000, 300), inputs.bf16(2, 300)
    got = rms_norm.rms_norm(x, w, test_rms_norm.EPS)
    assert_bits_equal(got, test_rms_norm.oracle(plain.wide(x), w), "rms_norm")


def products_rounded(y_RD, plan, weights_TK):
    """A weighted sum over the slots in slot order, but by a multiply and an addition."""
    products_TKD = weights_TK[..., None] * y_RD[plan.rows_TK].float()
    return plain.bf16(plain.slot_sum(products_TKD.numpy(), 1))


def _combine_bits() -> None:
    plan = dispatch.plan(test_dispatch.routed(1, 20, 8, 16), 16)
    y = inputs.bf16(2, 160, 16)
    want = plain.bf16(plain.slot_sum(plain.wide(dispatch.slots(y, plan)), 1))
    assert_bits_equal(dispatch.combine(y, plan), want, "combine")


def _m(name: str, law: str, owner, attribute: str, mutant, check) -> Mutation:
    return Mutation(name, law, patched(owner, attribute, mutant), check)


MUTATIONS = [
    _m("router ties to the higher expert", "ties to the lower expert", router, "forward",
       _selecting(higher_id_first), test_router.test_a_tie_at_the_boundary_takes_the_lower_id),
    _m("router tie-break perturbs the scores", "order by raw logit", router, "forward",
       _selecting(perturbed), test_router.test_a_tie_break_must_not_reorder_what_does_not_tie),
    _m("router selects by probability", "order by raw logit", router, "forward",
       _selecting(by_probability), test_router.test_selection_is_by_logit_where_probabilities_tie),
    _m("norm_topk_prob ignored", "weights sum to less than one without it", router, "forward",
       always_renormalised, test_router.test_without_renormalising_the_weights_sum_to_less_than_one),
    _m("unselected logits without a gradient", "differentiates (router)", router, "backward",
       no_gradient_for_the_unselected, lambda: test_router.test_differentiates(False)),
    _m("unselected logits with a gradient", "differentiates (router)", router, "backward",
       gradient_for_the_unselected, lambda: test_router.test_differentiates(True)),
    _m("combine sums in BF16", "agrees (combine)", dispatch, "combine_forward",
       summed_in_bf16, _combine_bits),
    _m("the weighted combine rounds its products", "agrees (combine_weighted)", dispatch, "combine_weighted_forward",
       products_rounded, test_dispatch.test_a_weighted_sum_rounds_once_a_slot),
    _m("swiglu rounds silu", "agrees (swiglu)", swiglu, "forward",
       silu_rounded, test_swiglu.test_silu_is_not_rounded_before_the_product),
    _m("swiglu takes up first", "gate comes first", swiglu, "forward", up_first, test_swiglu.test_gate_comes_first),
    _m("norm of the rounded residual", "the norm sees the unrounded sum", rms_norm, "forward",
       norm_of_the_rounded_sum, test_rms_norm.test_the_norm_sees_the_unrounded_sum),
    _m("mean square in torch's order", "agrees (rms_norm)", rms_norm, "forward", mean_by_torch, _rms_bits),
    _m("BF16 inverse frequencies", "phases in FP64", rope, "rope_frequencies",
       bf16_frequencies, lambda: test_rope.test_the_table_is_fp64_rounded_once(128)),
    _m("interleaved pairs", "pairs are half-split", rope, "rotate",
       interleaved_pairs, test_rope.test_pairs_are_half_split_and_both_turn),
    _m("rope's gradient not turned back", "differentiates (rope)", rope, "rotate",
       turned_the_same_way, test_rope.test_differentiates),
    _m("log-prob without the temperature", "temperature divides the logits", logprob, "forward",
       at_temperature_1, test_logprob.test_the_temperature_divides_the_logits),
    _m("log-prob of BF16 logits", "logits stay FP32", logprob, "forward",
       logits_rounded, test_logprob.test_is_close_to_fp64_over_a_real_vocabulary),
    _m("embedding gradient scattered in BF16", "differentiates (embedding)", embedding, "backward",
       scattered_in_bf16, test_embedding.test_differentiates),
    _m("adamw with an FMA", "agrees (adamw)", adamw, "_adamw_cpu", adamw_by(with_an_fma),
       lambda: test_adamw.test_no_product_and_sum_are_fused("m")),
    _m("adamw's eps inside of the root", "eps stands beside the root", adamw, "_adamw_cpu", adamw_by(eps_in_the_root),
       test_adamw.test_eps_stands_beside_the_root),
    _m("adamw rounds the decay by itself", "decay and step are one change", adamw, "_adamw_cpu",
       adamw_by(decay_rounded_by_itself), test_adamw_accuracy.test_small_decay_is_not_lost),
    _m("adamw keeps a NaN's sign", "one NaN", adamw, "_adamw_cpu", adamw_by(nan_as_the_processor_makes_it),
       test_adamw.test_the_edges),
    _m("adamw asks libm for powers", "no libm", adamw, "power", pow, test_adamw.test_the_order_of_the_squarings),
    _m("top-p by a float sum", "truncation keeps exactly the set", sample, "_last_by_mass",
       float_mass, test_sample.test_truncation_reaches_every_kept_token),
]  # fmt: skip
