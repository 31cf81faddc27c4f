"""What is said about one stage of two compared runs: counts, the largest distance, the first places and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitransformer.alignment.ulp import bits, differing, ulp_distance

SHOWN = 5
Place = tuple[int, int, int]


@dataclass(frozen=True)
class StageResult:
    """One stage of two runs a and b.

    rows, elements   compared (present on both sides)
    differing        elements whose bits differ
    max_ulp          the largest distance among them (0 can be +0 against -0; see ulp.py)
    places           up to five (request id, position, element within the row), in that order
    values           the pairs (a, b) at those places
    only_a, only_b   rows that one side lacks (a prefix-cache hit, a stage that was not traced)
    """

    stage: str
    rows: int
    elements: int
    differing: int
    max_ulp: int
    places: tuple[Place, ...]
    values: tuple[tuple[float, float], ...]
    only_a: int = 0
    only_b: int = 0

    @property
    def equal(self) -> bool:
        return self.differing == 0

    @property
    def first(self) -> Place | None:
        return self.places[0] if self.places else None


class StageComparison:
    """Adds up one stage's differences over many calls; keeps the counts and the first five, not the tensors."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.rows = self.elements = self.differing = self.max_ulp = 0
        self._shown: list[tuple[Place, tuple[float, float]]] = []

    def add(self, pairs_R2: Tensor, a: Tensor, b: Tensor) -> None:
        """a, b: the same R rows of both runs, [R, ...]; pairs_R2 int64: their request ids and positions."""
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            raise ValueError(
                f"stage {self.stage}: rows of {tuple(a.shape[1:])} {a.dtype} on one side, "
                f"{tuple(b.shape[1:])} {b.dtype} on the other"
            )
        self.rows += a.shape[0]
        self.elements += a.numel()
        if torch.equal(bits(a), bits(b)):
            return
        a_RE, b_RE = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        wrong_RE = differing(a_RE, b_RE)
        self.differing += int(wrong_RE.sum())
        self.max_ulp = max(self.max_ulp, int(ulp_distance(a_RE[wrong_RE], b_RE[wrong_RE]).max()))
        self._show(pairs_R2.tolist(), a_RE, b_RE, wrong_RE)

    def merge(self, other: "StageComparison") -> None:
        """Adds what another one of this stage has counted."""
        self.rows, self.elements = self.rows + other.rows, self.elements + other.elements
        self.differing, self.max_ulp = self.differing + other.differing, max(self.max_ulp, other.max_ulp)
        self._shown = sorted(self._shown + other._shown, key=lambda shown: shown[0])[:SHOWN]

    def _show(self, pairs_R2: list[list[int]], a_RE: Tensor, b_RE: Tensor, wrong_RE: Tensor) -> None:
        rows = wrong_RE.any(1).nonzero().flatten().tolist()
        # Rows come in the order of the batch; the first place is the lowest request and position, whatever that order.
        rows.sort(key=lambda r: pairs_R2[r])
        for r in rows[:SHOWN]:
            for e in wrong_RE[r].nonzero().flatten()[:SHOWN].tolist():
                place = (pairs_R2[r][0], pairs_R2[r][1], e)
                self._shown.append((place, (a_RE[r, e].item(), b_RE[r, e].item())))
        self._shown = sorted(self._shown, key=lambda shown: shown[0])[:SHOWN]

    def result(self, only_a: int = 0, only_b: int = 0) -> StageResult:
        places = tuple(place for place, _ in self._shown)
        values = tuple(pair for _, pair in self._shown)
        return StageResult(
            self.stage, self.rows, self.elements, self.differing, self.max_ulp, places, values, only_a, only_b
        )
