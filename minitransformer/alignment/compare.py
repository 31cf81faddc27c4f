"""Compares two runs stage by stage, on bits: two traces, or one trace against a run that is going on.

Rows are matched by (request id, position). Rows that only one side has are counted, never hidden. Whether the two
runs followed the same execution spec is checked first: log-probs of different specs have nothing to say to each other.
"""

from collections.abc import Sequence

from torch import Tensor

from minitransformer.alignment.difference import StageComparison, StageResult
from minitransformer.alignment.trace import Noter, Trace, stage_order
from minitransformer.errors import InputError
from minitransformer.spec import spec_differences


class ComparingTrace(Noter):
    """Has a trace's interface, but compares each row with the reference's at once and keeps only the differences.

    So the second run of a large model needs no memory for its tensors.
    """

    def __init__(self, reference: Trace, stages: Sequence[str] | None = None) -> None:
        # A copy of the reference's keys: equal numbers mean equal (request, position) pairs on both sides.
        super().__init__(reference.patterns if stages is None else stages, reference.keys.copy())
        self.reference = reference
        self._compared: dict[str, StageComparison] = {}
        self._seen: dict[str, set[int]] = {}
        self._matched: dict[str, int] = {}

    def take(self, stage: str, keys_R: Tensor, rows: Tensor) -> None:
        comparison = self._compared.setdefault(stage, StageComparison(stage))
        seen = self._seen.setdefault(stage, set())
        at_R = self.reference.find(stage, keys_R)
        both_R = at_R >= 0
        if bool(both_R.any()):
            pairs_R2 = self.keys.pairs()[keys_R[both_R]]
            comparison.add(pairs_R2, self.reference.rows(stage)[at_R[both_R]], rows[both_R])
            fresh = set(keys_R[both_R].tolist()) - seen
            self._matched[stage] = self._matched.get(stage, 0) + len(fresh)
        seen.update(keys_R.tolist())

    def results(self) -> list[StageResult]:
        """Every stage of either side, in the model's order; a stage of one side only has 0 rows compared."""
        wanted = {stage for stage in self.reference.stages if self.wants(stage)}
        return [self._result(stage) for stage in sorted(wanted | set(self._compared), key=stage_order)]

    def _result(self, stage: str) -> StageResult:
        matched = self._matched.get(stage, 0)
        held = len(self.reference.rows(stage)) if stage in self.reference.stages else 0
        comparison = self._compared.get(stage, StageComparison(stage))
        return comparison.result(only_a=held - matched, only_b=len(self._seen.get(stage, ())) - matched)


def compare(a: Trace, b: Trace, any_spec: bool = False) -> list[StageResult]:
    """Compares the rows of two traces.

    any_spec    compare although the traces' execution specs differ; otherwise InputError names the entries
    """
    unlike = spec_differences(a.spec, b.spec)
    if unlike and not any_spec:
        raise InputError(f"the traces follow different execution specs: {'; '.join(unlike)}")
    comparing = ComparingTrace(a)
    pairs_N2 = b.keys.pairs().tolist()
    for stage in b.stages:
        keys_R = b.row_keys(stage)
        named = comparing.keys.number(tuple(pairs_N2[k]) for k in keys_R.tolist())
        try:
            comparing.take(stage, named, b.rows(stage))
        except ValueError as error:
            raise InputError(f"{error}; the traces are of different models") from error
    return comparing.results()


def first_divergence(results: Sequence[StageResult]) -> StageResult | None:
    """The first stage, in the model's order, with a differing element."""
    return next((result for result in results if not result.equal), None)


def unlike_requests(a: Trace, b: Trace) -> list[str]:
    """One line for each request whose ids differ between the traces: from there on its rows differ for that reason."""
    lines = []
    for request in sorted(a.requests.keys() & b.requests.keys()):
        ids_a, ids_b = (t.requests[request]["prompt_ids"] + t.requests[request]["token_ids"] for t in (a, b))
        if ids_a != ids_b:
            same = next((i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y), None)
            at = min(len(ids_a), len(ids_b)) if same is None else same
            lines.append(f"request {request}: the ids differ from position {at} on")
    return lines


def left_out(a: Trace, b: Trace, results: Sequence[StageResult]) -> list[str]:
    """One line for each request and each stage that was not compared, or not at every token that a run generated.

    Rows of a prompt may be absent on a side: a prefix-cache hit spares them, and `logits` has only the rows that were
    asked for. The row that scores the first generated token, and all after it, must be on both.
    """
    lines = []
    for x, y, side in ((a, b, "first"), (b, a, "second")):
        alone = sorted(x.requests.keys() - y.requests.keys())
        if alone:
            lines.append(f"only in the {side} trace: request {', '.join(map(str, alone[:5]))}")
    starts: dict[int, int] = {}
    for request, ids in (*a.requests.items(), *b.requests.items()):
        starts[request] = max(len(ids["prompt_ids"]) - 1, starts.get(request, 0))
    for result in results:
        if not result.rows:
            lines.append(f"{result.stage}: no row was compared")
        elif result.only_a or result.only_b:
            rows = len(_generating(a, result.stage, starts) ^ _generating(b, result.stage, starts))
            if rows:
                lines.append(f"{result.stage}: {rows} rows of generated tokens are in one trace only")
    return lines


def _generating(trace: Trace, stage: str, starts: dict[int, int]) -> set[tuple[int, int]]:
    """(request, position) of a stage's rows from the one that scores the first generated token on."""
    pairs_R2 = trace.keys.pairs()[trace.row_keys(stage)].tolist()
    return {(request, position) for request, position in pairs_R2 if position >= starts.get(request, 0)}


def nothing_compared(results: Sequence[StageResult]) -> bool:
    return not any(result.rows for result in results)
