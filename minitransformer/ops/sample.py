"""Execution spec sample/1: one token id from one row of logits, by the Gumbel maximum.

    t = 0          the largest logit, ties to the lower id; seed, top_k and top_p play no part
    x[v]           = fl(logit[v] / f32(t))                                        FP32, as logprob
    kept           in the order (logit descending, id ascending; -0 equals +0):
                   top_k > 0: the first top_k; then top_p < 1: of those the shortest prefix, at least one token, whose
                   mass reaches top_p of their mass. Mass is integer: trunc(2^40 * exp2_32(fl(fl(x[v] - m) * log2 e))),
                   m = max x, added in int64, so no order of summation can matter;
                   "reaches" is float64(mass) >= fl64(top_p * float64(total))
    key            = mix(mix(seed + C0) + position * C1), key2 = mix(key + C2)    uint64, wrapping around
    h[v]           = mix(key2 ^ mix(key + v * C0))
    u[v]           = ((h[v] >> 12) + 1/2) / 2^52                                  in (0, 1), exact
    gumbel[v]      = -log_64(-log_64(u[v]))                                       FP64 (rounding.py)
    id             = argmax over kept v of fl64(f64(x[v]) + gumbel[v]), ties to the lower id

mix is SplitMix64's finaliser (Steele, Lea and Flood 2014, in Stafford's variant 13); C0..C2 are odd constants below.
The noise is keyed by (seed, position of the drawn token, token id) alone: never by batch slot, rank or draw count.
The log-prob of the drawn token (logprob.py) is that of the full softmax at the request's temperature, not of `kept`.
No gradient. Refused: temperature < 0, top_k < 0, top_p outside (0, 1], a row with a NaN or +infinity or without any
finite logit, a largest logit that the temperature makes overflow, shapes, dtypes, devices without a kernel.
seed counts modulo 2^64.
"""

import math

import numpy as np
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.jit import jit
from minitransformer.ops.logprob import row_max
from minitransformer.ops.rounding import LANES, LOG2E, bits_of_f32, exp2_32, log_64

SPEC = "sample/1"
_C0, _C1, _C2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Numba turns uint64 with a signed literal into FP64, so shifts are uint64 too.
_27, _30, _31, _12 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(12)
_MASS = np.float32(2**40)
_SIGN = np.uint32(0x80000000)
_48, _ID = np.uint64(48), np.uint64(0xFFFFFFFF)  # of a key: shift to its bucket, mask of its token id


@jit
def mix(z):
    """A bijection of uint64 that scatters every input bit over the output."""
    z = (z ^ (z >> _30)) * _M1
    z = (z ^ (z >> _27)) * _M2
    return z ^ (z >> _31)


@jit
def uniform(key, key2, v):
    """u in (0, 1), FP64, of token id v (uint64) under the keys of (seed, position)."""
    h = mix(key2 ^ mix(key + v * _C0))
    return (np.float64(np.int64(h >> _12)) + 0.5) * 2.0**-52


@jit
def draw_keys(seed, position):
    """The two uint64 keys of (seed, position), both uint64."""
    key = mix(mix(seed + _C0) + position * _C1)
    return key, mix(key + _C2)


@jit
def _scores(logits, t, seed, position, out):
    """FP64 x + gumbel of all V ids."""
    key, key2 = draw_keys(seed, position)
    for v in range(logits.size):
        u = uniform(key, key2, np.uint64(v))
        out[v] = np.float64(logits[v] / t) - log_64(-log_64(u))


@jit
def _argmax(scores):
    best = 0
    for v in range(1, scores.size):
        # Strictly greater: of equal scores the lower id stays.
        best = v if scores[v] > scores[best] else best
    return best


