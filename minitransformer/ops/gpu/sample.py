"""sample/1 on Hopper for many rows at once (ops/sample.py has the spec), with the log-probs of what was drawn.

Order and mass are integers, so the library's sort and sum serve. Nothing waits for the GPU but the last two copies.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import rounding
from minitransformer.ops import sample as spec
from minitransformer.ops.gpu import device, logprob
from minitransformer.ops.gpu.launch import cdiv, next_power_of_2, on, quick
from minitransformer.ops.gpu.scalar import LOG2E, div, exp2_32

_C0, _C1, _C2, _M1, _M2 = (tl.constexpr(int(c)) for c in (spec._C0, spec._C1, spec._C2, spec._M1, spec._M2))
_LN2 = tl.constexpr(math.log(2))
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


@triton.jit
def _hash(key, key2, v):
    return _mix(key2 ^ _mix(key + v.to(tl.uint64) * _C0))


@triton.jit
def _gumbel(h):
    u = ((h >> 12).to(tl.int64).to(tl.float64) + _c(h, 0.5)) * _c(h, 2.0**-52)
    return -log_64(-log_64(u))


@triton.jit
def _guess(y, h):
    """FP32 g, about y + gumbel where u > 1/4, and never less than it by more than 0.001 + 2^-20 |g|.

    By the 32 high bits of h: w <= 1 - u, e = w + w^2 / 2 + w^3 / 3 + w^4 / 4 <= -log u, log2 e within 0.0009.
    """
    w = ((h >> 32) ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32) * 2.0**-32
    e = w * tl.fma(w, tl.fma(w, tl.fma(w, 1 / 4, 1 / 3), 1 / 2), 1.0)
    bits = e.to(tl.int32, bitcast=True)
    f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    log2_e = tl.fma(f - f * f, tl.fma(f, -0.15922, 0.422865), tl.fma(bits.to(tl.float32), 2.0**-23, -127.0))
    return tl.fma(log2_e, -_LN2, y)


@triton.jit
def _order(x):
    """int32 that ascends as FP32 x does, with -0 equal to +0."""
    u = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is +0
    # As a signed integer a positive float ascends by itself, a negative one with its magnitude flipped.
    return tl.where(u < 0, u ^ 0x7FFFFFFF, u)


@triton.jit
def _key(x, v):
    """int64 that ascends as (logit descending, id ascending)."""
    return ((-1 - _order(x).to(tl.int64)) << 32) | v.to(tl.int64)


@triton.jit
def _over(x, t):
    return x if t == 0.0 or t == 1.0 else div(x, t)


@triton.jit
def _kept(x, v, V, last, CUT: tl.constexpr):
    inside = (v < V) & (x == x)
    if CUT:
        inside = inside & (_key(x, v) <= last)
    return inside


@triton.jit
def _exact(logits_ptr, t, key, key2, last, begin, end, V, CUT: tl.constexpr, WIDE: tl.constexpr):
    """The largest score FP64 of ids from begin to end, and its lowest id."""
    best, best_id = tl.full((WIDE,), float("-inf"), tl.float64), tl.full((WIDE,), 0x7FFFFFFF, tl.int32)
    for v0 in range(begin, end, WIDE):
        v = v0 + tl.arange(0, WIDE)
        x = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
        score = _over(x, t).to(tl.float64)
        if t != 0.0:
            score += _gumbel(_hash(key, key2, v))
        better = _kept(x, v, V, last, CUT) & (score > best)
        best, best_id = tl.where(better, score, best), tl.where(better, v, best_id)
    most = tl.max(best, 0)
    return most, tl.min(tl.where(best == most, best_id, 0x7FFFFFFF), 0)


@quick
@triton.jit(do_not_specialize=["V"])
def best_kernel(
    logits_ptr, seeds_ptr, positions_ptr, temperatures_ptr, last_ptr, score_ptr, id_ptr, top_ptr, V,
    BLOCK: tl.constexpr, CUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (block, row): its largest score FP64 and logit FP32, and the lowest id of that score, each [L, blocks].

    seeds int64 bits, positions, temperatures (0: greedy) and last, the largest key kept: all [L]. FP64 is computed of
    the best guess, and of all if another's is as near as guesses may be off.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits_ptr += row * V
    t, last = tl.load(temperatures_ptr + row), tl.load(last_ptr + row)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed + _C0) + tl.load(positions_ptr + row).to(tl.uint64) * _C1)
    key2 = _mix(key + _C2)
    begin = block * BLOCK
    end = tl.minimum(begin + BLOCK, V)
    # Of each lane: the largest logit, the two best guesses, and the first one's id.
    top = tl.full((WIDE,), float("-inf"), tl.float32)
    first, second, id_ = top, top, tl.full((WIDE,), 0, tl.int32)
    for v0 in range(begin, end, WIDE):
        v = v0 + tl.arange(0, WIDE)
        x = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
        top = tl.maximum(top, tl.where(x == x, x, float("inf")))  # +infinity stands for a NaN too: both are refused
        guess = tl.where(_kept(x, v, V, last, CUT), _guess(_over(x, t), _hash(key, key2, v)), float("-inf"))
        second = tl.maximum(second, tl.minimum(first, guess))
        id_ = tl.where(guess > first, v, id_)
        first = tl.maximum(first, guess)
    best_id = tl.min(tl.where(first == tl.max(first, 0), id_, V - 1), 0)
    best = _over(tl.load(logits_ptr + best_id), t).to(tl.float64) + _gumbel(_hash(key, key2, best_id))
    least = best.to(tl.float32)
    least -= tl.abs(least) * 2.0**-18 + 2e-3  # whose guess is less can't win; nearly always that is all others
    if t == 0.0 or tl.sum((first >= least).to(tl.int32) + (second >= least).to(tl.int32), 0) != 1:
        best, best_id = _exact(logits_ptr, t, key, key2, last, begin, end, V, CUT, WIDE)
    at = row * tl.num_programs(0) + block
    tl.store(score_ptr + at, best)
    tl.store(id_ptr + at, best_id)
    tl.store(top_ptr + at, tl.max(top, 0))


@quick
@triton.jit(do_not_specialize=["blocks"])
def pick_kernel(
    score_ptr, id_ptr, top_ptr, temperatures_ptr, out_ptr, faults_ptr, blocks, PADDED: tl.constexpr, SLOT: tl.constexpr
):
    """Program row: its id int64, or -1: a NaN or no finite maximum, -2: the temperature makes the maximum overflow.

    SLOT < 0: such a row is not flagged.
    """
    row, i = tl.program_id(0), tl.arange(0, PADDED)
    at = row * blocks + i
    score = tl.load(score_ptr + at, mask=i < blocks, other=float("-inf"))
    best = tl.max(score, 0)
    ids = tl.load(id_ptr + at, mask=i < blocks, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(score == best, ids, 0x7FFFFFFF), 0)
    top, t = tl.max(tl.load(top_ptr + at, mask=i < blocks, other=float("-inf")), 0), tl.load(temperatures_ptr + row)
    infinite = float("inf")
    over = tl.abs(div(top, tl.where(t == 0.0, 1.0, t))) == infinite
    chosen = tl.where(tl.abs(top) == infinite, -1, tl.where(over, -2, chosen))
    tl.store(out_ptr + row, chosen.to(tl.int64))
    if SLOT >= 0:
        if chosen < 0:
            tl.atomic_min(faults_ptr + SLOT, row, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["V"])
def keys_kernel(logits_ptr, temperatures_ptr, tops_ptr, keys_ptr, mass_ptr, V, BLOCK: tl.constexpr):
    """Program (block, row): keys and integer masses, int64 [L, V]; tops [L]: the rows' largest logits."""
    row = tl.program_id(1)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * V + v
    x = tl.load(logits_ptr + at, mask=v < V, other=0.0)
    t, top = tl.load(temperatures_ptr + row), tl.load(tops_ptr + row)
    tl.store(keys_ptr + at, _key(x, v), mask=v < V)
    p = exp2_32((div(x, t) - div(top, t)) * LOG2E)
    tl.store(mass_ptr + at, (p * 1099511627776.0).to(tl.int64), mask=v < V)


