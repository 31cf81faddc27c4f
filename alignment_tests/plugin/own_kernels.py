"""The learner's own operators under the names of SglangKernels: with them the exchanged forward is the learner's."""

from types import SimpleNamespace

import torch

from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.experts import Bf16Experts
from minitransformer.models.qwen3_moe.model import no_trace
from minitransformer.ops import dispatch
from minitransformer.ops.attention import attention
from minitransformer.ops.grouped_linear import grouped_linear
from minitransformer.ops.linear import linear
from minitransformer.ops.logprob import logprob
from minitransformer.ops.rms_norm import rms_norm, rms_norm_residual
from minitransformer.ops.rope import rope, rope_table
from minitransformer.ops.router import router
from minitransformer.ops.swiglu import swiglu


class OwnKernels:
    def linear(self, x, weight):
        return linear(x, weight)

    def logits(self, h, weight):
        return linear(h, weight, torch.float32)

    def rms_norm(self, x, weight, eps):
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x, residual, weight, eps):
        return rms_norm_residual(x, residual, weight, eps)

    def rope_table(self, model):
        config = model.config
        return rope_table(config.head_dim, config.rope_theta, config.max_positions).to(model.device)

    def rope(self, q, k, v, positions, table):
        return [*rope(q, k, positions, table), v.contiguous()]

    def attention(self, q, k, v, bounds):
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        return attention(q, k, v, Batch.packed([[0] * n for n in lengths]).to(q.device))

    def router(self, logits, top_k, norm_topk_prob):
        weights, ids = router(logits, top_k, norm_topk_prob)
        return weights, ids.int()

    def experts(self, x, gate_up, down, weights, ids):
        plan = dispatch.plan(ids.long(), len(down))
        mlp = SimpleNamespace(gate_up=SimpleNamespace(weight=gate_up), down=SimpleNamespace(weight=down))
        return Bf16Experts()(mlp, x, plan, weights, no_trace)

    def routing(self, weights, ids, num_experts):
        return weights, dispatch.plan(ids.long(), num_experts)

    def swiglu(self, gate_up):
        return swiglu(gate_up)

    def grouped(self, x, weight, out, routing, weighted):
        weights, plan = routing
        rows = x[plan.order_R] if weighted else dispatch.gather(x, plan)
        y = grouped_linear(rows, weight, plan, weights if weighted else None)
        return out.copy_(dispatch.slots(y, plan).view(out.shape))

    def combine(self, y):
        T, K, D = y.shape
        every = torch.arange(K).expand(T, K)  # any plan whose slots are these rows
        plan = dispatch.plan(every, K)
        return dispatch.combine(y.flatten(0, 1)[plan.order_R], plan)

    def logprob(self, logits, ids, temperature):
        return logprob(logits, ids, temperature)
