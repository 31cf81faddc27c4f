"""A learner's checkpoint: exact resume, and every damaged or foreign file refused with nothing changed."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_samples, tiny_model
from minitransformer.errors import InputError
from minitransformer.learner import checkpoint
from minitransformer.learner.learner import Learner

FROZEN = ("layers.*.attn.qkv.weight",)


def _learner(seed=0, **settings):
    return Learner(tiny_model(seed), **(dict(lr=1e-3, weight_decay=0.01, frozen=FROZEN) | settings))


def _state(learner):
    learner.optimizer.make_state()
    found = {n: t.clone() for n, t in checkpoint._state(learner)}
    found |= {f"model.{n}": p.detach().clone() for n, p in learner.model.named_parameters()}
    return found | {"step": torch.tensor(learner.step)}


def _assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert_bits_equal(a[name], b[name], name)


@pytest.fixture(scope="module")
def samples():
    return [random_samples(tiny_model(), 100 + i, 3) for i in range(6)]


@pytest.fixture(scope="module")
def saved(samples, tmp_path_factory):
    """(file after 3 updates, that state, the state after 6 updates straight)."""
    learner = _learner()
    for batch in samples[:3]:
        learner.update(batch)
    path = tmp_path_factory.mktemp("learner") / "deep" / "run.safetensors"
    learner.save(path)
    half = _state(learner)
    for batch in samples[3:]:
        learner.update(batch)
    return path, half, _state(learner)


def test_six_updates_straight_are_three_a_resume_and_three(saved, samples):
    path, half, straight = saved
    assert os.listdir(path.parent) == ["run.safetensors"]
    learner = _learner(lr=0.5)  # lr is state, not a setting: the file's comes back
    version, addresses = learner.model.weights_version, [p.data_ptr() for p in learner.model.parameters()]
    learner.load(path)
    assert learner.step == 3 and learner.lr == 1e-3 and learner.model.weights_version == version + 1
    assert [p.data_ptr() for p in learner.model.parameters()] == addresses
    _assert_same(_state(learner), half)
    for batch in samples[3:]:
        learner.update(batch)
    _assert_same(_state(learner), straight)
    assert learner.step == 6


def test_saving_changes_nothing_and_replaces_the_old_file(saved, samples, tmp_path):
    path, half, _ = saved
    learner = _learner()
    learner.load(path)
    target = tmp_path / "again.safetensors"
    target.write_bytes(b"old")
    learner.save(target)
    _assert_same(_state(learner), half)
    assert target.read_bytes() == path.read_bytes() and os.listdir(tmp_path) == ["again.safetensors"]


def test_before_the_first_step(tmp_path, samples):
    first = _learner()
    first.save(tmp_path / "zero")
    second = _learner()
    second.load(tmp_path / "zero")
    assert second.step == 0
    for learner in (first, second):
        learner.update(samples[0])
    _assert_same(_state(first), _state(second))


def test_a_resumed_learner_may_load_over_its_own_progress(saved, samples):
    path, half, _ = saved
    learner = _learner()
    learner.update(samples[5])
    learner.load(path)
    _assert_same(_state(learner), half)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9, 0.99)}, r"settings differs: betas is \[0.9, 0.999\] in the file and \[0.9, 0.99\] here"),
        ({"max_grad_norm": None}, "settings differs: max_grad_norm is 1.0 in the file and None here"),
        ({"max_tokens_per_pack": 512}, "settings differs: max_tokens_per_pack"),
        ({"frozen": ()}, "frozen differs: layers.0.attn.qkv.weight is .* in the file and absent here"),
        ({"seed": 1}, "frozen differs: layers.0.attn.qkv.weight"),
    ],
)
def test_other_settings_are_refused_by_name(saved, settings, message):
    learner = _learner(**settings)
    before = _state(learner)
    with pytest.raises(InputError, match=message):
        learner.load(saved[0])
    _assert_same(_state(learner), before)


def test_another_model_is_refused_by_name(saved):
    for changes, message in [
        ({"rope_theta": 5000.0}, "config differs: rope_theta is 10000.0 in the file and 5000.0 here"),
        ({"num_experts": 4}, "config differs: num_experts is 8 in the file and 4 here"),
    ]:
        with pytest.raises(InputError, match=message):
            Learner(tiny_model(**changes), weight_decay=0.01, frozen=FROZEN).load(saved[0])


def test_another_spec_is_refused_by_name(saved, monkeypatch):
    from minitransformer.ops import swiglu

    monkeypatch.setattr(swiglu, "SPEC", "swiglu/999")
    with pytest.raises(InputError, match="spec differs: ops.swiglu is .* in the file and swiglu/999 here"):
        _learner().load(saved[0])


def _read(path):
    with safe_open(path, framework="pt") as file:
        return {n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()["learner"])


def _drop(tensors, facts):
    del tensors["exp_avg.norm.weight"]


def _drop_everywhere(tensors, facts):
    del tensors["exp_avg.norm.weight"]
    facts["tensors"].remove("exp_avg.norm.weight")


def _add(tensors, facts):
    tensors["masters.more.weight"] = torch.zeros(3)


def _add_everywhere(tensors, facts):
    _add(tensors, facts)
    facts["tensors"].append("masters.more.weight")


def _reshape(tensors, facts):
    tensors["masters.norm.weight"] = torch.zeros(65)


def _retype(tensors, facts):
    tensors["masters.norm.weight"] = tensors["masters.norm.weight"].bfloat16()


def _poison(tensors, facts):
    tensors["exp_avg_sq.norm.weight"][5] = float("nan")


def _lose_step(tensors, facts):
    del facts["step"]


def _set(**values):
    return lambda tensors, facts: facts.update(values)


def _negative_square(tensors, facts):
    tensors["exp_avg_sq.norm.weight"][5] = -1.0


def _other_format(tensors, facts):
    facts["format"] = "else"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "exp_avg.norm.weight is missing"),
        (_drop_everywhere, "exp_avg.norm.weight is missing"),
        (_add, "masters.more.weight is not listed"),
        (_add_everywhere, "masters.more.weight belongs to no trained parameter"),
        (_reshape, r"masters.norm.weight is F32 \[65\], expected F32 \[64\]"),
        (_retype, r"masters.norm.weight is BF16 \[64\], expected F32"),
        (_poison, "exp_avg_sq.norm.weight holds a value that is not finite"),
        (_negative_square, "exp_avg_sq.norm.weight holds a negative mean of squares"),
        (_lose_step, "step is missing from its metadata"),
        (_set(step=-1), "step is -1, expected 0 to"),
        (_set(step=10**400), "step is 1000.*expected 0 to"),
        (_set(step=True), "step is missing from its metadata or malformed"),
        (_set(lr=-1.0), "lr is -1.0, expected a finite number of at least 0"),
        (_set(lr=float("nan")), "lr is nan"),
        (_set(lr=float("inf")), "lr is inf"),
        (_set(tensors=[["masters.norm.weight"]]), "tensors in its metadata holds something else than names"),
        (_other_format, "not a learner's checkpoint"),
    ],
)
def test_damaged_content_is_refused_and_nothing_changes(saved, tmp_path, damage, message):
    tensors, facts = _read(saved[0])
    damage(tensors, facts)
    save_file(tensors, tmp_path / "bad", metadata={"learner": json.dumps(facts)})
    learner = _learner()
    before = _state(learner)
    with pytest.raises(InputError, match=message):
        learner.load(tmp_path / "bad")
    _assert_same(_state(learner), before)
    assert learner.step == 0 and learner.lr == 1e-3


def test_a_file_that_is_no_checkpoint(saved, tmp_path):
    whole = saved[0].read_bytes()
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text").write_bytes(b"not tensors")
    for name, message in [("foreign", "not a learner's"), ("short", "not a complete"), ("text", "not a complete")]:
        with pytest.raises(InputError, match=message):
            _learner().load(tmp_path / name)
    with pytest.raises(InputError, match="absent"):
        _learner().load(tmp_path / "absent")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run"
    path.write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "replace", fail)
    with pytest.raises(InputError, match="cannot be written.*No space left"):
        _learner().save(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["run"]
