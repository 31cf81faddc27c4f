"""The head whose logits exist only in parts: log-probs and every gradient have the bits of logits made whole."""

from itertools import pairwise

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_sequences, tiny_model
from minitransformer.alignment.trace import Trace
from minitransformer.errors import InputError
from minitransformer.learner import scoring
from minitransformer.learner.learner import Learner
from minitransformer.ops.logprob import logprob

TEMPERATURES = (1.0, 0.7, 0.7, 1.9)  # of the sequences in turn
MODELS = {
    "bf16": ({}, "bf16", ()),
    "tied": (dict(tie_word_embeddings=True), "bf16", ()),
    "nvfp4": ({}, "nvfp4_per_row", ()),
    "the head frozen": ({}, "bf16", ["lm_head.weight"]),
    "the head alone": ({}, "bf16", ["layers.*", "norm.weight", "embed_tokens.weight"]),
}


def case(name: str = "bf16"):
    """A learner, its packs, whose sequences have temperatures of their own. 100: the last step of 16 is a short one."""
    changes, recipe, frozen = MODELS[name]
    model = tiny_model(vocab_size=100, **changes)
    model.set_recipe(recipe)
    learner = Learner(model, max_tokens_per_pack=60, frozen=frozen)
    sequences, starts = random_sequences(4, 10, vocab=100)
    return learner, learner._pack(sequences, starts), [TEMPERATURES[s % 4] for s in range(len(sequences))]


def whole(learner, one, temperatures) -> torch.Tensor:
    """The same by the operators one after another, on logits of all rows and columns."""
    logits_LV, rows = learner.model(one.batch), zip(one.sequences, pairwise(one.bounds), strict=True)
    return torch.cat([logprob(logits_LV[a:b], one.target_ids_L[a:b], temperatures[s]) for s, (a, b) in rows])


def results(log_probs, learner, one, temperatures) -> dict[str, torch.Tensor]:
    """Log-probs and gradients of a pull that has another weight for every token."""
    out = log_probs(learner, one, temperatures)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, list(learner.parameters.values()), pull.to(out.device))
    return {"log-probs": out.detach()} | dict(zip(learner.parameters, grads, strict=True))


def check_parts(name: str = "bf16", tokens: int = 5) -> None:
    """tokens: parts of that many rows, and of as many columns as then fit."""
    learner, packs, temperatures = case(name)
    wants = [results(whole, learner, one, temperatures) for one in packs]
    assert len(packs) > 1 and any(len(one.sequences) > 2 for one in packs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK_BYTES", 4 * learner.model.config.vocab_size * tokens)
        for one, want in zip(packs, wants, strict=True):
            for key, got in results(Learner._log_probs, learner, one, temperatures).items():
                assert_bits_equal(got, want[key], key)
                assert got.abs().max() > 0, key


@pytest.mark.parametrize("tokens", [1, 5, 12, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_move_no_bit(name, tokens):
    check_parts(name, tokens)


def check_what_is_free(free: int = 8000) -> None:
    """Half of it is gone when the backward asks for itself."""
    learner, (one, *_), temperatures = case()
    want, sizes, asked = results(whole, learner, one, temperatures), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "LEAST_BYTES", 1600)
        patch.setattr(scoring, "free_bytes", lambda device: asked.append(device) or free >> len(asked) - 1)
        for name in ("forward", "backward"):
            patch.setattr(scoring.logprob, name, watched(getattr(scoring.logprob, name), sizes))
        for key, got in results(Learner._log_probs, learner, one, temperatures).items():
            assert_bits_equal(got, want[key], key)
    assert asked == [one.target_ids_L.device] * 2
    L = len(one.target_ids_L)
    least = max(1600, 4 * scoring.STEP * L)  # of columns there are STEP at least
    assert max(sizes) <= (max(least, free // 4) if free < 1 << 40 else 400 * L)
    assert (len(sizes) > 2) == (free < 1 << 40)


def watched(operator, sizes: list[int]):
    """It notes the bytes of the logits, its first operand of two dimensions."""

    def call(*args):
        sizes.append(next(x.nbytes for x in args if x.dim() == 2))
        return operator(*args)

    return call


@pytest.mark.parametrize("free", [0, 8000, 40000, 1 << 40])
def test_the_parts_follow_what_is_free(free):
    check_what_is_free(free)


def check_scores(rows: int = 2, trace: Trace | None = None) -> None:
    learner, _, temperatures = case()
    sequences, starts = random_sequences(4, 10, vocab=100)
    want = learner.score(sequences, starts, temperatures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK_BYTES", 4 * learner.model.config.vocab_size * rows)
        for a, b in zip(learner.score(sequences, starts, temperatures, trace=trace), want, strict=True):
            assert_bits_equal(a, b, "scores")


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_scores_ignore_the_parts(rows):
    check_scores(rows)


def test_a_trace_of_the_logits_has_all_of_their_rows():
    trace = Trace(["logits", "final_norm"])
    check_scores(3, trace)
    learner, packs, _ = case()
    for one in packs:
        for key, row in zip(one.batch.logit_rows_L.tolist(), learner.model(one.batch).detach(), strict=True):
            s = next(i for i, end in enumerate(one.batch.cu_seqlens[1:]) if key < end)
            position = key - one.batch.cu_seqlens[s]
            assert_bits_equal(trace.row("logits", one.sequences[s], position), row, f"logits at {position}")


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("grads", [False, True])
def test_a_refused_row_has_its_sequence_and_position(rows, grads, monkeypatch):
    """One element of one hidden row is infinite."""
    learner, (one, *_), temperatures = case()
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 400 * rows)
    hidden, (s, begin) = learner.model.hidden, (2, one.bounds[2])
    row = one.batch.logit_rows_L[begin + 1]

    def with_infinity(*args, **options):
        h_TD = hidden(*args, **options) * 1
        h_TD[row, 5] = torch.inf
        return h_TD

    monkeypatch.setattr(learner.model, "hidden", with_infinity)
    position = int(row) - one.batch.cu_seqlens[s]
    where = rf"^sequence {one.sequences[s]}, .*position {position}\b.*logprob: the logits"
    with pytest.raises(InputError, match=where):
        with torch.set_grad_enabled(grads):
            learner._log_probs(one, temperatures)


def test_a_temperature_that_fp32_rounds_to_zero_is_refused():
    learner, (one, *_), temperatures = case()
    with pytest.raises(InputError, match="temperature 1e-60 must be positive"):
        learner._log_probs(one, [1e-60] * len(temperatures))


def head_operands(L: int):
    h, w = (torch.randn(n, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (L, 100))
    return h.requires_grad_(), w.requires_grad_(), torch.arange(L), torch.full((L,), 0.7)


def test_the_head_of_no_row():
    h, w, ids, temperatures = head_operands(0)
    out = scoring.head(h, w, ids, temperatures)
    out.sum().backward()
    assert out.shape == (0,) and h.grad.shape == (0, 32) and not w.grad.any()


def test_operands_of_other_lengths_are_refused(monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 4 * 100 * 3)
    h, w, ids, temperatures = head_operands(9)
    for some in ((ids[:8], temperatures), (ids, temperatures[:8])):
        with pytest.raises(ValueError, match="head: 9 rows"):
            scoring.head(h, w, *some)
    ids[5] = 100
    with pytest.raises(InputError, match="id 100 of token 5 is outside the vocabulary of 100"):
        scoring.head(h, w, ids, temperatures)