class Draw(NamedTuple):
    """How one row is drawn (ops/sample.py), and at which temperature its log-prob is taken."""

    seed: int
    position: int
    temperature: float
    top_k: int
    top_p: float
    log_prob_temperature: float


BLOCK, WIDE = 1024, 512
CUT_ROWS = 32  # rows that are sorted at a time: seven int64 [rows, V] are alive then
_ALL = 2**63 - 1


class Rows(NamedTuple):
    """The same on the GPU, of rows that nothing is cut from, each [L]: int64 seeds and positions, FP32 temperatures."""

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    log_prob_temperatures: Tensor


def _last_kept(logits_LV: Tensor, t_L: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [L]: the largest key that top_k and top_p keep of each row."""
    L, V = logits_LV.shape
    keys, mass = (torch.empty(L, V, dtype=torch.int64, device=logits_LV.device) for _ in range(2))
    keys_kernel[(cdiv(V, BLOCK), L)](logits_LV, t_L, logits_LV.amax(1), keys, mass, V, BLOCK, **device.ROWS)
    keys = torch.sort(keys).values
    most = _on(logits_LV, [min(d.top_k or V, V) for d in draws], torch.int64)[:, None]
    share = _on(logits_LV, [d.top_p for d in draws], torch.float64)[:, None]
    reached = mass.gather(1, keys & 0xFFFFFFFF).cumsum(1)
    need = reached.gather(1, most - 1).double() * share
    # The first place that reaches the share; a share of 1 keeps all that top_k kept.
    place = torch.where(share < 1, (reached.double() < need).sum(1, keepdim=True), most - 1)
    return keys.gather(1, torch.minimum(place, most - 1))[:, 0]


def _on(like: Tensor, values: Sequence, dtype: torch.dtype) -> Tensor:
    """Small host values on the GPU, without waiting for it."""
    return torch.tensor(values, dtype=dtype).pin_memory().to(like.device, non_blocking=True)


def _rows(like: Tensor, draws: Sequence[Draw]) -> Rows:
    unused = [0] * (-len(draws) % 4)  # each row of numbers begins at 16 bytes, so that one compiled kernel serves all
    seeds = [(d.seed + 2**63) % 2**64 - 2**63 for d in draws]  # int64 of the same bits
    integers = [seeds + unused, [d.position for d in draws] + unused]
    floats = [[d.temperature for d in draws] + unused, [d.log_prob_temperature for d in draws] + unused]
    on = *_on(like, integers, torch.int64), *_on(like, floats, torch.float32)
    return Rows(*(numbers[: len(draws)] for numbers in on))


def choose(
    logits_LV: Tensor, rows: Rows, cut: Sequence[tuple[int, Draw]] = (), where: int = -1
) -> tuple[Tensor, Tensor]:
    """Contiguous FP32 [L, V] -> (ids int64 [L], or -1 and -2 as in pick_kernel; FP32 [L, blocks] maxima of logits).

    cut: the rows of which top_k or top_p leave out ids. where: as SLOT.
    """
    (L, V), home = logits_LV.shape, logits_LV.device
    block = 1024 if L <= 8 else 2048 if L <= 64 else 8192  # as timed on an H200
    blocks = cdiv(V, block)
    kinds = torch.float64, torch.int32, torch.float32
    score, id_, top = (torch.empty(L, blocks, dtype=kind, device=home) for kind in kinds)
    out, last, t = torch.empty(L, dtype=torch.int64, device=home), rows.seeds, rows.temperatures
    with on(home):
        if cut:
            last = torch.full((L,), _ALL, dtype=torch.int64, device=home)
        for begin in range(0, len(cut), CUT_ROWS):
            numbers, draws = zip(*cut[begin : begin + CUT_ROWS], strict=True)
            some = _on(logits_LV, numbers, torch.int64)
            last[some] = _last_kept(logits_LV[some], t[some], draws)
        best_kernel[(blocks, L)](
            logits_LV, rows.seeds, rows.positions, t, last, score, id_, top, V, block, bool(cut), WIDE, **device.ROWS
        )
        pick_kernel[(L,)](
            score, id_, top, t, out, device.faults(home), blocks, next_power_of_2(blocks), where, **device.ROWS
        )
    return out, top


def _refusal(code: int, draw: Draw) -> InputError:
    where = f"sample: the logits for position {draw.position}"
    if code == -1:
        return InputError(f"{where} have a NaN or no finite maximum")
    return InputError(f"{where} overflow at temperature {draw.temperature}; raise it")


def _cut(draws: Sequence[Draw]) -> list[tuple[int, Draw]]:
    return [(i, d) for i, d in enumerate(draws) if d.temperature > 0 and (d.top_k or d.top_p < 1)]


def draw(logits_LV: Tensor, draws: Sequence[Draw]) -> list[tuple[int, float] | InputError]:
    """Each row's id and its log-prob, or what sample() would have raised for the row; options are not checked here."""
    home = logits_LV.device
    (logits,) = device.take("sample", home, torch.float32, logits_LV)
    if len(draws) == 0:
        return []
    rows = _rows(logits, draws)
    ids, tops = choose(logits, rows, _cut(draws))
    log_probs = logprob.of_rows(logits, ids, rows.log_prob_temperatures, tops)
    found = zip(ids.tolist(), log_probs[0].tolist(), draws, strict=True)
    return [(token, log_prob) if token >= 0 else _refusal(token, d) for token, log_prob, d in found]


def draw_rows(logits_LV: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """draw for what lies on the GPU, which is not waited for: (ids int64, log-probs FP32). The next device.check or
    watch tells of a row without a token."""
    home = logits_LV.device
    (logits,) = device.take("sample", home, torch.float32, logits_LV)
    ids, tops = choose(logits, rows, where=device.slot("sample"))
    return ids, logprob.of_rows(logits, ids, rows.log_prob_temperatures, tops)[0]


def sample(logits_V: Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float) -> int:
    home = logits_V.device
    (logits,) = device.take("sample", home, torch.float32, logits_V)
    if logits.dim() != 1 or logits.numel() == 0:
        raise ValueError(f"sample: logits are {tuple(logits.shape)}, expected [V]")
    one = [Draw(seed, position, temperature, top_k, top_p, 1.0)]
    token = int(choose(logits[None], _rows(logits, one), _cut(one))[0])
    device.check(home)
    if token < 0:
        raise _refusal(token, one[0])
    return token
