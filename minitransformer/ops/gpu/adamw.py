"""adamw/1 on Hopper: every tensor is read and written once, in place (ops/adamw.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.scalar import div
from minitransformer.ops.gpu.tiles import to_bf16


@triton.jit
def _number(x):
    """A NaN becomes 0x7fc00000."""
    nan = tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(x == x, x, nan)


@quick
@triton.jit
def adamw_kernel(
    weight_ptr, grad_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, count, clip, b1, w1, b2, w2, root, eps, size, decay,
    HAS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight BF16, the others FP32, all [count]. Without a gradient grad is not read."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if HAS_GRAD:
        g = tl.load(grad_ptr + at, mask=inside, other=0.0) * clip
    else:
        g = tl.zeros((BLOCK,), tl.float32) * clip
    m = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
    p = tl.load(master_ptr + at, mask=inside, other=0.0)
    m = b1 * m + w1 * g
    v = b2 * v + w2 * (g * g)
    d = tl.math.sqrt_rn(v) * root + eps
    p = _number(p - (size * div(m, d) + decay * p))
    tl.store(exp_avg_ptr + at, _number(m), mask=inside)
    tl.store(exp_avg_sq_ptr + at, _number(v), mask=inside)
    tl.store(master_ptr + at, p, mask=inside)
    tl.store(weight_ptr + at, to_bf16(p), mask=inside)


BLOCK = 1024


def update(weight: Tensor, grad: Tensor | None, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars) -> None:
    home, count = weight.device, weight.numel()
    (weight,) = device.take("adamw", home, torch.bfloat16, weight)
    state = device.take("adamw", home, torch.float32, master, exp_avg, exp_avg_sq)
    (given,) = state[:1] if grad is None else device.take("adamw", home, torch.float32, grad)
    if count:
        with on(home):
            adamw_kernel[(cdiv(count, BLOCK),)](
                weight, given, *state, count, *scalars, grad is not None, BLOCK, num_warps=4, **device.ROWS
            )
