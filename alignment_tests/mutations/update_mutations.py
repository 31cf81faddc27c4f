"""Faults of how an update ends, in AdamW and around it; the check is the test of the law that each breaks."""

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from alignment_tests.learner import (
    test_checkpoint,
    test_checkpoint_breaks,
    test_learner,
    test_memory,
    test_update_goldens,
)
from alignment_tests.mutations import Mutation, patched
from minitransformer import ops
from minitransformer.devices import naming_memory
from minitransformer.errors import InputError
from minitransformer.learner import checkpoint, optimizer
from minitransformer.learner.learner import Learner

_apply = Learner._apply


@torch.no_grad()
def _as_torch_does(weight, grad, master, exp_avg, exp_avg_sq, s):
    """torch.optim.AdamW's operations, of which some round as the vector unit likes."""
    grad = torch.zeros_like(master) if grad is None else grad * s.clip
    master.mul_(1 - s.decay)
    exp_avg.lerp_(grad, s.w1)
    exp_avg_sq.mul_(s.b2).addcmul_(grad, grad, value=s.w2)
    master.addcdiv_(exp_avg, exp_avg_sq.sqrt().mul_(s.root).add_(s.eps), value=-s.size)
    weight.copy_(master)


def _one_by_one(self, totals, clip):
    one = self.optimizer
    now = ops.adamw.scalars(one.step + 1, one.lr, clip=clip, **one.settings)
    with naming_memory("making masters and moments in FP32", "nothing was updated; lower max_tokens_per_pack"):
        for name, master in one.masters.items():
            one.moments[name] = optimizer.torch.zeros_like(master), optimizer.torch.zeros_like(master)
            ops.adamw.adamw(self.parameters[name].detach(), totals.get(name), master, *one.moments[name], now)


def _skips_without_a_gradient(weight, grad, *state):
    if grad is not None:
        ops.adamw.adamw(weight, grad, *state)


def _two_steps(self, totals, clip):
    _apply(self, totals, clip)
    _apply(self, totals, clip)


def _check_other_adamw() -> None:
    """A run of another version of AdamW is not resumed as if its updates had the same bits here."""
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(ops.adamw, "SPEC", "adamw/999"):
            test_checkpoint._learner().save(Path(folder) / "run")
        try:
            test_checkpoint._learner().load(Path(folder) / "run")
        except InputError:
            return
    raise AssertionError("resumed with another AdamW")


def _check_broken_load() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        try:
            test_checkpoint_breaks.test_a_load_that_breaks_off_is_not_learned_from(Path(folder), patch, "weights")
        except pytest.fail.Exception as error:  # no error where one was due
            raise AssertionError(str(error)) from None


def _check_updates() -> None:
    test_update_goldens.test_known_answer("bf16")


_STEP = "an update is one AdamW step of the masters"

MUTATIONS = [
    Mutation("AdamW as torch computes it", "an update has the same bits everywhere",
             patched(optimizer, "adamw", _as_torch_does), _check_updates),
    Mutation("resume with another AdamW", "resume is exact", patched(checkpoint, "update_entries", dict),
             _check_other_adamw),
    Mutation("moments made while weights are written", "an update is whole or not at all",
             patched(Learner, "_apply", _one_by_one), test_memory.check_unchanged),
    Mutation("half a load is learned from", "an update is whole or not at all",
             patched(Learner, "_refuse_torn", lambda self: None), _check_broken_load),
    Mutation("moments of a parameter without a gradient stay", _STEP,
             patched(optimizer, "adamw", _skips_without_a_gradient),
             test_learner.test_a_clipped_update_is_that_of_scaled_gradients),
    Mutation("weights updated twice", _STEP, patched(Learner, "_apply", _two_steps), test_learner.test_adamw_by_hand),
]  # fmt: skip
