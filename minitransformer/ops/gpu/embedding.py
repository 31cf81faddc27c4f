"""embedding/1 on Hopper, forward and backward (ops/embedding.py has the spec)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.copy import copy
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.tiles import to_bf16


@quick
@triton.jit(do_not_specialize=["T", "V"])
def backward_kernel(dx_ptr, order_ptr, sorted_ptr, dw_ptr, T, V, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Program i adds the tokens of one id, in ascending order, if the i'th sorted token is that id's first."""
    i = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token_id = tl.load(sorted_ptr + i)
    before = tl.load(sorted_ptr + i - 1, mask=i > 0, other=-1)
    if (token_id == before) | (token_id < 0) | (token_id >= V):
        return
    acc, j, more = tl.zeros((COLUMNS,), tl.float32), i, True
    while more:
        token = tl.load(order_ptr + j)
        acc += tl.load(dx_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        j += 1
        more = (tl.load(sorted_ptr + j, mask=j < T, other=-1) == token_id) & (j < T)
    tl.store(dw_ptr + token_id * D + d, to_bf16(acc), mask=d < D)


def forward(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    home = weight_VD.device
    (weight,) = device.take("embedding", home, torch.bfloat16, weight_VD)
    (ids,) = device.take("embedding", home, torch.int64, ids_T)
    out = torch.empty(ids.shape[0], weight.shape[1], dtype=torch.bfloat16, device=home)
    copy("embedding", weight, ids, out, weight.shape[0])
    return out


def backward(dx_TD: Tensor, ids_T: Tensor, weight_shape: tuple[int, int]) -> Tensor:
    home, (V, D) = dx_TD.device, weight_shape
    (dx,) = device.take("embedding", home, torch.bfloat16, dx_TD)
    dw = torch.zeros(V, D, dtype=torch.bfloat16, device=home)
    ids, order = torch.sort(ids_T, stable=True)  # stable: the tokens of one id stay in ascending order
    if dx.numel():
        columns = min(512, next_power_of_2(D))
        with on(home):
            backward_kernel[(dx.shape[0], cdiv(D, columns))](
                dx, order, ids, dw, dx.shape[0], V, D, columns, num_warps=4, **device.ROWS
            )
    return dw
