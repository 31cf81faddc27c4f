"""Execution spec embedding/1: x[t] = weight[ids[t]], a row copy without arithmetic.

Backward: dweight[v] = bf16(sum over tokens t ascending with ids[t] = v of f32(dx[t])): FP32 from +0, one addition a
token, one rounding; a row that no token uses is +0.
Refused: an id outside the vocabulary (token and id are named), other dtypes, devices without a kernel.
"""

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import bf16_to_f32, f32_to_bf16

SPEC = "embedding/1"


@jit
def _forward_cpu(begin, end, ids_T, weight, out):
    for t in range(begin, end):
        out[t, :] = weight[ids_T[t], :]


def check_ids(op: str, ids_T: Tensor, vocab: int) -> np.ndarray:
    """ids as np.int64, or InputError that names the first id outside 0 .. vocab - 1."""
    ids = cpu.i64(ids_T)
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        t = int(outside.argmax())
        raise InputError(f"{op}: id {ids[t]} of token {t} is outside the vocabulary of {vocab}; check the tokenizer")
    return ids


def forward(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """int64 [T], BF16 [V, D] -> BF16 [T, D]."""
    if weight_VD.is_cuda:
        return gpu.embedding.forward(ids_T, weight_VD)
    cpu.on_cpu("embedding", ids_T, weight_VD)
    ids = check_ids("embedding", ids_T, weight_VD.shape[0])
    out = torch.empty(ids.size, weight_VD.shape[1], dtype=torch.bfloat16)
    cpu.parallel(_forward_cpu, ids.size, ids, cpu.bf16_bits(weight_VD), cpu.bf16_bits(out), grain=64)
    return out


@jit
def _backward_cpu(begin, end, order_T, ids_T, starts, dx, dweight):
    """Groups begin..end of equal ids; group g owns order_T[starts[g] : starts[g + 1]], tokens ascending."""
    acc = np.empty(dx.shape[1], np.float32)
    for g in range(begin, end):
        acc[:] = np.float32(0)
        for i in range(starts[g], starts[g + 1]):
            row = dx[order_T[i]]
            for d in range(acc.size):
                acc[d] += bf16_to_f32(row[d])  # fl, token order
        out = dweight[ids_T[order_T[starts[g]]]]
        for d in range(acc.size):
            out[d] = f32_to_bf16(acc[d])


def backward(dx_TD: Tensor, ids_T: Tensor, weight_shape: tuple[int, int]) -> Tensor:
    """dx BF16 [T, D] -> dweight BF16 [V, D]."""
    if dx_TD.is_cuda:
        return gpu.embedding.backward(dx_TD, ids_T, weight_shape)
    dweight = torch.zeros(weight_shape, dtype=torch.bfloat16)
    ids = cpu.i64(ids_T)
    # A stable sort keeps the tokens of one id in ascending order.
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1, append=weight_shape[0]))
    args = order, ids, starts, cpu.bf16_bits(dx_TD), cpu.bf16_bits(dweight)
    cpu.parallel(_backward_cpu, starts.size - 1, *args, grain=16)
    return dweight


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_T, weight_VD):
        ctx.save_for_backward(ids_T)
        ctx.weight_shape = tuple(weight_VD.shape)
        return forward(ids_T, weight_VD)

    @staticmethod
    def backward(ctx, dx_TD):
        return None, backward(dx_TD, *ctx.saved_tensors, ctx.weight_shape)


def embedding(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows ids [T] int64 of weight [V, D] BF16 -> BF16 [T, D].

    Raises InputError on an id outside 0 .. V - 1, ValueError on shapes, TypeError on dtypes, UnsupportedDevice.
    """
    if ids_T.dim() != 1 or weight_VD.dim() != 2:
        raise ValueError(f"embedding: ids {tuple(ids_T.shape)}, weight {tuple(weight_VD.shape)}; expected [T], [V, D]")
    return apply(_Embedding, ids_T, weight_VD)
