"""Law: a request's tokens and log-probs ignore everything about how it was scheduled. On the fake model, many times."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment_tests.sampler.fake import (
    FakeConfig,
    FakeModel,
    Request,
    assert_alone,
    assert_bits,
    fake_alone,
    play,
    poisoned,
    prompts,
)
from minitransformer.batch import Batch
from minitransformer.ops.logprob import logprob
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (5,), (6, 7)]),
    ignore_eos=st.booleans(),
)
# Few stems, so that prefixes are shared, also in the middle of a page.
PROMPTS = st.builds(
    lambda stem, n, tail: (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)[:n] * (1 + stem) + tuple(tail),
    st.integers(0, 1),
    st.integers(1, 12),
    st.lists(st.integers(0, 23), max_size=4),
)
REQUESTS = st.builds(Request, PROMPTS, PARAMS, st.integers(0, 12), st.none() | st.none() | st.integers(0, 20))


@st.composite
def schedules(draw) -> tuple[dict, list[Request]]:
    requests = draw(st.lists(REQUESTS, min_size=1, max_size=7))
    page_size = draw(st.integers(1, 8))
    least = max(-(-(len(r.prompt) + r.params.max_new_tokens - 1) // page_size) for r in requests)
    options = dict(
        page_size=page_size,
        num_pages=least + draw(st.integers(0, 12)),
        chunk_size=draw(st.integers(1, 64)),
        max_batch_tokens=draw(st.integers(1, 64)),
        max_sequences=draw(st.integers(1, 7)),
        prefix_cache=draw(st.booleans()),
    )
    return options, requests


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_any_schedule_gives_what_each_request_gives_alone(schedule) -> None:
    options, requests = schedule
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), **options)), requests))


@pytest.mark.parametrize("chunk_size", range(1, 65))
def test_chunk_sizes_do_not_matter(chunk_size: int) -> None:
    requests = [Request(p, SamplingParams(4, ignore_eos=True, seed=9)) for p in prompts(1, [1, 40, 63, 64, 65])]
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), chunk_size=chunk_size)), requests))


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8, 64, 96, 1000])
def test_page_sizes_do_not_matter(page_size: int) -> None:
    requests = [Request(p, SamplingParams(5, seed=2)) for p in prompts(2, [1, 7, 8, 9, 64])]
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), page_size=page_size)), requests))


def test_orders_of_arrival() -> None:
    requests = [Request(p, SamplingParams(6, seed=i), arrival=0) for i, p in enumerate(prompts(3, [2, 9, 9, 17]))]
    for order in itertools.permutations(requests):
        sampler = poisoned(Sampler(FakeModel(), page_size=4, num_pages=8, chunk_size=5))
        assert_alone(list(order), play(sampler, list(order)))


def test_a_prompt_of_one_token_beside_a_longer_one() -> None:
    requests = [Request(p, SamplingParams(8, ignore_eos=True)) for p in prompts(4, [1, 50])]
    assert_alone(requests, play(Sampler(FakeModel(), chunk_size=8), requests))


def test_preemption_recomputes_the_same_bits() -> None:
    """Three requests whose prompts fit together and whose continuations do not."""
    requests = [Request(p, SamplingParams(30, ignore_eos=True, seed=i)) for i, p in enumerate(prompts(9, [16, 15, 14]))]
    for prefix_cache in (False, True):
        sampler = poisoned(Sampler(FakeModel(), page_size=4, num_pages=14, prefix_cache=prefix_cache))
        completions = play(sampler, requests)
        assert completions[0].preemptions == 0 and completions[2].preemptions > 0
        # Of the first admission: that the own pages were found again after a preemption is no hit of the prompt.
        assert [c.cached_tokens for c in completions] == [0, 0, 0]
        assert_alone(requests, completions)


def test_a_request_that_takes_every_page() -> None:
    requests = [Request(p, SamplingParams(17, ignore_eos=True)) for p in prompts(10, [16, 16])]
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), page_size=4, num_pages=8)), requests))


def test_abort_gives_pages_back_and_disturbs_nobody() -> None:
    requests = [Request(p, SamplingParams(20, ignore_eos=True, seed=5)) for p in prompts(11, [30, 20, 30])]
    for step in range(12):
        schedule = [requests[0], Request(requests[1].prompt, requests[1].params, 0, step), requests[2]]
        sampler = poisoned(Sampler(FakeModel(), page_size=4, chunk_size=7))
        completions = play(sampler, schedule)
        assert completions[1].finish_reason == "abort"
        assert_alone(schedule, completions)


def test_a_request_ends_where_it_must() -> None:
    """A stop token ends the request in the step that draws it and is part of the output; so do the two limits."""
    prompt, free = (4, 5, 6), SamplingParams(40, ignore_eos=True, seed=1)
    token_ids, log_probs, _ = fake_alone(prompt, free)
    stop = next(t for i, t in enumerate(token_ids) if i > 3 and t not in token_ids[:i])
    end = token_ids.index(stop) + 1
    sampler = Sampler(FakeModel(), page_size=4)
    stopped, full, short = sampler.generate(
        [list(prompt), list(range(4, 23)) * 5, list(prompt)],
        [
            SamplingParams(40, seed=1, ignore_eos=True, stop_token_ids=(stop,)),
            SamplingParams(40, ignore_eos=True),
            SamplingParams(2, ignore_eos=True, seed=1),
        ],
    )
    assert (stopped.token_ids, stopped.finish_reason) == (token_ids[:end], "stop")
    assert_bits(stopped.log_probs, log_probs[:end], "stopped")
    assert (len(full.token_ids), full.finish_reason) == (1, "length")  # the context of 96 is full
    assert (short.token_ids, short.finish_reason) == (token_ids[:2], "length")


def test_eos_of_the_model_ends_unless_ignored() -> None:
    model = FakeModel(FakeConfig(eos_token_ids=tuple(range(24))))
    assert Sampler(model).generate([[5]], SamplingParams(4))[0].finish_reason == "stop"
    assert len(Sampler(model).generate([[5]], SamplingParams(4, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_are_those_of_one_packed_pass(temperature: float) -> None:
    """Token p is scored by the logits of p - 1, divided by the request's temperature (greedy: by 1), whole softmax."""
    params = SamplingParams(12, temperature=temperature, top_k=7, top_p=0.8, ignore_eos=True)
    (got,) = Sampler(FakeModel(), page_size=4).generate([[4, 5, 6]], params)
    with torch.no_grad():
        logits_LV = FakeModel()(Batch.packed([got.prompt_ids + got.token_ids]))[2:-1]
    assert_bits(got.log_probs, logprob(logits_LV, torch.tensor(got.token_ids), temperature or 1.0).tolist(), "packed")
    if temperature == 0:
        assert got.token_ids == logits_LV.argmax(-1).tolist()
    said = f"softmax of logits / {temperature or 1:g} over the whole vocabulary, which is not the narrower"
    assert got.log_prob_of.startswith(said)


