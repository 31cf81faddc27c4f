"""The laws with 4-bit experts: what holds for BF16 holds for every recipe that claims it, and the fault is visible."""

import pytest
import torch

from alignment_tests import laws
from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.experts import QuantisedExperts
from minitransformer.ops import nvfp4
from minitransformer.recipe import RECIPES, get
from minitransformer.sampler.sampler import Sampler

INVARIANT = ["nvfp4_per_token", "nvfp4_per_row", "w4a16", "w4a8_mxfp8"]


def quantised_model(recipe="nvfp4_per_token", seed=1, **shape):
    model = tiny_model(seed, **shape)
    model.set_recipe(recipe)
    return model


@pytest.fixture(scope="module", params=INVARIANT)
def model(request):
    return quantised_model(request.param)


def test_repeats(model):
    laws.repeats(model)


def test_ignores_the_batch(model):
    laws.ignores_the_batch(model)


def test_ignores_the_packing(model):
    laws.ignores_the_packing(model)


def test_ignores_the_chunking_and_the_pages(model):
    laws.ignores_the_chunking_and_the_pages(model)


def test_learner_equals_sampler(model):
    laws.learner_equals_sampler(model)


def test_recomputes_the_same(model):
    laws.recomputes_the_same(model)


def test_learner_equals_sampler_with_128_experts():
    laws.learner_equals_sampler(quantised_model(num_experts=128, top_k=8))


QUANTISED_STAGES = ("gate_up_codes", "gate_up_scales", "gate_up_outer", "gate_up", "down_codes", "down_scales",
                    "down_outer", "down", "combine")  # fmt: skip


def companies(model) -> list[list[list[int]]]:
    """The same target beside six different companies, before and behind them."""
    target, *others = laws.sequences(model, (9, 1, 30, 60, 17))
    return [[target], [target, others[0]], [others[1], target], [others[2], target, others[3]],
            [target, *others], [*others, target, others[2]]]  # fmt: skip


def target_rows(model, company) -> dict[str, torch.Tensor]:
    target = companies(model)[0][0]
    trace = Trace()
    with torch.no_grad():
        model(Batch.packed(company), trace=trace)
    place = company.index(target)
    return {
        stage: torch.stack([trace.row(stage, place, p) for p in range(len(target))])
        for stage in trace.stages
        if stage.startswith("layers.2.") and stage.split(".")[2] in QUANTISED_STAGES
    }


@pytest.mark.parametrize("recipe", ["nvfp4_per_token", "nvfp4_per_row"])
def test_the_company_moves_no_code(recipe):
    model = quantised_model(recipe)
    want = target_rows(model, companies(model)[0])
    assert len(want) == len(QUANTISED_STAGES)
    for number, company in enumerate(companies(model)):
        for stage, got in target_rows(model, company).items():
            assert_bits_equal(got, want[stage], f"company {number}, {stage}")


def test_one_scale_for_the_batch_lets_the_company_in():
    """The same test, on the recipe that is known to fail it: so it can see the fault."""
    model = quantised_model("nvfp4_per_tensor")
    alone = target_rows(model, companies(model)[0])
    moved = {
        stage
        for company in companies(model)[1:]
        for stage, got in target_rows(model, company).items()
        if not torch.equal(got, alone[stage])
    }
    assert {"layers.2.gate_up_codes", "layers.2.gate_up_outer", "layers.2.combine"} <= moved
    with pytest.raises(AssertionError):
        laws.ignores_the_batch(model)


def test_weights_are_quantised_once_an_update(monkeypatch):
    model = quantised_model()
    calls = []
    quantize = nvfp4.quantize
    monkeypatch.setattr(nvfp4, "quantize", lambda x, outer: calls.append(x.dim()) or quantize(x, outer))
    batch = Batch.packed(laws.sequences(model, (9,)))
    weights = 2 * sum(model.config.sparse_layers)
    with torch.no_grad():
        model(batch), model(batch)
    assert calls.count(3) == weights
    Learner(model, lr=1e-2).update([Sample([1, 2, 3, 4], 1, 1.0, [-3.0] * 3)])
    calls.clear()
    with torch.no_grad():
        model(batch), model(batch)
    assert calls.count(3) == weights
    sampler, learner = Sampler(model), Learner(model, lr=1e-2)
    for first in (sampler.generate, learner.score):  # whoever comes first
        learner.update([Sample([1, 2, 3, 4], 1, 1.0, [-3.0] * 3)])
        calls.clear()
        first([[1, 2, 3]], *([[1]] if first == learner.score else [])), sampler.generate([[4]]), model(batch)
        assert calls.count(3) == weights


