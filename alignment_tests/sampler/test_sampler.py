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
    alone,
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
def test_chunk_sizes(chunk_size: int) -> None:
    requests = [Request(p, SamplingParams(4, ignore_eos=True, seed=9)) for p in prompts(1, [1, 40, 63, 64, 65])]
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), chunk_size=chunk_size)), requests))


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8, 64, 96, 1000])
def test_page_sizes(page_size: int) -> None:
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


@pytest.mark.parametrize(("length", "cached"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32), (41, 40)])
def test_prefix_hits_of_no_page_one_page_and_several(length: int, cached: int) -> None:
    """A prompt served twice: all its full pages are spared, but never its last token."""
    (prompt,) = prompts(5, [length])
    requests = [Request(prompt, SamplingParams(1, seed=i)) for i in range(2)]
    model = FakeModel()
    sampler = poisoned(Sampler(model, page_size=8))
    first, second = play(sampler, requests[:1]) + play(sampler, requests[1:])
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert len(model.batches[-1].ids_T) == length - cached
    assert_alone(requests, [first, second])


def test_prefixes_part_ways_inside_a_page() -> None:
    """Two prompts equal but for one token: pages before it are shared, its own page and those after are not."""
    (base,) = prompts(6, [33])
    for i in range(33):
        other = base[:i] + (base[i] ^ 1,) + base[i + 1 :]
        requests = [Request(p, SamplingParams(3)) for p in (base, other)]
        sampler = poisoned(Sampler(FakeModel(), page_size=8))
        completions = play(sampler, requests[:1]) + play(sampler, requests[1:])
        assert completions[1].cached_tokens == i // 8 * 8
        assert_alone(requests, completions)


def test_a_page_is_found_only_behind_its_own_prefix() -> None:
    """The same ids at another place, or behind other ids, are another page."""
    a, b = tuple(range(4, 8)), tuple(range(8, 12))
    requests = [Request(p, SamplingParams(3)) for p in (a + b + a, b + a + a, a + a + b, b + b + a, a + b + b)]
    sampler = poisoned(Sampler(FakeModel(), page_size=4))
    completions = [play(sampler, [r])[0] for r in requests]
    assert [c.cached_tokens for c in completions] == [0, 0, 4, 4, 8]
    assert_alone(requests, completions)


def test_identical_prompts_at_the_same_time() -> None:
    """Computed side by side, kept once: what both have filled is one page."""
    (prompt,) = prompts(7, [33])
    requests = [Request(prompt, SamplingParams(12, seed=i, ignore_eos=True)) for i in (0, 0, 1)]
    sampler = poisoned(Sampler(FakeModel(), page_size=8, chunk_size=16))
    completions = play(sampler, requests)
    assert_alone(requests, completions)
    assert completions[0].token_ids == completions[1].token_ids != completions[2].token_ids
    # 4 pages of prompt; 12 new tokens fill the fifth page with one of two contents.
    assert len(sampler.pool._keys) == 6


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    (prompt,) = prompts(8, [10])
    sampler = poisoned(Sampler(FakeModel(), page_size=4))
    (turn,) = play(sampler, [Request(prompt, SamplingParams(9, ignore_eos=True))])
    longer = Request(prompt + tuple(turn.token_ids) + (7, 8), SamplingParams(4))
    completions = play(sampler, [longer])
    assert completions[0].cached_tokens == 16
    assert_alone([longer], completions)


def test_preemption_recomputes_the_same_bits() -> None:
    """Three requests whose prompts fit together and whose continuations do not."""
    requests = [Request(p, SamplingParams(30, ignore_eos=True, seed=i)) for i, p in enumerate(prompts(9, [16, 15, 14]))]
    for prefix_cache in (False, True):
        sampler = poisoned(Sampler(FakeModel(), page_size=4, num_pages=14, prefix_cache=prefix_cache))
        completions = play(sampler, requests)
        assert completions[0].preemptions == 0 and completions[2].preemptions > 0
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


def test_finish_reasons() -> None:
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


def test_new_weights_are_seen_and_old_keys_are_not() -> None:
    """A change that torch counts is noticed; one that it does not count needs reset_cache()."""
    (prompt,) = prompts(12, [40])
    params = SamplingParams(6, ignore_eos=True)

    def optimiser_step(model: FakeModel) -> None:
        with torch.no_grad():
            model.salt.add_(1)

    def replaced(model: FakeModel) -> None:
        model.salt = torch.nn.Parameter(torch.full((1,), 2.0))

    def announced(model: FakeModel) -> None:
        model.salt.data.add_(1)
        model.weights_version += 1

    def behind_torchs_back(model: FakeModel) -> None:
        model.salt.data.add_(1)
        sampler.reset_cache()

    for change in (optimiser_step, replaced, announced, behind_torchs_back):
        model = FakeModel()
        sampler = Sampler(model, page_size=4)
        old = sampler.generate([list(prompt)], params)[0]
        change(model)
        new = sampler.generate([list(prompt)], params)[0]
        assert new.cached_tokens == 0 and new.token_ids != old.token_ids
        token_ids, log_probs, _ = alone(model, prompt, params)
        assert new.token_ids == token_ids
        assert_bits(new.log_probs, log_probs, change.__name__)


def test_the_same_weights_written_again_change_no_output() -> None:
    """Also in the middle of a request: its keys and values are computed again."""
    requests = [Request(p, SamplingParams(10, ignore_eos=True)) for p in prompts(13, [9, 21])]
    model = FakeModel()
    sampler = poisoned(Sampler(model, page_size=4, chunk_size=6))
    for request in requests:
        sampler.add(list(request.prompt), request.params)
    done = {}
    for step in itertools.count():
        if len(done) == 2:
            break
        done |= {t.request_id: t.completion for t in sampler.step() if t.completion is not None}
        if step % 7 == 0:
            model.load_state_dict(model.state_dict())
        sampler.check()
    assert done[1].preemptions > 0
    assert_alone(requests, [done[0], done[1]])


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
