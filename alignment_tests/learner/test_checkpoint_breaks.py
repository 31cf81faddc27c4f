"""What must not become a learner's state or file: half a load, what load refuses, numbers that are not Python's."""

import math
import os

import numpy as np
import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_samples, tiny_model
from minitransformer.errors import InputError
from minitransformer.learner import checkpoint
from minitransformer.learner.learner import Learner
from minitransformer.learner.optimizer import Optimizer


def test_what_could_not_be_loaded_is_not_saved_over_what_can(tmp_path):
    """adamw/1 lets a square overflow; load would refuse the file, and the one before it would be gone."""
    learner = Learner(tiny_model())
    learner.save(tmp_path / "run")
    before = (tmp_path / "run").read_bytes()
    learner.optimizer.moments["norm.weight"][1][0] = math.inf
    with pytest.raises(InputError, match="exp_avg_sq.norm.weight holds a value that is not finite"):
        learner.save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before and os.listdir(tmp_path) == ["run"]


def test_numbers_of_numpy_and_torch_are_saved_as_pythons(tmp_path):
    kinds = dict(lr=np.float32(0.5), weight_decay=np.float32(0.25), betas=torch.tensor([0.5, 0.75]))
    limits = dict(max_grad_norm=torch.tensor(2.0), max_tokens_per_pack=np.int64(64))
    Learner(tiny_model(), **kinds, **limits).save(tmp_path / "run")
    other = Learner(tiny_model(), weight_decay=0.25, betas=[0.5, 0.75], max_grad_norm=2, max_tokens_per_pack=64)
    other.load(tmp_path / "run")
    assert other.lr == 0.5


def test_a_lack_of_memory_is_named(tmp_path, monkeypatch):
    saved, learner = Learner(tiny_model()), Learner(tiny_model())
    saved.save(tmp_path / "run")

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.25 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Optimizer, "make_state", full)
    for call in (learner.save, learner.load):
        with pytest.raises(InputError, match="masters and moments in FP32: 20.25 GiB more were needed.*was changed"):
            call(tmp_path / "run")


@pytest.mark.parametrize("where", ["masters", "weights"])
def test_a_load_that_breaks_off_is_not_learned_from(tmp_path, monkeypatch, where):
    """Ctrl-C among the masters, or between masters and weights."""
    saved, learner = Learner(tiny_model(), lr=1e-2), Learner(tiny_model())
    samples = random_samples(saved.model, 1, 2)
    saved.update(samples)
    saved.save(tmp_path / "run")
    state, calls = checkpoint._state, []

    def stop(*_):
        raise KeyboardInterrupt

    def breaks(one):
        calls.append(one)
        for i, item in enumerate(state(one)):
            yield stop() if len(calls) == 3 and i == 2 else item  # the two before it read

    if where == "masters":
        monkeypatch.setattr(checkpoint, "_state", breaks)
    else:
        monkeypatch.setattr(Learner, "write_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        learner.load(tmp_path / "run")
    for call in (lambda: learner.update(samples), lambda: learner.save(tmp_path / "torn"), lambda: learner.sync("")):
        with pytest.raises(InputError, match="broke off"):
            call()
    monkeypatch.undo()
    learner.load(tmp_path / "run")
    for one in (saved, learner):
        one.update(samples)
    for name, master in saved.masters.items():
        assert_bits_equal(learner.masters[name], master, name)