def test_updates_keep_the_law():
    model = quantised_model()
    learner = Learner(model, lr=1e-2)
    for _ in range(2):
        laws.learner_equals_sampler(model)
        learner.update([Sample([1, 2, 3, 4, 5], 2, 1.0, [-3.0] * 3)])
    laws.learner_equals_sampler(model)


def test_gradients_point_where_bf16_points():
    """Straight through: the direction of BF16's gradient on the same routing, to within the noise of 4 bits."""
    plain, quantised = tiny_model(1, num_experts=2, top_k=2), quantised_model(num_experts=2, top_k=2)
    batch = Batch.packed(laws.sequences(plain, (40,)))
    want, got = (laws.gradients(m, batch, recompute=False) for m in (plain, quantised))
    for name, a in want.items():
        b = got[name].float().flatten()
        cosine = torch.nn.functional.cosine_similarity(a.float().flatten(), b, dim=0).item()
        assert cosine > 0.6, (name, cosine)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_mxfp8_backward_changes_gradients_and_nothing_else(recipe):
    model = quantised_model(recipe)
    batch = Batch.packed(laws.sequences(model, (20,)))
    want, scores = laws.gradients(model, batch, recompute=False), laws.logits(model, batch)
    model.set_recipe(get(recipe).with_backward("mxfp8"))
    got = laws.gradients(model, batch, recompute=False)
    assert_bits_equal(laws.logits(model, batch), scores, "logits")
    for name in ("layers.2.mlp.gate_up.weight", "layers.2.mlp.down.weight"):
        assert not torch.equal(got[name], want[name]), name
        far = (got[name].float() - want[name].float()).norm() / want[name].float().norm()
        assert far.item() < 0.1, (name, far)  # E4M3 has 3 bits behind the point: 2^-4 an element


@pytest.mark.parametrize("recipe", INVARIANT)
def test_activations_that_are_not_finite_are_named(recipe):
    model = quantised_model(recipe)
    with torch.no_grad():
        model.layers[0].mlp.gate_up.weight.fill_(3e38)  # FC1 overflows FP32
    with pytest.raises(InputError, match="experts.down: row 0: the input is not finite"), torch.no_grad():
        model(Batch.packed([[1, 2, 3]]))


def test_a_quantised_model_without_bf16_weights_scores_the_same():
    model, fixed = quantised_model(), quantised_model()
    for layer in fixed.layers:
        if layer.mlp.__class__.__name__ == "SparseMlp":
            q = {n: layer.mlp.experts.quantised(n, getattr(layer.mlp, n).weight) for n in ("gate_up", "down")}
            layer.mlp.set_quantised(fixed.recipe, **q)
    batch = Batch.packed(laws.sequences(model, (20, 5)))
    assert_bits_equal(laws.logits(fixed, batch), laws.logits(model, batch))
    with pytest.raises(InputError, match="only quantised"):
        fixed.set_recipe("bf16")


def test_both_weights_are_made_before_the_first_row(monkeypatch):
    """On a GPU FC2 may read its weight while FC1 still runs (gpu/nvfp4_product.cu)."""
    order = []
    for method in ("weight_operand", "_rows"):
        real = getattr(QuantisedExperts, method)
        noted = lambda self, name, *rest, m=method, real=real: (order.append((m, name)), real(self, name, *rest))[1]  # noqa: E731
        monkeypatch.setattr(QuantisedExperts, method, noted)
    quantised_model(num_layers=1, sparse_layers=(True,))(Batch.packed([[1, 2, 3]]))
    made, rows = [("weight_operand", name) for name in ("gate_up", "down")], [("_rows", "gate_up"), ("_rows", "down")]
    assert order == [*made, *rows]
