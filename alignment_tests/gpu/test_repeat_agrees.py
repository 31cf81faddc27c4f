"""Layers whose launches are another layer's (ops/gpu/repeat.py), launched early or not, have their own bits."""

from unittest import mock

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.test_model_agrees import DEMO, PAGE
from alignment_tests.gpu.values import agree
from alignment_tests.learner.tiny import tiny_model
from minitransformer.batch import Batch
from minitransformer.ops.gpu import device, repeat
from minitransformer.recipe import get
from minitransformer.sampler.cache import KVCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no launches"),
]
LENGTHS = [70, 1, 130]
MIXED = get("nvfp4_per_token").with_overrides([("3", "bf16")], DEMO["num_layers"])
RECIPES = {"bf16": get("bf16"), "nvfp4_per_token": get("nvfp4_per_token"), "two formats": MIXED}


def steps(model) -> list[torch.Tensor]:
    """A packed pass, a prefill in pages and a decode step: logits, keys and values."""
    tables = [range(0, 5), range(5, 6), range(6, 15)]
    cache, ids = KVCache(model.config, 15, PAGE, "cuda"), [inputs.integers(n, 512, n).tolist() for n in LENGTHS]
    for store in (*cache.k, *cache.v):
        store.zero_()
    with torch.no_grad():
        found = [
            model(Batch.packed(ids).to("cuda")),
            model(Batch.paged(ids, [0] * 3, tables, PAGE).to("cuda"), cache),
            model(Batch.paged([[7], [8], [9]], LENGTHS, tables, PAGE).to("cuda"), cache),
        ]
    return [tensor.cpu() for tensor in (*found, *cache.k, *cache.v)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_repeated_layers_have_their_own_bits(name, early):
    model = tiny_model(**DEMO).to("cuda")
    model.set_recipe(RECIPES[name])
    with mock.patch.object(repeat, "MAX_TOKENS", 0), mock.patch.dict(device.EARLY, launch_pdl=False):
        want = steps(model)
    again = repeat.Recording.again
    with mock.patch.dict(device.EARLY, launch_pdl=early):
        steps(model)  # every call's key is known from here on
        with mock.patch.object(repeat.Recording, "again", autospec=True, side_effect=again) as repeated:
            got = steps(model)
    # Six layers, the first without a residual, the second dense: the third is watched, and two formats are two kinds.
    assert repeated.call_count == 3 * (2 if name == "two formats" else 3)
    agree(got, want, f"{name}, early {early}")
