"""Faults put back into the operators and the model, each with the law that must notice."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from alignment_tests import laws
from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.mutations import Mutation, patched
from alignment_tests.ops import test_attention, test_grouped_linear, test_linear, test_mma
from minitransformer.models.qwen3_moe import experts as experts_module
from minitransformer.models.qwen3_moe import model as model_module
from minitransformer.ops import attention as attention_module
from minitransformer.ops import dispatch, grouped_linear, linear, mma

tiny = cache(tiny_model)
LINEAR_BACKWARD, NORM = linear.backward, model_module.rms_norm


def law(check: Callable, **shape) -> Callable[[], None]:
    return lambda: check(tiny(1, **shape))


def split_k_for_few_rows(x: Tensor, weight: Tensor, out_dtype=torch.bfloat16) -> Tensor:
    """What a library does for a small M: two halves of K, added at the end."""
    half = x.shape[1] // 32 * 16
    if x.shape[0] > 8 or half == 0:
        return linear.linear(x, weight, out_dtype)
    parts = [
        mma.chain(a.contiguous(), b.t().contiguous())
        for a, b in zip(x.split([half, x.shape[1] - half], 1), weight.split([half, x.shape[1] - half], 1), strict=True)
    ]
    return (parts[0] + parts[1]).to(out_dtype)


def decode_by_another_kernel(q, k, v, batch):
    """Single queries go through a plain softmax: the gap between SGLang's decode and its prefill."""
    if any(b - a > 1 for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        return attention_module.attention(q, k, v, batch)
    outs = []
    for s, n in enumerate(batch.kv_lens):
        rows, group = batch.key_rows_SL[s, :n], q.shape[1] // k.shape[1]
        keys, values = (x[rows].repeat_interleave(group, 1).float() for x in (k, v))
        scores = torch.einsum("nh,jnh->nj", q[s].float(), keys) * q.shape[2] ** -0.5
        outs.append(torch.einsum("nj,jnh->nh", scores.softmax(-1), values))
    return torch.stack(outs).bfloat16()


def combine_in_expert_order(y_RD: Tensor, plan: dispatch.Plan) -> Tensor:
    ordered = plan.rows_TK.sort(1).values
    return dispatch.combine_forward(y_RD, dispatch.Plan(plan.order_R, ordered, plan.bounds_E1))


def combine_switched_at_32(y_RD: Tensor, plan: dispatch.Plan) -> Tensor:
    """A second kernel for small batches that rounds to BF16 after each slot."""
    if plan.rows_TK.shape[0] > 32:
        return dispatch.combine_forward(y_RD, plan)
    total = torch.zeros(plan.rows_TK.shape[0], y_RD.shape[1]).bfloat16()
    for k in range(plan.rows_TK.shape[1]):
        total = total + y_RD[plan.rows_TK[:, k]]
    return total


def combine_follows_slots() -> None:
    """Three slots whose sum depends on the order; experts in descending order."""
    plan = dispatch.plan(torch.tensor([[2, 1, 0]]), 3)
    slots = torch.tensor([[1.0], [2.0**-24], [-1.0]]).bfloat16()
    y_R = slots[plan.order_R]
    assert_bits_equal(model_module.dispatch.combine(y_R, plan), torch.zeros(1, 1).bfloat16(), "1 + 2^-24 - 1")


def stale_store(k_TGH, v_TGH, k_cache, v_cache, rows_T) -> None:
    """Keys arrive, but the values of one chunk land one row late."""
    k_cache[rows_T], v_cache[rows_T.roll(1)] = k_TGH, v_TGH


def norm_of_the_rounded_sum(x, residual, weight, eps):
    total = (x.float() + residual.float()).bfloat16()
    return model_module.rms_norm(total, weight, eps), total


def only_for_pages(faulty: Callable, right: Callable) -> Callable:
    """A fault that only the sampler has: batches of few rows stand for it."""
    return lambda x, *args: (faulty if x.shape[0] < 16 else right)(x, *args)


def routing_weight_twice(x_RK, weight_ENK, plan, weights_TK=None, backward_format="bf16"):
    y = grouped_linear.grouped_linear(x_RK, weight_ENK, plan, weights_TK)
    return y if weights_TK is None else (y.float() * weights_TK.reshape(-1)[plan.order_R, None]).bfloat16()


def swiglu_rounding_in_between(gate_up):
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate).bfloat16().float() * up).bfloat16()


def bf16_logits(x, weight, out_dtype=torch.bfloat16):
    """The lm_head rounds before the log-softmax, but only in the learner's large pass."""
    y = linear.linear(x, weight, out_dtype)
    return y.bfloat16().float() if out_dtype == torch.float32 and x.shape[0] > 8 else y


def truncated_rounding(x, nan):
    return torch.from_numpy((x.view("u4") & 0xFFFF0000).view("f4")).bfloat16()


