"""Faults of the comparison itself: an alignment that would call two runs equal which are not."""

from collections.abc import Callable

import pytest
import torch

from alignment_tests.alignment import test_align, test_gap, test_trace
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.mutations import Mutation, patched
from minitransformer.alignment import difference, gap
from minitransformer.alignment.align import Alignment
from minitransformer.alignment.compare import ComparingTrace
from minitransformer.alignment.trace import Trace

LAW = "finds what differs"
RESULT = ComparingTrace._result


def with_monkeypatch(test: Callable) -> Callable[[], None]:
    """A test of test_align.py that takes a model and patches its own fault in."""

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(tiny_model(), patch)

    return check


def in_order_of_arrival(self, stage, keys_R):
    """Rows of two traces matched by their place in them, whatever request and position they are of."""
    held = len(self.rows(stage)) if stage in self.stages else 0
    return torch.arange(len(keys_R)).where(torch.arange(len(keys_R)) < held, torch.tensor(-1))


def shown_as_compared(self, stage):
    """A stage that one run lacks counts as if it had been compared."""
    found = RESULT(self, stage)
    return RESULT(self, "embedding") if not found.rows else found


def close_enough(a, b):
    return (a.double() - b.double()).abs() > 1e-6


MUTATIONS = [
    Mutation("values are compared, not bits", LAW, patched(difference, "bits", lambda x: x),
             test_trace.test_the_sign_of_zero_is_a_difference),
    Mutation("rows are matched by their order", LAW, patched(Trace, "find", in_order_of_arrival),
             test_trace.test_chunks_match_the_packed_pass),
    Mutation("rows computed again are not looked at", LAW, patched(Trace, "_check_again", lambda *args: None),
             with_monkeypatch(test_align.test_a_row_with_other_bits_when_it_is_computed_again_is_a_difference)),
    Mutation("the sampler's own conflicts do not count", LAW,
             patched(Alignment, "equal", property(lambda self: not self.gap.differing)),
             with_monkeypatch(test_align.test_a_row_with_other_bits_when_it_is_computed_again_is_a_difference)),
    Mutation("a stage that was not compared is equal", LAW, patched(ComparingTrace, "_result", shown_as_compared),
             with_monkeypatch(test_align.test_a_learner_that_leaves_a_stage_out_is_not_called_equal)),
    Mutation("log-probs that are close are equal", LAW, patched(gap, "differing", close_enough),
             test_gap.test_one_ulp_is_a_gap),
]  # fmt: skip
