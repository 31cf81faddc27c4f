"""Overrides of a recipe: what a pattern covers; what covers no layer as a whole is refused. And no variable is read."""

import os
from dataclasses import replace

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.recipe import RECIPES, get

LAYERS = 16
PATTERNS = {
    "3": [3],
    "layers.3": [3],
    "layers.3.mlp": [3],
    "model.layers.3.mlp.experts": [3],
    "model.layers.3.mlp.experts*": [3],
    "layers.3.mlp.experts.*": [3],
    "model.layers.3.mlp.experts.*.*_proj": [3],
    "*layers.3.mlp.experts.[0-9]*.*": [3],
    "*.layers.1[02].*": [10, 12],
    "layers.1?": [*range(10, 16)],
    "model.layers.1*": [1, *range(10, 16)],
    "layers.*.mlp": [*range(16)],
    "*experts*": [*range(16)],
    "*": [*range(16)],
    # A part of a layer's experts or projections:
    "layers.3.mlp.experts.0.*": [],
    "*.down_proj": [],
    "*.gate_up_proj": [],
    "*.experts.[0-9].*": [],
    "*.experts.?.*_proj": [],
    "*.experts.[!7]*.*": [],
    # What no recipe quantises, and what does not exist:
    "*.self_attn*": [],
    "*.mlp.gate": [],
    "lm_head": [],
    "layers.16*": [],
    "03": [],
    "re:.*experts.*": [],
    "": [],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_a_pattern_covers(pattern):
    recipe = replace(get("bf16"), overrides=((pattern, "w4a16"),))
    assert [i for i in range(LAYERS) if recipe.for_layer(i).name == "w4a16"] == PATTERNS[pattern]
    if not PATTERNS[pattern]:
        with pytest.raises(InputError, match="matches no layer with experts as a whole"):
            get("bf16").with_overrides([(pattern, "w4a16")], LAYERS)


def test_the_last_pattern_counts():
    recipe = get("bf16").with_overrides([("*", "w4a16"), ("model.layers.2.mlp.experts*", "nvfp4_per_token")], 3)
    assert [recipe.for_layer(i).name for i in range(3)] == ["w4a16", "w4a16", "nvfp4_per_token"]


class Forbidden(dict):
    def get(self, name, default=None):
        raise AssertionError(f"the environment variable {name} is read")

    __getitem__ = __contains__ = get


@pytest.mark.parametrize("name", RECIPES)
def test_no_environment_variable_is_read(name, monkeypatch):
    model, batch = tiny_model(1), Batch.packed([[1, 2, 3]])
    with torch.no_grad():
        model(batch)  # torch and Numba read theirs when they are first used
    monkeypatch.setattr(os, "environ", Forbidden())
    model.set_recipe(get(name).with_overrides([("0", "bf16")], 3))
    with torch.no_grad():
        model(batch)
    model.spec.fingerprint()


def one_recipe_one_fingerprint() -> None:
    """Whatever patterns say it, and if they say nothing new."""

    def fingerprint(*overrides):
        model = tiny_model(1)
        model.set_recipe(get("nvfp4_per_token").with_overrides(overrides, 3))
        return model.spec.fingerprint()

    plain, last = fingerprint(), fingerprint(("2", "bf16"))
    assert {fingerprint((p, "bf16")) for p in ("layers.2", "model.layers.2.mlp.experts*", "*.[2-9].*")} == {last}
    assert fingerprint(("0", "nvfp4_per_token")) == fingerprint(("2", "bf16"), ("*", "nvfp4_per_token")) == plain
    assert len({plain, last, fingerprint(("2", "w4a16")), fingerprint(("0", "bf16"))}) == 4


def test_one_recipe_one_fingerprint():
    one_recipe_one_fingerprint()