@jit
def _order_keys(logits, out):
    """uint64 keys whose ascending order is (logit descending, id ascending)."""
    for v in range(logits.size):
        u = bits_of_f32(logits[v] + np.float32(0))  # -0 + 0 is +0
        # Ascending as unsigned: negatives flipped whole, positives get the top bit; then ~ for descending.
        u = ~u if u >= _SIGN else u | _SIGN
        out[v] = (np.uint64(~u & np.uint32(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(v)


@jit
def _last_by_mass(keys, last, logits, t, m, top_p):
    """The key at which the prefix of the ids with key <= last reaches top_p of their mass."""
    mass, bucket_mass, total = np.zeros(keys.size, np.int64), np.zeros(1 << 16, np.int64), np.int64(0)
    for v in range(keys.size):
        if keys[v] <= last:
            mass[v] = np.int64(exp2_32((logits[v] / t - m) * LOG2E) * _MASS)
            bucket_mass[np.int64(keys[v] >> _48)] += mass[v]
            total += mass[v]
    # Buckets (the upper 16 bits of a key) follow one another, so only the one that reaches has to be sorted.
    need, reached, bucket = top_p * np.float64(total), np.int64(0), 0
    while np.float64(reached + bucket_mass[bucket]) < need:
        reached += bucket_mass[bucket]
        bucket += 1
    here = np.sort(keys[(keys >> _48) == np.uint64(bucket)])
    for i in range(here.size):
        reached += mass[np.int64(here[i] & _ID)]
        if np.float64(reached) >= need:
            return here[i]
    return last


def _last_kept(keys: np.ndarray, logits: np.ndarray, t: np.float32, m: np.float32, top_k: int, top_p: float):
    """The largest key that top_k and top_p keep; an id is kept if its key is not above it."""
    last = np.partition(keys, top_k - 1)[top_k - 1] if 0 < top_k < keys.size else keys.max()
    return last if top_p == 1 else _last_by_mass(keys, last, logits, t, m, float(top_p))


def sample(
    logits_V: Tensor, seed: int, position: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Draws a token id from logits [V] FP32; the same (logits, seed, position, options) give the same id anywhere.

    position: of the token that is drawn, absolute in its sequence. temperature 0 is greedy; top_k 0 and top_p 1 keep
    every token. Raises InputError on options or logits that the spec refuses, TypeError, ValueError, UnsupportedDevice.
    """
    check_options(temperature, top_k, top_p)
    if logits_V.is_cuda:
        return gpu.sample.sample(logits_V, seed, position, temperature, top_k, top_p)
    cpu.on_cpu("sample", logits_V)
    logits = cpu.f32(logits_V)
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"sample: logits are {logits.shape}, expected [V]")
    top = row_max(logits, np.empty(LANES, np.float32))
    if not math.isfinite(top) or np.isnan(logits).any():
        raise InputError(f"sample: the logits for position {position} have a NaN or no finite maximum")
    if temperature == 0:
        return int(_argmax(logits))
    t, scores = np.float32(temperature), np.empty(logits.size, np.float64)
    with np.errstate(over="ignore"):
        m = np.float32(top) / t
    if not np.isfinite(m):
        raise InputError(f"sample: the logits for position {position} overflow at temperature {temperature}; raise it")
    _scores(logits, t, np.uint64(seed % 2**64), np.uint64(position), scores)
    if top_k or top_p < 1:
        keys = np.empty(logits.size, np.uint64)
        _order_keys(logits, keys)
        scores[keys > _last_kept(keys, logits, t, m, top_k, top_p)] = -np.inf
    return int(_argmax(scores))


def check_options(temperature: float, top_k: int, top_p: float) -> None:
    """Raises InputError, naming the option, when one is outside its range."""
    # A positive temperature that FP32 rounds to 0 would divide by zero.
    if not math.isfinite(temperature) or temperature < 0 or (temperature > 0) != (np.float32(temperature) > 0):
        raise InputError(f"sample: temperature {temperature} must be 0 (greedy) or positive")
    if top_k < 0:
        raise InputError(f"sample: top_k {top_k} must be 0 (off) or positive")
    if not 0 < top_p <= 1:
        raise InputError(f"sample: top_p {top_p} must be above 0 and at most 1 (off)")
