"""The experts' rows as they are produced, with their row's NVFP4 in the same kernel: gather, or SwiGLU of gate_up.

The bits of gather_amax (dispatch/1) or swiglu_amax (swiglu/1) followed by nvfp4/1 with an outer scale a row; the
backward is the producer's. A row that is not finite leaves its token in the slot of the product that it is for.
"""

import torch
from torch import Tensor

from minitransformer.ops import dispatch
from minitransformer.ops import swiglu as swiglu_op
from minitransformer.ops.autograd import apply
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import on
from minitransformer.ops.gpu.nvfp4 import SOURCE, aligned
from minitransformer.ops.nvfp4 import BLOCK, Nvfp4

SWIGLU, GATHER, ROWS = range(3)  # where rows come from: GATHER in the kernel's text
LONGEST = 8192  # a row is one block of threads, a thread has at most one block of 16


def defines(K: int, source: int, keep: bool = True) -> tuple[tuple[str, int], ...]:
    """What nvfp4_quantize.cu is compiled with; the last is the number of threads."""
    threads = min(512, -(-K // 256) * 32)  # eight elements each
    form = ("WIDE", 0), ("DECODE", 1), ("STEPS", 1)  # of `quantize`, which is not used
    return ("K", K), *form, ("GATHER", source), ("KEEP", int(keep)), ("THREADS", threads)


def _launch(x: Tensor, plan, K: int, source: int, keep: bool = True) -> tuple[Tensor | None, ...]:
    """(y [R, K] BF16, codes, scales, outer, decoded); the first three are None without keep."""
    home, R = x.device, plan.num_rows
    (places,) = device.take("quantised_rows", home, torch.int64, plan.rows_TK if source == GATHER else plan.order_R)
    decoded = torch.empty(R, K, dtype=torch.bfloat16, device=home)
    outer = torch.empty(R, dtype=torch.float32, device=home)
    y = codes = scales = None
    if keep:
        y = torch.empty_like(decoded)
        codes, scales = (torch.empty(R, K // n, dtype=torch.uint8, device=home) for n in (2, BLOCK))
    if decoded.numel():
        where, how = device.slot("experts.gate_up" if source == GATHER else "experts.down"), defines(K, source, keep)
        with on(home):
            cuda.launch(
                cuda.kernel(home, SOURCE, "produce", how), len(places), dict(how)["THREADS"], 0,
                (aligned(x), places, y, codes, scales, outer, decoded, device.faults(home),
                 plan.rows_TK.shape[1], where), early=True,
            )  # fmt: skip
    return y, codes, scales, outer, decoded


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, plan):
        ctx.plan = plan
        (x,) = device.take("quantised_rows", x_TD.device, torch.bfloat16, x_TD)
        y, *made = _launch(x, plan, x.shape[1], GATHER)
        ctx.mark_non_differentiable(*made)
        return y, *made

    @staticmethod
    def backward(ctx, dy_RD, *_):
        return dispatch.combine_forward(dy_RD, ctx.plan), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F, plan):
        ctx.save_for_backward(gate_up_R2F)
        (x,) = device.take("quantised_rows", gate_up_R2F.device, torch.float32, gate_up_R2F)
        y, *made = _launch(x, plan, x.shape[1] // 2, SWIGLU)
        ctx.mark_non_differentiable(*made)
        return y, *made

    @staticmethod
    def backward(ctx, dy_RF, *_):
        return swiglu_op.backward(dy_RF, *ctx.saved_tensors).float(), None


def serves(columns: int) -> bool:
    """Whether a row of x fits one block of threads and has whole blocks of 16 (2F columns for swiglu)."""
    return columns % (2 * BLOCK) == 0 and columns <= LONGEST


def operand(x: Tensor, plan, source: int) -> tuple[Tensor, Tensor]:
    """What a product reads of rows from a source: (decoded BF16 [R, K], outer FP32 [R]). No gradient.

    x: tokens BF16 [T, K] (GATHER), FP32 [R, 2K] (SWIGLU), rows BF16 [R, K] (ROWS).
    """
    (x,) = device.take("quantised_rows", x.device, torch.float32 if source == SWIGLU else torch.bfloat16, x)
    *_, outer, decoded = _launch(x, plan, x.shape[1] // 2 if source == SWIGLU else x.shape[1], source, False)
    return decoded, outer


def gather(x_TD: Tensor, plan) -> tuple[Tensor, Nvfp4, Tensor]:
    """x [T, D] BF16 -> (rows in dispatch order [R, D] BF16, quantised, decoded BF16 [R, D])."""
    y, codes, scales, outer, decoded = apply(_Gather, x_TD, plan)
    return y, Nvfp4(codes, scales, outer), decoded


def swiglu(gate_up_R2F: Tensor, plan) -> tuple[Tensor, Nvfp4, Tensor]:
    """FP32 [R, 2F], gate half first -> (silu(gate) * up BF16 [R, F], quantised, decoded BF16 [R, F])."""
    y, codes, scales, outer, decoded = apply(_SwiGLU, gate_up_R2F, plan)
    return y, Nvfp4(codes, scales, outer), decoded
