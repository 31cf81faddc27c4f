"""Recipes of 4-bit experts on a model: overrides, what is refused, and the fingerprint."""

import pytest
import torch

from alignment_tests import laws
from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.model.test_nvfp4_laws import quantised_model
from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.recipe import RECIPES, Recipe, get


def test_overrides_choose_by_layer():
    model = tiny_model(1)
    recipe = get("nvfp4_per_token").with_overrides([("2", "bf16")], model.config.num_layers)
    model.set_recipe(recipe)
    trace = Trace()
    with torch.no_grad():
        model(Batch.packed([[1, 2, 3]]), trace=trace)
    assert "layers.0.gate_up_codes" in trace.stages and "layers.2.gate_up_codes" not in trace.stages
    laws.learner_equals_sampler(model)
    with pytest.raises(InputError, match="matches no layer"):
        get("bf16").with_overrides([("layers.7.*", "bf16")], 3)


def test_recipes_do_not_remember_earlier_ones():
    """What was overridden before is not overridden now, also where experts exist only quantised."""
    model = quantised_model()
    for layer in model.layers[:1]:
        layer.mlp.set_quantised(model.recipe, *(layer.mlp.experts.quantised(n, getattr(layer.mlp, n).weight)
                                                for n in ("gate_up", "down")))  # fmt: skip
    batch = Batch.packed(laws.sequences(model, (9,)))
    model.set_recipe("nvfp4_per_token")
    key, want = model.recipe.key, laws.logits(model, batch)
    assert "2->bf16" in key  # the layer that has BF16 weights beside quantised ones keeps them
    model.set_recipe(get("nvfp4_per_token").with_overrides([("0", "w4a16"), ("2", "nvfp4_per_token")], 3))
    assert model.recipe.for_layer(2).name == "nvfp4_per_token", "named, so no longer left in BF16"
    model.set_recipe("nvfp4_per_token")
    assert model.recipe.key == key
    assert_bits_equal(laws.logits(model, batch), want)
    model.set_recipe(model.recipe)
    assert model.recipe.key == key


@pytest.mark.parametrize("fields", [
    ("x", "fp8", "nvfp4", "row", "expert"), ("x", "bf16", "nvfp4", "row", ""), ("x", "nvfp4", "nvfp4", "rwo", "expert"),
    ("x", "nvfp4", "int8", "", "expert"), ("x", "nvfp4", "bf16", "", "tensor"), ("x", "bf16", "bf16", "", "", "fp4"),
])  # fmt: skip
def test_formats_that_do_not_exist_are_refused(fields):
    with pytest.raises(InputError):
        Recipe(*fields)


@pytest.mark.parametrize("sizes", [{"hidden_size": 48}, {"expert_size": 48}])
def test_widths_that_mxfp8_has_no_blocks_for_are_refused(sizes):
    model = tiny_model(**sizes)
    with pytest.raises(InputError, match="layer 0, w4a8_mxfp8: MXFP8 needs .* multiples of 32"):
        model.set_recipe("w4a8_mxfp8")
    assert model.recipe == get("bf16")
    model.set_recipe(get("w4a8_mxfp8").with_overrides([("0", "bf16"), ("2", "w4a16")], 3))  # nobody computes in MXFP8


def test_overrides_of_layers_without_experts_are_refused():
    model = tiny_model(1)  # layer 1 is dense
    with pytest.raises(InputError, match="no layer with experts"):
        model.set_recipe(get("bf16").with_overrides([("1", "w4a16")], 3))
    for wrong in ([], None, "nvfp4"):
        with pytest.raises(InputError, match="not known"):
            model.set_recipe(wrong)


def test_the_recipe_is_in_the_fingerprint():
    prints = set()
    for name in RECIPES:
        model = quantised_model(name)
        prints.add(model.spec.fingerprint())
    assert len(prints) == len(RECIPES)
    with pytest.raises(InputError, match="recipe"):
        quantised_model("w4a16").spec.require_same(quantised_model().spec)


def test_a_resume_under_another_recipe_names_the_recipe(tmp_path):
    """Not the operators that follow from it."""
    Learner(tiny_model(1)).save(tmp_path / "run")
    said = "spec differs: options.recipe is bf16 .* in the file and nvfp4_per_token .* here; give the model the recipe"
    with pytest.raises(InputError, match=said):
        Learner(quantised_model()).load(tmp_path / "run")
