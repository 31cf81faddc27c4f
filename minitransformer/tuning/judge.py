"""Candidates before the judge: one is timed only after it gave the spec's bits on every case."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from minitransformer.tuning import proof


@dataclass(frozen=True)
class Candidate:
    """run takes a case's operands. tile or library: what a row of the table would say."""

    name: str
    run: Callable[..., Tensor]
    tile: tuple | None = None
    library: str | None = None


@dataclass(frozen=True)
class Case:
    what: str
    operands: tuple
    want: Tensor


@dataclass(frozen=True)
class Verdict:
    """refused: what was wrong, with the first element that differs; ms: of a candidate whose bits are the spec's."""

    candidate: Candidate
    refused: str | None = None
    ms: float | None = None


Clock = Callable[[Sequence[Candidate]], Sequence[float]]


def judge(candidates: Sequence[Candidate], cases: Iterable[Case], clock: Clock | None = None) -> list[Verdict]:
    """Holds every candidate to the bits of every case; then clock(candidates) -> ms of those that have them."""
    refused: dict[str, str] = {}
    for case in cases:
        for candidate in candidates:
            if candidate.name in refused:
                continue
            try:
                unlike = proof.first_difference(candidate.run(*case.operands), case.want)
            except Exception as error:  # does not run here, as with too little shared memory (Triton's own kind)
                unlike = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            if unlike is not None:
                refused[candidate.name] = f"{case.what}: {unlike}"
    right = [c for c in candidates if c.name not in refused]
    times = dict(zip((c.name for c in right), clock(right), strict=True)) if clock and right else {}
    return [Verdict(c, refused.get(c.name), times.get(c.name)) for c in candidates]


def fastest(verdicts: Iterable[Verdict]) -> Verdict | None:
    right = [v for v in verdicts if v.refused is None and v.ms is not None]
    return min(right, key=lambda v: v.ms, default=None)
