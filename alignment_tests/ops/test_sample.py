"""sample: the noise is uniform and independent, draws follow the distribution, top-k and top-p are exact sets."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from alignment_tests import inputs, plain
from minitransformer.errors import InputError
from minitransformer.ops import rounding
from minitransformer.ops.logprob import logprob
from minitransformer.ops.sample import _last_kept, _order_keys, draw_keys, sample, uniform

F32 = np.float32


@njit
def _uniforms(seed, position, out):
    key, key2 = draw_keys(seed, position)
    for v in range(out.size):
        out[v] = uniform(key, key2, np.uint64(v))


def uniforms(seed: int, position: int, n: int) -> np.ndarray:
    out = np.empty(n)
    _uniforms(np.uint64(seed), np.uint64(position), out)
    return out


def plain_uniform(seed: int, position: int, v: int) -> float:
    """The spec in Python integers."""
    C0, C1, C2, full = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
        return z ^ (z >> 31)

    key = mix((mix((seed + C0) & full) + position * C1) & full)
    h = mix(mix((key + C2) & full) ^ mix((key + v * C0) & full))
    return ((h >> 12) + 0.5) / 2**52


def excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square in standard deviations above its mean (bins - 1, variance twice that)."""
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_the_noise_is_the_specs(seed, position):
    got = uniforms(seed, position, 40)
    assert got.tolist() == [plain_uniform(seed, position, v) for v in range(40)]


def test_the_noise_is_uniform_within_and_across_keys():
    n = 1 << 17
    streams = [uniforms(seed, position, n) for seed in (0, 1, 2**63) for position in (0, 1, 1000)]
    # The same token under consecutive positions and consecutive seeds is a stream as well.
    streams.append(np.array([uniforms(7, p, 3)[2] for p in range(20_000)]))
    streams.append(np.array([uniforms(s, 5, 3)[2] for s in range(20_000)]))
    for u in streams:
        assert 0 < u.min() and u.max() < 1
        counts = np.bincount((u * 256).astype(int), minlength=256)
        assert abs(excess(counts, np.full(256, len(u) / 256))) < 5
        pairs = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
        assert abs(excess(pairs, np.full(256, (len(u) - 1) / 256))) < 5
    for i, a in enumerate(streams[:9]):
        for b in streams[i + 1 : 9]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(n)
            assert not np.isin(a, b).any()


def test_draws_follow_the_softmax():
    logits = inputs.normal(1, 12, scale=1.5)
    for temperature in (1.0, 0.6):
        n = 6000
        counts = np.bincount([sample(logits, 3, p, temperature) for p in range(n)], minlength=12)
        log_probs = logprob(logits.repeat(12, 1), torch.arange(12), temperature)
        assert abs(excess(counts, n * log_probs.double().exp().numpy())) < 5


def test_the_draw_is_the_gumbel_maximum():
    logits = inputs.normal(2, 500, scale=3.0)
    for position in range(20):
        u = np.array([plain_uniform(9, position, v) for v in range(500)])
        scores = (logits.numpy() / F32(0.8)).astype(np.float64) - np.log(-np.log(u))
        assert sample(logits, 9, position, 0.8) == scores.argmax()


def test_the_noise_belongs_to_seed_position_and_token_alone():
    """Reported: noise indexed by batch slot. Here a longer vocabulary leaves the other tokens' noise as it is."""
    logits = inputs.normal(3, 300, scale=2.0)
    longer = torch.cat([logits, torch.full((50,), float("-inf"))])
    draws = [sample(logits, 1, p) for p in range(50)]
    assert draws == [sample(longer, 1, p) for p in range(50)] == [sample(logits, 1, p) for p in range(50)]
    assert draws != [sample(logits, 2, p) for p in range(50)] and len(set(draws)) > 20
    assert sample(logits, -1, 0) == sample(logits, 2**64 - 1, 0)


def test_temperature_zero_is_greedy_with_ties_to_the_lower_id():
    logits = torch.tensor([1.0, 3.0, -0.0, 3.0])
    assert {sample(logits, seed, 0, 0.0, top_k=2, top_p=0.1) for seed in range(20)} == {1}
    assert sample(torch.tensor([-1.0, -0.0, 0.0]), 0, 0, 0.0) == 1


