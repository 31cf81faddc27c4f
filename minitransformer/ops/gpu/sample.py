"""sample/1 on Hopper (ops/sample.py has the spec): order and mass are integers, so the library's sort and sum serve."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import rounding
from minitransformer.ops import sample as spec
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.scalar import LOG2E, div, exp2_32

_C0, _M1, _M2 = (tl.constexpr(int(c)) for c in (spec._C0, spec._M1, spec._M2))
_HI, _LO = tl.constexpr(rounding._LN2_HI64), tl.constexpr(rounding._LN2_LO64)


@triton.jit
def _c(x, VALUE: tl.constexpr):
    """A constant in FP64: a bare Python float would be one of FP32."""
    return tl.full(x.shape, VALUE, tl.float64)


@triton.jit
def log_64(x):
    """log_64 of rounding/1 for normal x > 0, which is all that a uniform in (0, 1) and its -log can be."""
    u = x.to(tl.int64, bitcast=True)
    e = (u - 0x3FE6A09E667F3BCD) >> 52
    f = (u - (e << 52)).to(tl.float64, bitcast=True) - _c(x, 1.0)
    k = e.to(tl.float64)
    s = f / (_c(x, 2.0) + f)
    z = s * s
    r = tl.fma(z, _c(x, 2.0 / 25.0), _c(x, 2.0 / 23.0))
    r = tl.fma(z, r, _c(x, 2.0 / 21.0))
    r = tl.fma(z, r, _c(x, 2.0 / 19.0))
    r = tl.fma(z, r, _c(x, 2.0 / 17.0))
    r = tl.fma(z, r, _c(x, 2.0 / 15.0))
    r = tl.fma(z, r, _c(x, 2.0 / 13.0))
    r = tl.fma(z, r, _c(x, 2.0 / 11.0))
    r = tl.fma(z, r, _c(x, 2.0 / 9.0))
    r = tl.fma(z, r, _c(x, 2.0 / 7.0))
    r = tl.fma(z, r, _c(x, 2.0 / 5.0))
    r = tl.fma(z, r, _c(x, 2.0 / 3.0))
    t = tl.fma(k, _c(x, _LO), -(s * (f - z * r)))
    return tl.fma(k, _c(x, _HI), f + t)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["V"])
def scores_kernel(logits_ptr, draw_ptr, out_ptr, temperature, V, BLOCK: tl.constexpr):
    """draw: the two keys of (seed, position), int64 bits -> x + gumbel FP64 [V]."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(draw_ptr).to(tl.uint64, bitcast=True)
    key2 = tl.load(draw_ptr + 1).to(tl.uint64, bitcast=True)
    h = _mix(key2 ^ _mix(key + v.to(tl.uint64) * _C0))
    u = ((h >> 12).to(tl.int64).to(tl.float64) + _c(h, 0.5)) * _c(h, 2.0**-52)
    x = div(tl.load(logits_ptr + v, mask=v < V, other=0.0), temperature)
    tl.store(out_ptr + v, x.to(tl.float64) - log_64(-log_64(u)), mask=v < V)


@triton.jit(do_not_specialize=["V"])
def keys_kernel(logits_ptr, keys_ptr, mass_ptr, temperature, largest, V, BLOCK: tl.constexpr):
    """int64 [V]: keys that ascend as (logit descending, id ascending), and integer masses."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + v, mask=v < V, other=0.0)
    u = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is +0
    # As a signed integer a positive float ascends by itself, a negative one with its magnitude flipped.
    ascending = tl.where(u < 0, u ^ 0x7FFFFFFF, u).to(tl.int64)
    tl.store(keys_ptr + v, ((-1 - ascending) << 32) | v.to(tl.int64), mask=v < V)
    p = exp2_32((div(x, temperature) - largest) * LOG2E)
    tl.store(mass_ptr + v, (p * 1099511627776.0).to(tl.int64), mask=v < V)


def _first(values: Tensor, ids: Tensor) -> int:
    """The lowest id among those of the largest value."""
    return int(ids[values == values.max()].min())


def _kept(logits: Tensor, t: np.float32, largest: np.float32, top_k: int, top_p: float) -> Tensor:
    """The ids that top_k and top_p keep, int64, in order of their keys."""
    V = logits.numel()
    keys, mass = (torch.empty(V, dtype=torch.int64, device=logits.device) for _ in range(2))
    keys_kernel[(triton.cdiv(V, 1024),)](logits, keys, mass, float(t), float(largest), V, 1024, **device.ROWS)
    ids = torch.sort(keys).values & 0xFFFFFFFF
    if 0 < top_k < V:
        ids = ids[:top_k]
    if top_p < 1:
        reached = mass[ids].cumsum(0)
        need = reached[-1].double() * float(top_p)
        ids = ids[: int((reached.double() < need).sum()) + 1]
    return ids


def sample(logits_V: Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float) -> int:
    home = logits_V.device
    (logits,) = device.take("sample", home, torch.float32, logits_V)
    if logits.dim() != 1 or logits.numel() == 0:
        raise ValueError(f"sample: logits are {tuple(logits.shape)}, expected [V]")
    device.check(home)
    top, V = logits.max().item(), logits.numel()  # a NaN is the maximum to torch
    if not math.isfinite(top):
        raise InputError(f"sample: the logits for position {position} have a NaN or no finite maximum")
    if temperature == 0:
        return _first(logits, torch.arange(V, device=home))
    t = np.float32(temperature)
    with np.errstate(over="ignore"):
        m = np.float32(top) / t
    if not np.isfinite(m):
        raise InputError(f"sample: the logits for position {position} overflow at temperature {temperature}; raise it")
    draw = np.array(spec.draw_keys(np.uint64(seed % 2**64), np.uint64(position)), np.uint64).view(np.int64)
    scores = torch.empty(V, dtype=torch.float64, device=home)
    with torch.cuda.device(home):
        scores_kernel[(triton.cdiv(V, 256),)](
            logits, torch.from_numpy(draw).to(home), scores, float(t), V, 256, **device.ROWS
        )
        if top_k or top_p < 1:
            kept = _kept(logits, t, m, top_k, top_p)
            return _first(scores[kept], kept)
    return _first(scores, torch.arange(V, device=home))
