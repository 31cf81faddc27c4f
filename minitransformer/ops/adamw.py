"""Execution spec adamw/1: one step of AdamW (decoupled weight decay) on FP32 masters; no element sees another.

Of an update, FP64 (f32: rounded once to FP32; t counts from 1; power by squarings, so that no libm is asked):
    b1, b2 = f32(beta1), f32(beta2);  w = f32(1 - b)               exact for b >= 1/2: moments are true averages
    power(b, t): r = 1; for each bit of t from the highest: r = r * r, then r = r * b if it is 1
    root   = f32(1 / sqrt(1 - power(b2, t)))                       bias corrections
    size   = f32(lr / (1 - power(b1, t)))
    decay  = f32(lr * weight_decay), eps = f32(eps), clip = f32(bound / norm), or 1 (learner/gradients.py)

Of an element, FP32, every operation rounded once, no FMA, subnormals kept (g: 0 for a parameter without a gradient):
    g  = fl(grad * clip)
    m' = fl(fl(b1 * m) + fl(w1 * g))                               exp_avg
    v' = fl(fl(b2 * v) + fl(w2 * fl(g * g)))                       exp_avg_sq
    d  = fl(fl(sqrt(v') * root) + eps)                             IEEE square root
    u  = fl(size * fl(m' / d))                                     IEEE divide
    p' = fl(p - fl(u + fl(decay * p)))                             master: decay and step are one change, one rounding
    weight = bf16(p')                                              written in the same pass

Infinities follow IEEE: a square that overflows makes v' infinite for good, and u 0. A NaN among m', v', p' is stored as
0x7fc00000 (a CPU and a GPU make it with other signs), its weight as 0x7fc0. -0 is as IEEE has it.
Refused: lr or weight_decay that is negative or infinite as FP32, a beta outside 0 <= b < 1, eps not above 0, t < 1,
shapes, layouts, dtypes, devices.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import cpu, gpu
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import f32_to_bf16

SPEC = "adamw/1"
_NAN = np.float32(np.nan)  # 0x7fc00000
_BLOCK = 1024  # elements: moves no bit


class Scalars(NamedTuple):
    """Of one update: values that FP32 holds, under the spec's names."""

    clip: float
    b1: float
    w1: float
    b2: float
    w2: float
    root: float
    eps: float
    size: float
    decay: float


def _f32(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def power(b: float, t: int) -> float:
    """b^t in FP64 by multiplications alone, in the spec's order; t >= 0."""
    r = 1.0
    for bit in bin(t)[2:]:
        r *= r
        if bit == "1":
            r *= b
    return r


def check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ValueError, naming it, for a setting that the spec refuses."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= _f32(value) < math.inf:
            raise ValueError(f"{name} is {value}, expected a finite number of at least 0")
    if len(betas) != 2 or not all(0 <= beta and _f32(beta) < 1 for beta in betas):
        raise ValueError(f"betas are {betas}, expected two numbers of at least 0 and, in FP32, below 1")
    if not 0 < _f32(eps) < math.inf:
        raise ValueError(f"eps is {eps}, expected a finite number that is above 0 in FP32")


def scalars(
    t: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float = 1.0
) -> Scalars:
    """Those of update t (the first is 1). clip: the factor of every gradient. Raises ValueError as check does."""
    check(lr, betas, eps, weight_decay)
    if t < 1:
        raise ValueError(f"update {t}: the first is 1")
    b1, b2 = map(_f32, betas)
    root, size = 1 / math.sqrt(1 - power(b2, t)), lr / (1 - power(b1, t))
    values = clip, b1, 1 - b1, b2, 1 - b2, root, eps, size, lr * weight_decay
    return Scalars(*map(_f32, values))


@jit
def _adamw_cpu(begin, end, weight, grad, master, exp_avg, exp_avg_sq, s):
    clip, b1, w1, b2, w2, root, eps, size, decay = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]
    zeros = np.zeros(_BLOCK, np.float32)
    # Loops of few arrays over what the first cache holds: one loop over all would not be vectorised.
    for i in range(begin, end, _BLOCK):
        j = min(i + _BLOCK, end)
        m, v, p, weights = exp_avg[i:j], exp_avg_sq[i:j], master[i:j], weight[i:j]
        grads = grad[i:j] if grad.size else zeros[: j - i]
        for k in range(j - i):
            x = b1 * m[k] + w1 * (grads[k] * clip)
            m[k] = x if x == x else _NAN
        for k in range(j - i):
            g = grads[k] * clip
            x = b2 * v[k] + w2 * (g * g)
            v[k] = x if x == x else _NAN
        for k in range(j - i):
            x = p[k] - (size * (m[k] / (math.sqrt(v[k]) * root + eps)) + decay * p[k])
            p[k] = x if x == x else _NAN
        for k in range(j - i):
            weights[k] = f32_to_bf16(p[k])


def adamw(
    weight: Tensor, grad: Tensor | None, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars
) -> None:
    """Updates master, exp_avg, exp_avg_sq (FP32) and weight (BF16) in place by grad (FP32; None: zeros); one shape.

    Makes no tensor. Raises ValueError on shapes and layouts, TypeError on dtypes, UnsupportedDevice off CPU and Hopper.
    """
    written = weight, master, exp_avg, exp_avg_sq
    if any(x.shape != weight.shape for x in (*written, weight if grad is None else grad)):
        shapes = [None if x is None else tuple(x.shape) for x in (weight, grad, *written[1:])]
        raise ValueError(f"adamw: weight, grad, master and moments must have one shape, got {shapes}")
    # A copy made for contiguity would take the writes and lose them.
    if not all(x.is_contiguous() for x in written):
        raise ValueError("adamw: weight, master and moments must be contiguous")
    if weight.is_cuda:
        gpu.adamw.update(weight, grad, master, exp_avg, exp_avg_sq, scalars)
    else:
        cpu.on_cpu("adamw", *written, *(() if grad is None else (grad,)))
        grads = torch.empty(0, dtype=torch.float32) if grad is None else grad
        flat = [x.reshape(-1) for x in (cpu.bf16_bits(weight), *map(cpu.f32, (grads, *written[1:])))]
        cpu.parallel(_adamw_cpu, weight.numel(), *flat, np.array(scalars, np.float32), grain=1 << 15)
    # What is kept of the old weights elsewhere looks at torch's count of writes (weights_stamp.py).
    torch.autograd.graph.increment_version(written)
