"""Faults in the walk through the learner's model with SGLang's operators; test_stock.py must see each."""

import torch

from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.plugins.sglang import stock


def residual_is_lost(patch) -> None:
    norm = OwnKernels.add_rms_norm
    patch.setattr(OwnKernels, "add_rms_norm", lambda self, x, r, w, eps: (norm(self, x, r, w, eps)[0], r))


def sequences_see_each_other(patch) -> None:
    attend = OwnKernels.attention
    patch.setattr(OwnKernels, "attention", lambda self, q, k, v, bounds: attend(self, q, k, v, (0, bounds[-1])))


def gate_and_up_are_exchanged(patch) -> None:
    experts = OwnKernels.experts

    def other(self, x, gate_up, down, weights, ids):
        halves = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)
        return experts(self, x, halves, down, weights, ids)

    patch.setattr(OwnKernels, "experts", other)


def positions_run_on(patch) -> None:
    turn = OwnKernels.rope
    patch.setattr(
        OwnKernels, "rope", lambda self, q, k, v, positions, table: turn(self, q, k, v, torch.arange(len(q)), table)
    )


def temperature_is_left_out(patch) -> None:
    score = OwnKernels.logprob
    patch.setattr(OwnKernels, "logprob", lambda self, logits, ids, temperature: score(self, logits, ids, 1.0))


def passes_begin_with_the_first_temperature(patch) -> None:
    one, all_of_them = stock._one_pass, []

    def other(model, sequences, kernels, temperatures, first, trace):
        all_of_them.extend(temperatures)
        return one(model, sequences, kernels, all_of_them[: len(sequences)], first, trace)

    patch.setattr(stock, "_one_pass", other)


def passes_name_their_sequences_from_0(patch) -> None:
    one = stock._one_pass
    patch.setattr(stock, "_one_pass", lambda model, s, k, t, first, trace: one(model, s, k, t, 0, trace))


def passes_share_a_sequence(patch) -> None:
    bounds = stock.passes
    patch.setattr(stock, "passes", lambda lengths: [(max(0, a - 1), b) for a, b in bounds(lengths)])


OF_PASSES = {
    f.__name__: f
    for f in (
        passes_begin_with_the_first_temperature, passes_name_their_sequences_from_0, passes_share_a_sequence
    )
}  # fmt: skip
FAULTS = {
    f.__name__: f
    for f in (
        residual_is_lost, sequences_see_each_other, gate_and_up_are_exchanged, positions_run_on, temperature_is_left_out
    )
}  # fmt: skip
