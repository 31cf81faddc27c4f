"""Faults of the learner's head, whose logits exist only in parts; the checks are those of test_scoring.py."""

from collections.abc import Callable
from typing import Any

import torch

from alignment_tests.learner.test_loop import sample_score_update
from alignment_tests.learner.test_scoring import check_parts, check_what_is_free
from alignment_tests.mutations import Mutation, patched
from alignment_tests.test_memory_bounds import check_an_update
from minitransformer.learner import scoring
from minitransformer.ops import linear, logprob

_of_rows, _continue_dx, _backward = scoring._of_rows, linear.continue_dx, logprob.backward


def _rounded_between(dy_TN, weight_NK, acc_TK, last):
    return _continue_dx(dy_TN, weight_NK, None if acc_TK is None else acc_TK.bfloat16().float(), last)


def _added(dy_TN, weight_NK, acc_TK, last):
    """Each part a chain from zero, as a split K would have it."""
    dx = _continue_dx(dy_TN, weight_NK, None, last)
    return dx if acc_TK is None else (dx.float() + acc_TK).to(dx.dtype)


def _forgets_what_came_before(dy_TN, weight_NK, acc_TK, last):
    return _continue_dx(dy_TN, weight_NK, None, last)


def _ids_of_the_first_part(dout, logits, ids, temperatures, max_sum, first=0, dtype=torch.float32):
    return _backward(dout, logits, ids, temperatures, max_sum, 0, dtype)


def _truncated(dout, logits, ids, temperatures, max_sum, first=0, dtype=torch.float32):
    d = _backward(dout, logits, ids, temperatures, max_sum, first)
    return d if dtype == torch.float32 else (d.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def _mutation(name: str, law: str, owner: Any, attribute: str, mutant: Any, check: Callable = check_parts) -> Mutation:
    return Mutation(name, law, patched(owner, attribute, mutant), check)


_PARTS = "the parts move no bit"

MUTATIONS = [
    _mutation("temperature ignored when scoring", "learner == sampler", scoring, "_of_rows",
              lambda one, temperatures: torch.ones(one.bounds[-1]), sample_score_update),
    _mutation("every row at the first sequence's temperature", _PARTS, scoring, "_of_rows",
              lambda one, temperatures: _of_rows(one, [temperatures[0]] * len(temperatures))),
    _mutation("dX rounded between the parts", _PARTS, linear, "continue_dx", _rounded_between),
    _mutation("dX a sum of the parts' chains", _PARTS, linear, "continue_dx", _added),
    _mutation("dX of the last part alone", _PARTS, linear, "continue_dx", _forgets_what_came_before),
    _mutation("the target looked for in every part", _PARTS, logprob, "backward", _ids_of_the_first_part),
    _mutation("gradients of the logits truncated to BF16", _PARTS, logprob, "backward", _truncated),
    _mutation("parts that follow nothing but CHUNK_BYTES", "the parts follow what is free", scoring, "part_bytes",
              lambda device, beside=0: scoring.CHUNK_BYTES, check_what_is_free),
    _mutation("all columns at once in the backward", "nothing is as large as the logits", scoring, "STEP", 1 << 20,
              check_an_update),
]  # fmt: skip
