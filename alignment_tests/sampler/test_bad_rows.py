"""Law: a token whose values are not finite ends its own request in the sampler, and nobody else's; the learner refuses
the step and names it.

The models have an input dimension of their own for the token BAD: nothing else reads or writes it, so one large weight
there makes this token overflow, at a chosen layer and operator, and leaves every other row alone.
"""

import re

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import assert_bits
from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.errors import InputError, RowError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import DenseMlp
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, RequestError, SamplingParams

BAD = 90
RECIPES = ["bf16", "nvfp4_per_token", "nvfp4_per_row", "w4a16", "w4a8_mxfp8"]
GOOD = [[4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [14]]
PARAMS = SamplingParams(6, seed=3, ignore_eos=True)
OPTIONS = dict(page_size=4, chunk_size=5, max_batch_tokens=12)
# (layer, where) -> what the error says under BF16 and under recipes that quantise. Layer 1 is dense.
PLACES = {
    (0, "router"): ["layer 0, router: a logit is NaN or infinite; check the weights"] * 2,
    (0, "gate_up"): [
        "layer 2, router: a logit is NaN or infinite; check the weights",
        "layer 0, experts.down: the input is not finite; check the weights",
    ],
    (2, "router"): ["layer 2, router: a logit is NaN or infinite; check the weights"] * 2,
}


def exploding_model(recipe: str, layer: int, where: str, **changes) -> torch.nn.Module:
    """Fails on the token BAD (module docstring), and on no other that does not follow it in its sequence."""
    model = tiny_model(1, **changes)
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] = 0
        model.embed_tokens.weight[BAD, 0] = 4
        for block in model.layers:
            block.attn.o.weight[0] = 0
            block.mlp.down.weight[..., 0, :] = 0
        getattr(model.layers[layer].mlp, where).weight[..., 0] = 3e38
    model.set_recipe(recipe)
    return model


def generate(model, prompts: list[list[int]], params=PARAMS, trace=None, **options) -> tuple[list[Completion], str]:
    """(completions, what the RequestError said or ""); nothing may be leaked."""
    sampler, said = Sampler(model, **(OPTIONS | options)), ""
    try:
        completions = sampler.generate(prompts, params, trace)
    except RequestError as error:
        completions, said = error.completions, str(error)
    sampler.check()
    assert sampler.pool.available == sampler.pool.num_pages, "pages are leaked"
    return completions, said


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.token_ids, a.finish_reason, a.error) == (b.token_ids, "length", None)
        assert_bits(a.log_probs, b.log_probs, f"request {a.request_id} beside a bad one")


def assert_names(text: str, who: str, position: int, message: str) -> None:
    """`who`, the position (or a span with it: Batch.faults), the message."""
    found = re.fullmatch(rf"{who}position(?: (\d+)|s (\d+) to (\d+)), {re.escape(message)}", text)
    assert found, text
    if found[1] is None:
        assert "router" in message and int(found[2]) <= position <= int(found[3]), text
    else:
        assert int(found[1]) == position, text


def fails_alone(recipe: str, layer: int, where: str, **options) -> None:
    model, message = exploding_model(recipe, layer, where), PLACES[layer, where][recipe != "bf16"]
    want, said = generate(model, GOOD, **options)
    assert not said
    for place, bad in ((1, [20, 21, 22, 23, 24, 25, 26, BAD, 27]), (0, [BAD]), (3, [20, 21, BAD])):
        got, said = generate(model, [*GOOD[:place], bad, *GOOD[place:]], trace=Trace(), **options)
        failed = got.pop(place)
        assert failed.finish_reason == "error" and failed.token_ids == []
        assert_names(failed.error, f"request {place}: ", bad.index(BAD), message)
        assert said == f"prompts[{place}]: {failed.error}"
        assert_same(got, want)


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_token_ends_its_own_request(recipe, where):
    fails_alone(recipe, *where)


@pytest.mark.parametrize("options", [dict(max_sequences=2), dict(num_pages=4), dict(prefix_cache=False, chunk_size=64)])
def test_whatever_the_schedule(options):
    fails_alone("nvfp4_per_token", 0, "gate_up", **options)


def test_several_at_once_and_nothing_but_bad_ones():
    model = exploding_model("nvfp4_per_token", 0, "router")
    want, _ = generate(model, GOOD)
    got, said = generate(model, [[BAD, 1], GOOD[0], [2, BAD], GOOD[1], [3, 4, 5, BAD], GOOD[2]])
    assert [c.finish_reason for c in got] == ["error", "length"] * 3 and "(3 requests failed)" in said
    assert_same(got[1::2], want)
    got, said = generate(model, [[BAD], [1, BAD]])
    assert [c.finish_reason for c in got] == ["error"] * 2


