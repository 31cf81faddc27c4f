"""NVFP4 experts where nobody asks for more than their output: as few kernels, and as few bytes, as there can be."""

import torch
from torch import Tensor

from minitransformer.ops.dispatch import Plan
from minitransformer.ops.gpu import dispatch, few_experts, quantised_linear, quantised_rows
from minitransformer.ops.gpu.quantised_rows import GATHER, ROWS, SWIGLU, serves


def takes(gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> bool:
    """Whether rows of these products' widths are quantised by the kernels that produce them."""
    return serves(down[1].shape[1]) and serves(gate_up[1].shape[1])


def forward(
    x_TD: Tensor, plan: Plan, weights_TK: Tensor, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> Tensor:
    """x [T, D] BF16, routing weights FP32 [T, K], packed weights and their outer scales FP32 -> [T, D] BF16.

    No gradient. Behind what made the weights another kernel was launched, or will be, here, before a product.
    """
    if (at := few_experts.place(x_TD.device, plan, gate_up, down)) is not None:
        return few_experts.forward(x_TD, plan, weights_TK, gate_up, down, at)
    rows = quantised_rows.operand(x_TD, plan, GATHER)
    if quantised_linear.joins_swiglu(plan, gate_up[1]):
        rows = quantised_rows.operand(quantised_linear.swiglu(*rows, *gate_up, plan), plan, ROWS)
    else:
        gate_up_R2F = quantised_linear.forward(*rows, *gate_up, plan, torch.float32, early=True)
        rows = quantised_rows.operand(gate_up_R2F, plan, SWIGLU)
    y_RD = quantised_linear.forward(*rows, *down, plan, torch.bfloat16, early=True)
    return dispatch.combine(y_RD, plan, weights_TK)
