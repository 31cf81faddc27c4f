"""Known answers of the row-wise operators: sha256 of the output bits on hashed inputs, forward and backward.

    python -m alignment_tests.goldens.row_ops          writes row_ops.json (only after a change of spec)
    python -m alignment_tests.goldens.row_ops --print  prints the hashes of this machine's kernels as JSON

Inputs are made by integers (inputs.py), so the hashes hold for every machine and, by `device`, for every kernel.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment_tests import inputs
from alignment_tests.goldens import main
from minitransformer.ops import adamw, dispatch, embedding, logprob, rms_norm, rope, rounding, router, sample, swiglu

FILE = Path(__file__).with_name("row_ops.json")
EPS, THETA = 1e-6, 1e6
T, D, E, K, F, V, H = 70, 576, 128, 8, 96, 5003, 64


def _with_gradients(function: Callable, operands: list[Tensor], device: str) -> list[Tensor]:
    """Outputs, then the gradients of the floating operands, for hashed output gradients."""
    leaves = [x.to(device) for x in operands]
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in leaves]
    got = function(*leaves)
    outputs = [x for x in (got if isinstance(got, tuple) else (got,)) if x.is_floating_point()]
    grads = [inputs.normal(90 + i, *x.shape).to(x.dtype).to(device) for i, x in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    everything = [*(got if isinstance(got, tuple) else (got,)), *(x.grad for x in leaves if x.grad is not None)]
    return [x.detach().cpu() for x in everything]


def _routed(device: str, function: Callable, rows: int) -> list[Tensor]:
    plan = dispatch.plan(inputs.integers(20, E, T, K).to(device), E)
    return _with_gradients(lambda x: function(x, plan), [inputs.bf16(21, rows, D)], device)


def _rope(device: str) -> list[Tensor]:
    table = rope.rope_table(H, THETA, 4096)
    positions = inputs.integers(30, 4096, T).to(device)
    operands = [inputs.bf16(31, T, 9, H), inputs.bf16(32, T, 3, H)]
    return [table, *_with_gradients(lambda q, k: rope.rope(q, k, positions, table.to(device)), operands, device)]


def _samples(device: str) -> list[Tensor]:
    logits = inputs.normal(50, V, scale=4.0).to(device)
    options = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 40, 1.0), (1.0, 0, 0.9), (0.8, 200, 0.95), (0.0, 0, 1.0)]
    return [torch.tensor([sample.sample(logits, 7, p, *option) for option in options for p in range(20)])]


def _adamw(device: str, reached: bool) -> list[Tensor]:
    """Three updates, clipped, of values of every size."""
    n, anything = 5003, inputs.f32_of_any_bits(60, 5003)
    grad, master, m = inputs.normal(61, n), inputs.normal(62, n), inputs.normal(63, n, scale=0.125)
    pairs = (grad, anything), (master, anything.roll(1)), (m, anything.roll(2)), (m * m, anything.roll(3).abs())
    grad, *state = (torch.cat(pair).to(device) for pair in pairs)
    weight = torch.zeros(2 * n, dtype=torch.bfloat16, device=device)
    for t in (1, 2, 3):
        now = adamw.scalars(t, 1e-3 / t, (0.9, 0.999), 1e-8, 0.1, clip=0.7)
        adamw.adamw(weight, grad if reached else None, *state, now)
    return [x.cpu() for x in (weight, *state)]


CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "embedding": lambda d: _with_gradients(embedding.embedding, [inputs.integers(1, 97, T), inputs.bf16(2, 97, D)], d),
    "rms_norm": lambda d: _with_gradients(
        lambda x, w: rms_norm.rms_norm(x, w, EPS), [inputs.bf16(3, 150, D), inputs.bf16(4, D)], d
    ),
    "rms_norm_residual": lambda d: _with_gradients(
        lambda x, r, w: rms_norm.rms_norm_residual(x, r, w, EPS),
        [inputs.bf16(5, 150, D), inputs.bf16(6, 150, D, scale=8.0), inputs.bf16(7, D)],
        d,
    ),
    "q_norm": lambda d: _with_gradients(
        lambda x, w: rms_norm.rms_norm(x, w, EPS), [inputs.bf16(8, T, 9, H), inputs.bf16(9, H)], d
    ),
    "rope": _rope,
    "router_renormalised": lambda d: _with_gradients(lambda x: router.router(x, K, True), [inputs.bf16(10, T, E)], d),
    "router": lambda d: _with_gradients(lambda x: router.router(x, K, False), [inputs.bf16(10, T, E)], d),
    "gather": lambda d: _routed(d, dispatch.gather, T),
    "combine": lambda d: _routed(d, dispatch.combine, T * K),
    "swiglu": lambda d: _with_gradients(swiglu.swiglu, [inputs.bf16(40, T, 2 * F, scale=4.0)], d),
    "logprob": lambda d: _with_gradients(
        lambda x, ids: logprob.logprob(x, ids, 0.7),
        [inputs.normal(41, 20, V, scale=4.0), inputs.integers(42, V, 20)],
        d,
    ),
    "sample": _samples,
    "adamw": lambda d: _adamw(d, True),
    "adamw_without_a_gradient": lambda d: _adamw(d, False),
    "exp2_table": lambda d: [torch.from_numpy(np.array(rounding.ex2_table()))],
}


if __name__ == "__main__":
    main(CASES, FILE)