def test_greedy_ignores_the_seed() -> None:
    params = [SamplingParams(8, temperature=0, ignore_eos=True, seed=seed) for seed in range(3)]
    first, *others = Sampler(FakeModel()).generate([[4, 5]] * 3, params)
    assert all(other.token_ids == first.token_ids for other in others)


def test_trace_and_on_token_see_every_new_token() -> None:
    class Notes:
        def __init__(self) -> None:
            self.log_probs: dict[tuple[int, int], float] = {}

        def note_log_probs(self, request_id: int, positions: list[int], values: list[float]) -> None:
            self.log_probs |= {(request_id, p): v for p, v in zip(positions, values, strict=True)}

    notes, seen = Notes(), []
    sampler = Sampler(FakeModel(), page_size=4)
    got = sampler.generate([[4, 5, 6], [7]], SamplingParams(5, ignore_eos=True), notes, seen.append)
    want = {(c.request_id, len(c.prompt_ids) + i): v for c in got for i, v in enumerate(c.log_probs)}
    assert notes.log_probs == want
    assert [[t.token_id for t in seen if t.request_id == c.request_id] for c in got] == [c.token_ids for c in got]


def test_on_token_may_abort_a_request_or_make_a_step() -> None:
    """As for a stop string: generate() ends, with what the aborted request had; the others lose nothing."""
    params = [SamplingParams(9, ignore_eos=True, seed=i) for i in range(3)]
    whole = Sampler(FakeModel()).generate(prompts(12, [5, 6, 7]), params)
    sampler, seen = Sampler(FakeModel()), []

    def stop(token) -> None:
        seen.append(token.request_id)
        if token.request_id == 1 and seen.count(1) == 2:
            assert sampler.abort(1).token_ids == whole[1].token_ids[:2]

    got = sampler.generate(prompts(12, [5, 6, 7]), params, on_token=stop)
    assert [got[0], got[2]] == [whole[0], whole[2]]
    assert (got[1].finish_reason, got[1].token_ids) == ("abort", whole[1].token_ids[:2])
    sampler = Sampler(FakeModel())
    assert sampler.generate(prompts(12, [5, 6, 7]), params, on_token=lambda token: sampler.step()) == whole
    assert not sampler.scheduler.running


def test_a_failed_step_leaves_no_request_behind() -> None:
    class Broken(FakeModel):
        def forward(self, *args) -> torch.Tensor:
            raise RuntimeError("broken")

    sampler = Sampler(Broken(), page_size=4)
    with pytest.raises(RuntimeError, match="broken"):
        sampler.generate([[4, 5, 6], [7]])
    sampler.check()
    assert sampler.pool.available == sampler.pool.num_pages and not sampler.scheduler.running


def test_text_prompts_go_through_the_models_tokenizer() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(c) - ord("a") for c in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(ord("a") + i) for i in ids)

    params = SamplingParams(9, stop_token_ids=tuple(range(4, 12)))
    (got,) = Sampler(FakeModel(tokenizer=Letters())).generate(["hello"], params)
    assert got.prompt_ids == [7, 4, 11, 11, 14] and got.finish_reason == "stop"
    assert got.text == Letters().decode(got.token_ids[:-1])
