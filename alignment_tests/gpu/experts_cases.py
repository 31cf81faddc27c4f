"""4-bit experts of few tokens: the kernel's arguments, and what the operators give one by one on a CPU."""

from functools import lru_cache

import torch

from alignment_tests import inputs
from minitransformer.ops import dispatch, nvfp4, quantised_linear, swiglu
from minitransformer.ops.gpu import pack

FP32, BF16 = torch.float32, torch.bfloat16


@lru_cache
def quantised(E: int, D: int, F: int) -> dict[str, nvfp4.Nvfp4]:
    return {name: nvfp4.quantize(inputs.bf16(i, E, N, K), "expert")
            for i, (name, N, K) in enumerate((("gate_up", 2 * F, D), ("down", D, F)))}  # fmt: skip


def case(T: int, slots: int, E: int, D: int, F: int, seed: int = 1, same: bool = False):
    """(x, plan, routing weights, {name: the quantised weight}); same: all tokens take the same experts."""
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(0 if same else t))[:slots]
                       for t in range(T)])  # fmt: skip
    weights = quantised(E, D, F)
    return inputs.bf16(seed + 3, T, D), dispatch.plan(ids, E), inputs.normal(seed + 4, T, slots).abs(), weights


def reference(x, plan, routed, weights):
    """Operator by operator."""
    def product(rows, amax, q, out_dtype):
        made, decoded = nvfp4.quantize_decoded(rows, amax)
        outer = nvfp4.expand_rows(q.outer, q.shape[:-1]).contiguous()
        return quantised_linear.forward(decoded, made.outer, nvfp4.decode(q), outer, plan, out_dtype)

    gate_up = product(*dispatch.gather_amax(x, plan), weights["gate_up"], FP32)
    y = product(*swiglu.swiglu_amax(gate_up), weights["down"], BF16)
    return dispatch.combine_weighted(y, plan, routed)


def operand(q) -> tuple[torch.Tensor, torch.Tensor]:
    return pack.pack(q), nvfp4.expand_rows(q.outer, q.shape[:-1]).contiguous()
