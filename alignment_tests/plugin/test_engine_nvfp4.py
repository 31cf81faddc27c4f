"""Engines with experts in NVFP4: quantised when used, from a packed checkpoint, and in a loop with a learner."""

import pytest

from alignment_tests.plugin import engines
from alignment_tests.plugin.test_engine_sync import RECIPE, check_loop
from alignment_tests.plugin.test_engines import check_against
from minitransformer import recipe as recipes
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS, MODELOPT
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang import sync as sync_module
from minitransformer.plugins.sglang.sync import sync

pytestmark = pytest.mark.sglang


def override(recipe: str) -> list[str]:
    """Arguments of an engine that quantises BF16 weights when they are used."""
    return ["--json-model-override-args", f'{{"minitransformer_recipe": "{recipe}"}}']


@pytest.fixture(scope="module")
def packed(checkpoint, tmp_path_factory, request):
    """(checkpoint in the format of the parameter, an engine with it)"""
    directory = tmp_path_factory.mktemp("engines") / request.param
    quantise(checkpoint, directory, recipes.get(RECIPE), FORMATS[request.param])
    with engines.start(directory) as server:
        yield directory, server


@pytest.mark.parametrize("recipe", [RECIPE, pytest.param("w4a16", marks=pytest.mark.slow)])
def test_a_recipe_holds_the_laws(checkpoint, recipe):
    model = engines.tiny()
    model.set_recipe(recipe)
    with engines.start(checkpoint, [*override(recipe), "--chunked-prefill-size", "64"]) as server:
        check_against(model, server)


@pytest.mark.parametrize("packed", FORMATS, indirect=True)
def test_a_packed_checkpoint_holds_the_laws(packed):
    directory, server = packed
    check_against(Qwen3MoeForCausalLM.from_pretrained(directory), server)


@pytest.mark.parametrize("packed", [MODELOPT.name], indirect=True)
def test_a_loop_sent_packed_keeps_the_laws(packed, monkeypatch):
    """And syncs that are refused, which leave no memory behind."""
    model, (_, server) = engines.tiny(), packed
    model.set_recipe(RECIPE)
    check_loop(server, Learner(model, lr=1e-2), 2)
    bad, named = "experts.7.down_proj.weight_scale_2", sync_module._named
    monkeypatch.setattr(sync_module, "_named", lambda *rest: [(n, -t if bad in n else t) for n, t in named(*rest)])
    for _ in range(3):
        with pytest.raises(InputError, match="Nothing was written"):
            sync(Learner(model), server)
        assert not engines.shared_memory(server)


@pytest.mark.slow  # the packed loop has the same recipe
def test_a_loop_quantised_by_the_server_keeps_the_laws(checkpoint):
    model = engines.tiny()
    model.set_recipe(RECIPE)
    with engines.start(checkpoint, override(RECIPE)) as server:
        check_loop(server, Learner(model, lr=1e-2), 0)
