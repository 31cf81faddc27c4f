"""The sum of squares of learner/gradients.py on Hopper: FP64, a lane sum over each tensor, so one program a tensor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import on, quick
from minitransformer.ops.gpu.scalar import LANES, lane_tree


@quick
@triton.jit
def squares_kernel(pointers_ptr, sizes_ptr, out_ptr, UNROLL: tl.constexpr):
    """Program i: FP32 tensor i, sizes int64 elements -> out FP64. Squares of FP32 are exact in FP64."""
    i = tl.program_id(0)
    x_ptr = tl.load(pointers_ptr + i).to(tl.pointer_type(tl.float32))
    size, lane = tl.load(sizes_ptr + i), tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((1, LANES), tl.float64)
    whole = size // (LANES * UNROLL) * (LANES * UNROLL)
    for start in tl.range(0, whole, LANES * UNROLL, num_stages=4):
        for u in tl.static_range(UNROLL):  # loads that wait for nothing, then sums in order
            v = tl.load(x_ptr + start + u * LANES + lane).to(tl.float64)
            lanes += v * v
    for start in range(whole, size, LANES):
        v = tl.load(x_ptr + start + lane, mask=start + lane < size, other=0.0).to(tl.float64)
        lanes += v * v
    tl.store(out_ptr + i + tl.arange(0, 1), lane_tree(lanes, 1))


def sums_of_squares(tensors: list[Tensor]) -> list[float]:
    """FP32 tensors on one Hopper GPU -> the FP64 sums, all tensors side by side."""
    home = tensors[0].device
    tensors = device.take("sum_of_squares", home, torch.float32, *tensors)
    facts = torch.tensor([[t.data_ptr() for t in tensors], [t.numel() for t in tensors]], dtype=torch.int64).to(home)
    out = torch.empty(len(tensors), dtype=torch.float64, device=home)
    with on(home):
        squares_kernel[(len(tensors),)](facts[0], facts[1], out, 32, num_warps=4, **device.ROWS)
    return out.tolist()