def kept_set(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    """By the spec, in Python: a stable sort, then integers."""
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda v: -values[v])[: top_k or None]
    x = logits.numpy() / F32(temperature)
    p = plain.exp2((x - x.max()) * plain.LOG2E, rounding.EXP2)
    mass = [int(Fraction(float(p[v])) * 2**40) for v in order]
    kept, reached, need = set(), 0, top_p * float(sum(mass))
    for v, m in zip(order, mass, strict=True):
        kept.add(v)
        reached += m
        if top_p < 1 and float(reached) >= need:
            break
    return kept


@given(
    V=st.integers(1, 60), top_k=st.integers(0, 12), top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    coarse=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_truncation_keeps_exactly_the_specs_set(V, top_k, top_p, coarse, seed):
    logits = inputs.normal(seed, V, scale=2.0)
    if coarse:  # ties, and both zeros
        logits = logits.round() * torch.where(inputs.integers(seed, 2, V) == 0, 1.0, -1.0)
    kept = kept_set(logits, 0.9, top_k, top_p)
    outside = torch.ones(V, dtype=torch.bool).index_fill_(0, torch.tensor(sorted(kept)), False)
    alone = logits.masked_fill(outside, float("-inf"))
    for position in range(30):
        got = sample(logits, seed, position, 0.9, top_k, top_p)
        assert got in kept and got == sample(alone, seed, position, 0.9)


@pytest.mark.parametrize(("top_k", "top_p", "scale"), [(0, 0.9, 1.0), (0, 0.9, 6.0), (3000, 0.5, 1.0), (0, 0.999, 0.1)])
def test_long_prefixes_keep_the_specs_set(top_k, top_p, scale):
    """Prefixes of a few tokens, of thousands, and of nearly all."""
    logits = inputs.normal(6, 12_000, scale=scale)
    t, m = F32(0.9), F32(logits.max()) / F32(0.9)
    keys = np.empty(logits.numel(), np.uint64)
    _order_keys(logits.numpy(), keys)
    got = np.flatnonzero(keys <= _last_kept(keys, logits.numpy(), t, m, top_k, top_p))
    assert set(got.tolist()) == kept_set(logits, 0.9, top_k, top_p)


def test_truncation_reaches_every_kept_token():
    logits = torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0, -5.0])
    seen = {sample(logits, 0, p, top_k=4) for p in range(300)}
    assert seen == {3, 1, 0, 2}  # of the three that tie at the boundary, the lower two
    probs = torch.tensor([0.5, 0.25, 0.25]).log()
    assert {sample(probs, 0, p, top_p=0.5) for p in range(100)} == {0}
    assert {sample(probs, 0, p, top_p=0.51) for p in range(100)} == {0, 1}
    assert {sample(probs, 0, p, top_p=1e-9) for p in range(100)} == {0}


def test_the_log_prob_is_of_the_full_distribution():
    """Truncation changes what is drawn, not what logprob says: the truncated probabilities are larger."""
    logits = inputs.normal(4, 50)
    drawn = sample(logits, 0, 0, top_k=5)
    assert logprob(logits[None], torch.tensor([drawn])).exp() < 1 / 5 < 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_refused(value, temperature):
    logits = torch.zeros(200)
    logits[150] = value
    with pytest.raises(InputError, match="position 12"):
        sample(logits, 0, 12, temperature)
    with pytest.raises(InputError, match="position 12"):
        sample(torch.full((4,), float("-inf")), 0, 12, temperature)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_k": -1}, "top_k"),
     ({"temperature": 1e-60}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p")],
)  # fmt: skip
def test_options_outside_their_range_are_refused(options, name):
    with pytest.raises(InputError, match=name):
        sample(torch.zeros(4), 0, 0, **options)


def test_logits_that_overflow_at_the_temperature_are_refused():
    with pytest.raises(InputError, match="overflow"):
        sample(torch.tensor([1.0, 5.0]), 0, 0, 1e-38, top_p=0.5)


def test_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"\[V\]"):
        sample(torch.zeros(1, 4), 0, 0)
    with pytest.raises(TypeError, match="FP32"):
        sample(torch.zeros(4, dtype=torch.bfloat16), 0, 0)
