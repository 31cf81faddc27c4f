"""What a saved run says of who computed it: AdamW's spec, and no machine."""

import json

import pytest
import torch
from safetensors.torch import save_file

from alignment_tests.learner import test_checkpoint
from alignment_tests.learner.tiny import random_samples, tiny_model
from minitransformer.errors import InputError
from minitransformer.ops import adamw


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(file after an update, that state)."""
    learner, path = test_checkpoint._learner(), tmp_path_factory.mktemp("learner") / "run"
    learner.update(random_samples(tiny_model(), 100, 3))
    learner.save(path)
    return path, test_checkpoint._state(learner)


def test_another_adamw_is_refused_by_name(saved, monkeypatch):
    monkeypatch.setattr(adamw, "SPEC", "adamw/999")
    with pytest.raises(InputError, match="spec differs: ops.adamw is adamw/1 in the file and adamw/999 here"):
        test_checkpoint._learner().load(saved[0])


def test_nothing_of_a_machine_is_in_a_file(saved, monkeypatch):
    """So that a run resumes anywhere: on another torch, vector unit or device."""
    assert torch.__version__ not in json.dumps(test_checkpoint._read(saved[0])[1])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VSX")
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    learner = test_checkpoint._learner()
    learner.load(saved[0])
    test_checkpoint._assert_same(test_checkpoint._state(learner), saved[1])


def test_a_run_that_torchs_adamw_computed_is_taken_up_with_a_warning(saved, tmp_path):
    tensors, facts = test_checkpoint._read(saved[0])
    del facts["spec"]["ops.adamw"]
    old = {"format": "minitransformer-learner/2", "adamw": {"torch": "2.11.0", "unit": "cpu AVX512"}}
    save_file(tensors, tmp_path / "old", metadata={"learner": json.dumps(facts | old)})
    learner = test_checkpoint._learner()
    with pytest.warns(UserWarning, match="old: torch's AdamW computed its updates; the next ones are adamw/1's"):
        learner.load(tmp_path / "old")
    test_checkpoint._assert_same(test_checkpoint._state(learner), saved[1])
    learner.save(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == saved[0].read_bytes()
