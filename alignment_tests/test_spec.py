"""spec.py: the fingerprint changes with every entry, with nothing else, and a mismatch names the entry."""

import dataclasses

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from minitransformer.errors import InputError
from minitransformer.spec import OPS, QUANTISED_OPS, UPDATE_OPS, ExecutionSpec, fingerprint, spec_differences


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_of_a_model_names_every_op(model):
    entries = ExecutionSpec.of(model).entries()
    assert entries["name"] == "mini/1" and entries["accumulator"].startswith("hopper-k16-f25")
    versions = {"attention": 2, "linear": 2, "grouped_linear": 2}
    assert all(entries[f"ops.{op}"] == f"{op}/{versions.get(op, 1)}" for op in OPS if op != "mma")
    assert entries["options.rms_eps"] == model.config.rms_eps and entries["attention_key_tile"] == 64


def test_every_module_with_a_spec_is_in_it():
    from pathlib import Path

    import minitransformer.ops

    files = Path(minitransformer.ops.__file__).parent.glob("*.py")
    assert {f.stem for f in files if "\nSPEC = " in f.read_text()} <= set(OPS + QUANTISED_OPS + UPDATE_OPS)


def test_same_model_same_fingerprint_and_weights_are_not_in_it(model):
    assert ExecutionSpec.of(model) == ExecutionSpec.of(tiny_model(seed=1))
    assert ExecutionSpec.of(model).fingerprint() == ExecutionSpec.of(tiny_model(seed=1)).fingerprint()
    assert len(ExecutionSpec.of(model).fingerprint()) == 64


def test_the_rope_table_is_in_it_by_its_bits(model):
    other = tiny_model(rope_theta=10001.0)
    (line,) = ExecutionSpec.of(model).differences(ExecutionSpec.of(other))
    assert line.startswith("options.rope_table: ")
    turned = tiny_model()
    turned.rope_table = turned.rope_table.clone()
    turned.rope_table.view(torch.int32)[-1, -1] ^= 1
    assert ExecutionSpec.of(turned).fingerprint() != ExecutionSpec.of(model).fingerprint()


def test_every_entry_moves_the_fingerprint(model):
    entries = ExecutionSpec.of(model).entries()
    prints = {fingerprint(entries | {name: "other"}) for name in entries}
    assert len(prints) == len(entries) and fingerprint(entries) not in prints


def test_a_mismatch_names_the_entry(model):
    spec = ExecutionSpec.of(model)
    spec.require_same(dataclasses.replace(spec))
    ops = tuple((op, "linear/9" if op == "linear" else name) for op, name in spec.ops)
    with pytest.raises(InputError, match=r"^learner and sampler follow .* specs: ops.linear: linear/2 != linear/9$"):
        spec.require_same(dataclasses.replace(spec, ops=ops))


def test_an_entry_of_one_side_only():
    assert spec_differences({"a": 1, "b": 2}, {"b": 2, "c": 3}) == ["a: 1 != absent", "c: absent != 3"]


def test_options_of_the_config_are_in_it(model):
    for change in ({"rms_eps": 1e-5}, {"top_k": 3}, {"norm_topk_prob": False}):
        (line,) = ExecutionSpec.of(model).differences(ExecutionSpec.of(tiny_model(**change)))
        assert line.startswith(f"options.{next(iter(change))}: ")
