"""Faults of a learner, each put back on purpose; the check is the test of the law that it breaks."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alignment_tests.learner import (
    test_checkpoint,
    test_learner,
    test_losses,
    test_masks,
    test_model_gradient,
    tiny,
)
from alignment_tests.learner.test_loop import sample_score_update
from alignment_tests.mutations import Mutation, patched
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner import checkpoint, gradients, learner, losses, packing
from minitransformer.learner.learner import Learner
from minitransformer.sampler.sampler import Sampler

# What the mutants call to do the rest of the work; taken before anything is patched.
_pack, _fill, _save_file = packing._pack, checkpoint._fill, checkpoint.save_file
_apply, _measure, _kernel = Learner._apply, gradients.measure, losses._policy_gradient


def _scored_one_row_late(*args):
    one = _pack(*args)
    # The last row has no next one in its sequence: it stays, as a clamped index would.
    last_L = torch.tensor([b - 1 for b in one.batch.cu_seqlens[1:]])
    rows_L = torch.where(torch.isin(one.batch.logit_rows_L, last_L), one.batch.logit_rows_L, one.batch.logit_rows_L + 1)
    return replace(one, batch=replace(one.batch, logit_rows_L=rows_L))


class _LeakingBatch(Batch):
    @classmethod
    def packed(cls, sequences, request_ids=None):
        batch = Batch.packed(sequences, request_ids)
        rows_SL = batch.key_rows_SL.clone()
        rows_SL[:, 0] = 0  # every sequence attends to the first token of the pack as if it were its own
        return replace(batch, key_rows_SL=rows_SL)


def _without_steps(one, file, facts):
    _fill(one, file, facts)
    one.optimizer.step = 0


def _without_moments(one, file, facts):
    _fill(one, file, facts)
    one.optimizer.moments = {}


def _rounded_masters(tensors, *args, **kwargs):
    rounded = {n: t.bfloat16().float() if n.startswith("masters.") else t for n, t in tensors.items()}
    _save_file(rounded, *args, **kwargs)


def _no_masters(self, totals, clip):
    _apply(self, totals, clip)
    for name, parameter in self.parameters.items():
        self.masters[name].copy_(parameter.detach().float())


def _new_storage(self, totals, clip):
    _apply(self, totals, clip)
    for parameter in self.parameters.values():
        parameter.data = parameter.data.clone()


def _truncated(self, totals, clip):
    _apply(self, totals, clip)
    with torch.no_grad():
        for name, parameter in self.parameters.items():
            bits = (self.masters[name].view(torch.int32) >> 16).to(torch.int16)
            parameter.copy_(bits.view(torch.bfloat16))
    self._written = self._stamp()


def _last_pack_only(totals, parameters):
    totals.update({name: p.grad.float() for name, p in parameters.items() if p.grad is not None})
    gradients.drop(parameters)


def _clip_by_the_largest(totals, order, max_norm):
    norm, _ = _measure(totals, order, max_norm)
    largest = max(grad.norm().item() for grad in totals.values())
    return norm, max_norm / largest if max_norm is not None and norm > max_norm else 1.0


def _swapped_bounds(lp, old, advantage, ref, low, high, *rest):
    _kernel(lp, old, advantage, ref, high, low, *rest)


def _symmetric_bounds(lp, old, advantage, ref, low, high, *rest):
    _kernel(lp, old, advantage, ref, low, 2.0 - low, *rest)


def _cut_on_both_sides(lp, old, advantage, ref, low, high, kl_coef, loss, grad, ratio, kl):
    # The minimum is missing: a token outside the bounds loses its gradient whatever its advantage.
    _kernel(lp, old, advantage, ref, low, high, kl_coef, loss, grad, ratio, kl)
    grad[(ratio < low) | (ratio > high)] = 0.0


def _applied_before_it_is_checked(path, metadata):
    """Step and learning rate of a file are taken as they stand."""
    return json.loads(metadata["learner"])


def _check_damaged_facts() -> None:
    """A file with a negative step is refused, and nothing of it is applied."""
    one = test_checkpoint._learner()
    with tempfile.TemporaryDirectory() as folder:
        test_checkpoint._learner(seed=0).save(Path(folder) / "run")
        tensors, facts = test_checkpoint._read(Path(folder) / "run")
        tensors["masters.norm.weight"] += 1
        _save_file(tensors, Path(folder) / "bad", metadata={"learner": json.dumps(facts | {"step": -1})})
        before = test_checkpoint._state(one)
        try:
            one.load(Path(folder) / "bad")
        except InputError:
            pass
        test_checkpoint._assert_same(test_checkpoint._state(one), before)


def _all_count(self, where):
    return torch.ones(self.completion_len, dtype=torch.bool)


def _check_scores() -> None:
    test_learner.test_score_is_the_models_log_prob_of_each_next_token(tiny.tiny_model())


def _check_packing() -> None:
    test_learner.test_score_ignores_the_packing(tiny.tiny_model())


def _check_bounds() -> None:
    (cases,) = [m for m in test_losses.test_policy_gradient_by_hand.pytestmark if m.name == "parametrize"]
    for case in cases.args[1]:
        test_losses.test_policy_gradient_by_hand(*case)


def _check_resume() -> None:
    """Two updates straight against one, a save, a fresh object and one more."""
    samples = [tiny.random_samples(tiny.tiny_model(), 200 + i, 2) for i in range(2)]
    straight, half = test_checkpoint._learner(), test_checkpoint._learner()
    for batch in samples:
        straight.update(batch)
    half.update(samples[0])
    with tempfile.TemporaryDirectory() as folder:
        half.save(Path(folder) / "run")
        resumed = test_checkpoint._learner()
        resumed.load(Path(folder) / "run")
    resumed.update(samples[1])
    test_checkpoint._assert_same(test_checkpoint._state(resumed), test_checkpoint._state(straight))


def _check_replaced() -> None:
    """A learner whose model has another parameter by now says so before it updates the old one."""
    model = tiny.tiny_model()
    one = Learner(model)
    model.norm.weight = torch.nn.Parameter(model.norm.weight.data)
    try:
        one.update(tiny.random_samples(tiny.tiny_model(), 5, 1))
    except InputError:
        return
    raise AssertionError("updated a parameter that the model does not have")


def _mutation(name: str, law: str, owner: Any, attribute: str, mutant: Any, check: Callable[[], None]) -> Mutation:
    return Mutation(name, law, patched(owner, attribute, mutant), check)


_SAME = "learner == sampler"
_RESUME = "resume is exact"
_PPO = "the clipped objective"
_STEP = "an update is one AdamW step of the masters"
_MASK = "a token that a mask leaves out has no part in an update"
_MASKED = test_masks.test_a_mask_leaves_tokens_out_of_the_mean_and_its_gradient
_STORAGE = test_learner.test_update_writes_rounded_masters_into_the_same_storage

MUTATIONS = [
    _mutation("scored by the logits of t, not t - 1", _SAME, packing, "_pack", _scored_one_row_late, _check_scores),
    _mutation("prefix cache kept over an update", _SAME, Sampler, "_weights_stamp", lambda s: 0, sample_score_update),
    _mutation("a pack leaks its first token", "ignores the packing", packing, "Batch", _LeakingBatch, _check_packing),
    _mutation("resume loses the step counter", _RESUME, checkpoint, "_fill", _without_steps, _check_resume),
    _mutation("resume loses the moments", _RESUME, checkpoint, "_fill", _without_moments, _check_resume),
    _mutation("a file half applied", "all or nothing", checkpoint, "_read_facts", _applied_before_it_is_checked,
              _check_damaged_facts),
    _mutation("a replaced parameter is not looked for", "the masters are the model's", Learner,
              "_refuse_replaced_parameters", lambda self: None, _check_replaced),
    _mutation("masters saved in BF16", _RESUME, checkpoint, "save_file", _rounded_masters, _check_resume),
    _mutation("tokens that a mask leaves out count in the mean", _MASK, packing.Sample, "counted", _all_count, _MASKED),
    _mutation("gradients of tokens left out", _MASK, learner, "counted", lambda output, mask_L, where: output, _MASKED),
    _mutation(
        "masters rounded to BF16 after a step", _STEP, Learner, "_apply", _no_masters,
        test_learner.test_masters_keep_what_bf16_would_lose,
    ),
    _mutation("weights moved elsewhere", "same storage", Learner, "_apply", _new_storage, _STORAGE),
    _mutation("weights truncated", "rounds to nearest even", Learner, "_apply", _truncated, _STORAGE),
    _mutation(
        "only the last pack's gradient counts", "a token's weight ignores the packing", gradients, "accumulate",
        _last_pack_only, test_model_gradient.test_packs_and_samples_do_not_change_a_tokens_weight,
    ),
    _mutation(
        "clipped by the largest tensor's norm", "one global norm", gradients, "measure", _clip_by_the_largest,
        test_learner.test_clipping_scales_all_gradients_by_one_factor,
    ),
    _mutation("clip bounds swapped", _PPO, losses, "_policy_gradient", _swapped_bounds, _check_bounds),
    _mutation("upper bound as near as the lower", _PPO, losses, "_policy_gradient", _symmetric_bounds, _check_bounds),
    _mutation("gradient cut on both sides", _PPO, losses, "_policy_gradient", _cut_on_both_sides, _check_bounds),
]  # fmt: skip
