"""Law: a failure is one request's own, or nobody's. What is raised in a step leaves every request as it was."""

import itertools

import numpy as np
import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.fake import (
    FakeModel,
    Request,
    assert_alone,
    assert_bits,
    fake_alone,
    play,
    poisoned,
    prompts,
)
from minitransformer.errors import InputError, RowError
from minitransformer.sampler import sampler as sampler_module
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import NewToken, RequestError, SamplingParams


class Interruptible(FakeModel):
    """Raises KeyboardInterrupt in a forward pass, before or after the keys and values are stored."""

    interrupt = None

    def forward(self, *args) -> torch.Tensor:
        if self.interrupt == "before":
            raise KeyboardInterrupt
        logits_LV = super().forward(*args)
        if self.interrupt == "after":
            raise KeyboardInterrupt
        return logits_LV


class Notes:
    """A trace that raises when it is told to."""

    broken = False

    def note_log_probs(self, *args) -> None:
        if self.broken:
            raise RuntimeError("trace")


def interrupted_schedule(where: str) -> None:
    """Every step fails once and is repeated: what comes out is what each request gives alone."""
    requests = [Request(p, SamplingParams(9, seed=i, ignore_eos=True)) for i, p in enumerate(prompts(30, [5, 17, 9]))]
    model, notes, done = Interruptible(), Notes(), {}
    sampler = poisoned(Sampler(model, page_size=4, num_pages=10, chunk_size=6))
    for request in requests:
        sampler.add(list(request.prompt), request.params)
    draw = sampler_module.draw

    def broken_draw(sequences, logits_LV):
        draw(sequences, logits_LV)
        raise KeyboardInterrupt

    for _ in itertools.count():
        if len(done) == len(requests):
            break
        with pytest.MonkeyPatch.context() as patch:
            if where == "draw":
                patch.setattr(sampler_module, "draw", broken_draw)
            model.interrupt, notes.broken = where, where == "trace"
            try:
                tokens = sampler.step(notes)
            except (KeyboardInterrupt, RuntimeError):
                tokens = []
            else:
                assert where == "trace", "the fault has not struck"  # a step that draws nothing notes nothing
        sampler.check()
        model.interrupt, notes.broken = None, False
        done |= {t.request_id: t.completion for t in tokens + sampler.step(notes) if t.completion is not None}
        sampler.check()
    assert_alone(requests, [done[i] for i in range(len(requests))])
    assert sampler.pool.available == sampler.pool.num_pages, "pages are leaked"


@pytest.mark.parametrize("where", ["before", "after", "draw", "trace"])
def test_a_step_that_raises_can_be_repeated(where: str) -> None:
    interrupted_schedule(where)


def overflowing_model():
    """Logits around 1e34: a temperature of 1e-6 overflows, one of 1 does not."""
    model = tiny_model(2)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e34)
    return model


HOT, COLD = SamplingParams(5, seed=3, ignore_eos=True), SamplingParams(5, temperature=1e-6, ignore_eos=True)


def one_bad_request() -> None:
    """Between two good requests, one whose temperature overflows: it fails, they get what they get alone."""
    model = overflowing_model()
    ids = [[4, 5, 6], [7, 8, 9], [10, 11]]
    want = [Sampler(model).generate([p], HOT)[0] for p in (ids[0], ids[2])]
    sampler = Sampler(model, page_size=4)
    seen: list[NewToken] = []
    try:
        sampler.generate(ids, [HOT, COLD, HOT], on_token=seen.append)
        raise AssertionError("the bad request went unnoticed")
    except RequestError as error:
        assert str(error).startswith("prompts[1]: request 1: sample") and "\n" not in str(error)
        completions = error.completions
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert completions[1].token_ids == [] and completions[1].error and completions[0].error is None
    for got, alone in zip(completions[::2], want, strict=True):
        assert got.token_ids == alone.token_ids
        assert_bits(got.log_probs, alone.log_probs, "beside a bad request")
    assert len(seen) == 10 and all(t.token_id is not None for t in seen)
    sampler.check()
    assert sampler.pool.available == sampler.pool.num_pages


def test_a_request_that_cannot_be_drawn_fails_alone() -> None:
    one_bad_request()


def test_step_reports_the_failed_request_and_goes_on() -> None:
    sampler = Sampler(overflowing_model(), page_size=4)
    good, bad = sampler.add([4, 5, 6], HOT), sampler.add([7, 8, 9], COLD)
    tokens = {t.request_id: t for t in sampler.step()}
    sampler.check()
    assert tokens[bad].token_id is None and tokens[bad].completion.finish_reason == "error"
    assert tokens[good].token_id is not None and tokens[good].completion is None
    with pytest.raises(InputError, match="not in flight"):
        sampler.abort(bad)
    assert [t.request_id for t in sampler.step()] == [good]


def test_a_nan_in_one_row_is_that_requests_own() -> None:
    class OneNan(FakeModel):
        def forward(self, batch, *args) -> torch.Tensor:
            logits_LV = super().forward(batch, *args)
            logits_LV[batch.ids_T[batch.logit_rows_L] == 5] = torch.nan
            return logits_LV

    with pytest.raises(RequestError, match=r"prompts\[0\].*NaN") as error:
        Sampler(OneNan(), page_size=4).generate([[4, 5], [4, 6]], SamplingParams(1))
    first, second = error.value.completions
    assert_alone([Request((4, 6), SamplingParams(1))], [second])
    assert first.finish_reason == "error"


REFUSED = 11


class Refusing(FakeModel):
    """An operator that refuses every row of one token id, before or after keys and values are stored."""

    def forward(self, batch, *args) -> torch.Tensor:
        logits_LV = super().forward(batch, *args)
        if (batch.ids_T == REFUSED).any():
            raise RowError("fake", (batch.ids_T == REFUSED).nonzero().flatten(), "this id")
        return logits_LV


def refused_rows(seed: int) -> None:
    """Random schedules with prefix hits, preemptions and few pages, where prompts hold the id or draw it."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(tuple(p), SamplingParams(8, seed=i, ignore_eos=True), arrival=int(rng.integers(0, 12)))
        for i, p in enumerate(prompts(seed, rng.integers(1, 24, 14).tolist()))
    ]
    sampler = poisoned(Sampler(Refusing(), page_size=4, num_pages=11, chunk_size=5, max_batch_tokens=11))
    failed = 0
    for i, (request, got) in enumerate(zip(requests, play(sampler, requests), strict=True)):
        token_ids, log_probs, reason = fake_alone(request.prompt, request.params)
        fed = [*request.prompt, *token_ids[:-1]]
        if REFUSED in fed:  # what was drawn before the id was read is good, the id itself included
            at, reason = fed.index(REFUSED), "error"
            token_ids, log_probs = (x[: max(0, at + 1 - len(request.prompt))] for x in (token_ids, log_probs))
            assert got.error.endswith(f": position {at}, fake: this id") or ": positions " in got.error
        failed += reason == "error"
        assert (got.token_ids, got.finish_reason) == (token_ids, reason), f"request {i}"
        assert_bits(got.log_probs, log_probs, f"request {i}")
    assert 0 < failed < len(requests)
    assert not any(REFUSED in ids for _, ids in sampler.pool._keys.values()), "a refused row is in the prefix cache"


@pytest.mark.parametrize("seed", [3, 4, 6, 8])
def test_refused_rows_in_any_schedule(seed: int) -> None:
    refused_rows(seed)