def test_a_token_that_was_drawn_keeps_the_tokens_before_it():
    model = exploding_model("nvfp4_per_token", 0, "router")
    with torch.no_grad():
        model.embed_tokens.weight[BAD, 0] = 0
    [clean] = generate(model, [[1, 2, 3]])[0]
    third = clean.token_ids[2]
    assert third not in clean.token_ids[:2]
    with torch.no_grad():
        model.embed_tokens.weight[third, 0] = 4
    [got], _ = generate(model, [[1, 2, 3]])
    assert got.token_ids == clean.token_ids[:3] and got.finish_reason == "error"
    assert got.error.startswith("request 0: position 5, layer 0, router")
    assert_bits(got.log_probs, clean.log_probs[:3], "tokens before a bad one")


def test_logits_that_are_not_finite():
    """After the last layer no operator refuses the row; the draw does."""
    model = exploding_model("bf16", 2, "gate_up")
    want, _ = generate(model, GOOD)
    got, said = generate(model, [GOOD[0], [20, BAD], *GOOD[1:]])
    assert said == "prompts[1]: request 1: sample: the logits for position 2 have a NaN or no finite maximum"
    assert_same([got[0], *got[2:]], want)


def poisoned_pages() -> None:
    """Dense layers let a NaN into the store and no operator refuses it before the draw: no page of it is kept."""
    model = exploding_model("bf16", 0, "gate_up", sparse_layers=(False, False, True), num_layers=3)
    model.layers[2].mlp = DenseMlp(model.config)
    with torch.no_grad():
        for p in model.layers[2].mlp.parameters():
            p.fill_(0.01)
    sampler = Sampler(model, **OPTIONS)
    with pytest.raises(RequestError, match="NaN"):
        sampler.generate([[BAD, *range(1, 11)]], PARAMS)
    assert all(cached.isfinite().all() for page in sampler.pool._keys for cached in _rows(sampler, page))
    with pytest.raises(RequestError) as error:
        sampler.generate([[BAD, *range(1, 11)]], PARAMS)
    assert error.value.completions[0].cached_tokens == 0, "a poisoned page is found again"
    sampler.check()


def _rows(sampler: Sampler, page: int):
    size = sampler.pool.page_size
    return (t[page * size : (page + 1) * size] for t in (*sampler.cache.k, *sampler.cache.v))


def test_the_prefix_cache_keeps_no_poisoned_page():
    poisoned_pages()


def test_pages_that_others_use_stay():
    model = exploding_model("nvfp4_per_token", 0, "router")
    sampler, shared = Sampler(model, **OPTIONS), [30, 31, 32, 33, 34, 35, 36, 37]
    first, bad = sampler.add([*shared, 1], PARAMS), sampler.add([*shared, BAD], PARAMS)
    done = {}
    while len(done) < 2:
        done |= {t.request_id: t.completion for t in sampler.step() if t.completion is not None}
        sampler.check()
    assert done[bad].finish_reason == "error" and done[first].finish_reason == "length"
    [again] = sampler.generate([[*shared, 1]], PARAMS)
    assert again.cached_tokens == 8
    assert_same([again], [done[first]])


def refuses_and_names(recipe: str = "nvfp4_per_token") -> None:
    for (layer, where), message in PLACES.items():
        model = exploding_model(recipe, layer, where)
        learner = Learner(model, max_tokens_per_pack=16)
        before = [p.clone() for p in model.parameters()]
        sequences, lens = [[1, 2, 3, 4], [5, 6, 7], [8, 9, BAD, 10, 11]], [1, 2, 2]
        with pytest.raises(InputError) as error:
            learner.score(sequences, lens)
        said = str(error.value)
        assert_names(said, "sequence 2, ", 2, message[recipe != "bf16"])
        with pytest.raises(InputError) as error:
            learner.update([Sample(s, n, 1.0) for s, n in zip(sequences, lens, strict=True)], nll)
        assert str(error.value) == said
        assert learner.step == 0 and all(map(torch.equal, before, model.parameters()))
        assert all(row.isfinite().all() for row in learner.score(sequences[:2], lens[:2]))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_per_token"])
def test_the_learner_refuses_the_step_and_names_sequence_and_position(recipe):
    refuses_and_names(recipe)


def test_the_learner_names_the_row_of_bad_logits():
    model = exploding_model("bf16", 2, "gate_up")
    with pytest.raises(InputError) as error:
        Learner(model).score([[1, 2, 3], [4, 5, 6, BAD, 7]], [1, 1])
    assert str(error.value) == "sequence 1, position 3, logprob: the logits have a NaN or no finite maximum"


def test_a_gradient_that_overflows_under_mxfp8_is_no_input_error():
    model = tiny_model(1)
    model.set_recipe(model.recipe.with_backward("mxfp8"))
    logits = model(Batch.packed([[1, 2, 3]]))
    with pytest.raises(FloatingPointError, match="gradient product"):
        logits.backward(torch.full_like(logits, torch.inf))


def test_row_error_says_which_rows():
    error = RowError("router", torch.tensor([3, 5]), "a logit is NaN")
    assert (error.rows, str(error)) == ([3, 5], "router: row 3: a logit is NaN")
