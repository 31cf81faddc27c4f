"""Inverse frequencies of the rotary embedding, plain or stretched by YaRN.

YaRN (Peng et al. 2023, arXiv 2309.00071) keeps the fast frequencies, divides the slow ones by `factor`, ramps between
the two, and scales cos and sin by an attention factor. The formula is the one that transformers 5 computes
(`modeling_rope_utils._compute_yarn_parameters`); here everything is FP64, and only the finished table is rounded.
Powers and logarithms are decimal arithmetic rounded once, because libm's last bit differs between machines.
"""

import decimal
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitransformer.errors import InputError
from minitransformer.files import shown
from minitransformer.ops.rope import rope_frequencies

# Bounds within which every formula below stays finite, also in FP32; published configs are far inside them.
_LARGEST = 1e6
_MOST_POSITIONS = 2**31


@dataclass(frozen=True)
class Yarn:
    """factor and original_max_positions are never guessed: releases of transformers disagree about their defaults."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: from factor, or from the two mscales when both are given
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            # An mscale of 0 means none; a negative one would turn the sign of every score.
            least = 0.0 if name.startswith("mscale") else 1 / _LARGEST
            if value is not None and not least <= value <= _LARGEST:
                raise InputError(
                    f"config.json: rope_scaling {_YARN[name]} = {value} must be a finite number from {least:g} to "
                    f"{_LARGEST:g}"
                )
        if self.factor < 1:
            raise InputError(f"config.json: rope_scaling factor = {self.factor} must be at least 1 for yarn")
        if not 1 <= self.original_max_positions <= _MOST_POSITIONS:
            raise InputError(
                "config.json: rope_scaling original_max_position_embeddings = "
                f"{shown(self.original_max_positions)} must lie between 1 and {_MOST_POSITIONS}"
            )
        if not self.beta_fast > self.beta_slow:
            raise InputError(
                f"config.json: rope_scaling beta_fast = {self.beta_fast} must exceed beta_slow = {self.beta_slow}"
            )

    def attention_scale(self) -> float:
        """The factor that multiplies cos and sin (so scores are scaled by its square)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def ramp(self, head_dim: int, theta: float) -> np.ndarray:
        """float64 [H/2] in [0, 1]: 0 keeps a frequency as trained, 1 divides it by `factor`."""

        def pair_that_turns(rotations: float) -> float:
            # The (fractional) pair whose wave turns this often over the original context.
            return head_dim * _ln(self.original_max_positions / (rotations * 2 * math.pi)) / (2 * _ln(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # the same guard against a zero width as transformers
        return np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def _ln(x: float) -> float:
    with decimal.localcontext(prec=40):
        return float(decimal.Decimal(x).ln())


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * _ln(factor) + 1.0  # 1 where factor is, and it is never less


def inverse_frequencies(config) -> tuple[np.ndarray, float]:
    """Frequencies of a model's rotary pairs.

    config: anything with head_dim H, rope_theta and rope_scaling (None or Yarn).
    Returns (float64 [H/2], attention factor): angle of pair i at position p is p * frequencies[i], and cos and sin are
    multiplied by the attention factor (1.0 without YaRN) before the one rounding to FP32.
    """
    H, theta, yarn = config.head_dim, float(config.rope_theta), config.rope_scaling
    plain = rope_frequencies(H, theta)  # without libm, whose last bit varies
    if yarn is None:
        return plain, 1.0
    ramp = yarn.ramp(H, theta)
    return plain / yarn.factor * ramp + plain * (1.0 - ramp), yarn.attention_scale()


_YARN = {
    "factor": "factor",
    "original_max_positions": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}


def typed(key: str, value: Any, kind: type) -> Any:
    """The value of a config key, checked to be an int, float, bool or str (an int is taken where a float is meant)."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"config.json: {key} = {str(value)[:60]!r} should be of type {kind.__name__}")
    return value


def write_rope(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    """The keys that read_rope reads, for transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
    scaling = None
    if yarn is not None:
        given = {key: getattr(yarn, name) for name, key in _YARN.items()}
        scaling = {"rope_type": "yarn"} | {key: value for key, value in given.items() if value is not None}
    return {
        "rope_parameters": {"rope_theta": theta} | (scaling or {"rope_type": "default"}),
        "rope_scaling": scaling,
        "rope_theta": theta,
    }


def read_rope(hf: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """rope_theta and the scaling, from the top level, rope_scaling (transformers 4) and rope_parameters (5)."""
    thetas, scalings = {}, {}
    if hf.get("rope_theta") is not None:
        thetas["rope_theta"] = typed("rope_theta", hf["rope_theta"], float)
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"config.json: {key} = {shown(rope)} should be an object or null")
        if rope.get("rope_theta") is not None:
            thetas[f"{key}.rope_theta"] = typed(f"{key}.rope_theta", rope["rope_theta"], float)
        scalings[key] = _scaling(key, rope)
    if not thetas:
        raise InputError("config.json: rope_theta is missing, at the top and in rope_parameters; add it (no default)")
    if len(set(thetas.values())) > 1:
        raise InputError(f"config.json: {' and '.join(f'{k} = {v}' for k, v in thetas.items())} disagree; correct one")
    if len(set(scalings.values())) > 1:
        raise InputError("config.json: rope_scaling and rope_parameters disagree; correct one")
    return next(iter(thetas.values())), next(iter(scalings.values()), None)


def _scaling(key: str, rope: Mapping[str, Any]) -> Yarn | None:
    kinds = {typed(f"{key}.{k}", rope[k], str) for k in ("rope_type", "type") if rope.get(k) is not None} or {"default"}
    if len(kinds) > 1 or not kinds <= {"default", "yarn"}:
        raise InputError(f"config.json: {key} type {sorted(kinds)} is not supported; only default and yarn are")
    given = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"config.json: {key}.partial_rotary_factor is not supported; the whole head is rotated")
    allowed = set(_YARN.values()) if kinds == {"yarn"} else set()
    if unknown := sorted(given.keys() - allowed):
        raise InputError(
            f"config.json: {key}.{unknown[0]} = {shown(given[unknown[0]])} is not known for {kinds.pop()!r}"
        )
    if kinds == {"default"}:
        return None
    if missing := [k for k in ("factor", "original_max_position_embeddings") if k not in given]:
        raise InputError(f"config.json: {key}.{missing[0]} is missing for yarn; add it (no default)")
    kinds_of = {"original_max_position_embeddings": int, "truncate": bool}
    return Yarn(**{n: typed(f"{key}.{k}", given[k], kinds_of.get(k, float)) for n, k in _YARN.items() if k in given})