def two_chains(a, b, k_major, offsets, c=mma.NO_ACCUMULATOR):
    """A kernel that accumulates odd and even steps apart."""
    whole = mma.grouped_chain_bits
    order = [k for k in range(a.shape[1]) if k // 16 % 2 == 0] + [k for k in range(a.shape[1]) if k // 16 % 2]
    return whole(a[:, order].copy(), (b[:, order] if k_major else b[:, :, order]).copy(), k_major, offsets, c)


def pages_off_by_one(cls_paged):
    """Later chunks see the pages in another order than the first one wrote them."""

    def paged(new_ids, starts, page_tables, page_size, *args, **kwargs):
        tables = [t[1:] + t[:1] if start else t for t, start in zip(page_tables, starts, strict=True)]
        return cls_paged(new_ids, starts, tables, page_size, *args, **kwargs)

    return staticmethod(paged)


def gradient_by_scatter(dy, x, weight, *needs):
    """dW summed row after row in BF16, as a scatter with atomics may."""
    dx, dw = LINEAR_BACKWARD(dy, x, weight, *needs)
    total = torch.zeros_like(weight)
    for t in range(x.shape[0]):
        total += dy[t, :, None].bfloat16() * x[t]
    return dx, total if dw is not None else None


class ChainTurnedByACounter:
    """A kernel whose order of steps follows a counter that lives from call to call, as dynamic scheduling may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x, weight, out_dtype=torch.bfloat16):
        self.calls += 1
        turn = 16 * (self.calls % 4)
        return linear.linear(x.roll(turn, 1), weight.roll(turn, 1), out_dtype)


def only_recomputed(faulty: Callable, right: Callable) -> Callable:
    """A fault that only a layer's second computation has, inside the backward pass."""
    return lambda *args: (right if torch._C._current_graph_task_id() == -1 else faulty)(*args)


def norm_in_another_order(x, weight, eps):
    return NORM(x.roll(5, -1), weight.roll(5), eps).roll(-5, -1)


def attention_over_fp8_values(q, k, v, batch):
    return attention_module.attention(q, k, v.to(torch.float8_e4m3fn).bfloat16(), batch)


ALL_MODEL = "learner == sampler"
MUTATIONS = [
    Mutation("steps of K turned by a call counter", "repeats",
             patched(model_module, "linear", ChainTurnedByACounter()), law(laws.repeats)),
    Mutation("recomputed through another norm", "recomputes the same",
             patched(model_module, "rms_norm", only_recomputed(norm_in_another_order, NORM)),
             law(laws.recomputes_the_same)),
    Mutation("recomputed through another attention", "recomputes the same",
             patched(model_module, "attention",
                     only_recomputed(attention_over_fp8_values, attention_module.attention)),
             law(laws.recomputes_the_same)),
    Mutation("split K for few rows", "ignores the batch",
             patched(model_module, "linear", split_k_for_few_rows), law(laws.ignores_the_batch)),
    Mutation("decode through another attention", "ignores the chunking and the pages",
             patched(model_module, "attention", decode_by_another_kernel),
             law(laws.ignores_the_chunking_and_the_pages)),
    Mutation("decode through another attention, seen by the trace", ALL_MODEL,
             patched(model_module, "attention", decode_by_another_kernel), law(laws.learner_equals_sampler)),
    Mutation("combine switched at 32 tokens", "ignores the batch",
             patched(dispatch, "combine", combine_switched_at_32), law(laws.ignores_the_batch, top_k=4)),
    Mutation("combine in expert order", "agrees (combine)",
             patched(dispatch, "combine", combine_in_expert_order), combine_follows_slots),
    Mutation("values stored one row late", "ignores the chunking and the pages",
             patched(model_module.kv_store, "store", stale_store), law(laws.ignores_the_chunking_and_the_pages)),
    Mutation("the sampler's norm sees the rounded residual", ALL_MODEL,
             patched(model_module, "rms_norm_residual",
                     only_for_pages(norm_of_the_rounded_sum, model_module.rms_norm_residual)),
             law(laws.learner_equals_sampler)),
    Mutation("the sampler's swiglu rounds silu", ALL_MODEL,
             patched(experts_module, "swiglu", only_for_pages(swiglu_rounding_in_between, experts_module.swiglu)),
             law(laws.learner_equals_sampler)),
    Mutation("the learner's lm_head rounds to BF16", ALL_MODEL,
             patched(model_module, "linear", bf16_logits), law(laws.learner_equals_sampler)),
    Mutation("the sampler applies the routing weight twice", ALL_MODEL,
             patched(experts_module, "grouped_linear",
                     only_for_pages(routing_weight_twice, experts_module.grouped_linear)),
             law(laws.learner_equals_sampler)),
    Mutation("the page table is turned by one", "ignores the chunking and the pages",
             patched(laws.Batch, "paged", pages_off_by_one(laws.Batch.paged)),
             law(laws.ignores_the_chunking_and_the_pages)),
    Mutation("rounding cuts off", "agrees (linear)",
             patched(linear, "round_bf16", truncated_rounding),
             test_linear.test_agrees_with_the_chain_and_one_rounding),
    Mutation("steps of K out of order", "agrees (chain)",
             patched(mma, "chain_bits", lambda a, b, k_major, c=mma.NO_ACCUMULATOR:
                     two_chains(a, b[None], k_major, mma.np.array([0, a.shape[0]]), c)),
             lambda: test_mma.test_known_answers_of_an_h200("normal", True)),
    Mutation("a scale for the wrong row", "agrees (experts)",
             patched(grouped_linear, "_row_weights", lambda weights, plan: None if weights is None else
                     weights.detach().reshape(-1).numpy()), test_grouped_linear.test_agrees_with_one_product_a_row),
    Mutation("expert 0's weight for all", "agrees (experts)",
             patched(grouped_linear, "grouped_chain_bits", lambda a, b, k_major, offsets:
                     mma.grouped_chain_bits(a, b[[0] * len(b)], k_major, offsets)),
             test_grouped_linear.test_experts_of_scale_1_2_4_8_scale_their_own_rows),
    Mutation("attention scale without log2 e", "agrees (attention)",
             patched(attention_module, "_scale", lambda h: mma.np.float32(h**-0.5)),
             test_attention.test_known_answer_of_an_h200),
    Mutation("attention over segments of another length", "agrees (attention)",
             patched(test_attention, "SEGMENT", 512), test_attention.test_segments_are_folded_in_order),
    Mutation("weight gradient summed in BF16", "differentiates (the chain of the spec)",
             patched(test_linear.op, "backward", gradient_by_scatter),
             test_linear.test_gradients_are_the_chains_of_the_spec),
]  # fmt: skip
