"""Scores whose logits exist for a few rows at a time have the bits of scores from all of them."""

import pytest

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_sequences, tiny_model
from minitransformer.alignment.trace import Trace
from minitransformer.learner import scoring
from minitransformer.learner.learner import Learner


def test_chunks_cover_every_row_once_at_its_own_temperature():
    bounds, temperatures = (0, 3, 4, 9, 11), (1.0, 1.0, 0.5, 1.0)
    want = [t for t, a, b in zip(temperatures, bounds, bounds[1:], strict=False) for _ in range(a, b)]
    for most in (1, 2, 3, 4, 5, 100):
        runs = list(scoring.chunks(bounds, temperatures, most))
        assert [t for a, b, t in runs for _ in range(a, b)] == want
        assert [a for a, _, _ in runs] == [0, *(b for _, b, _ in runs[:-1])]
        assert all(0 < b - a <= most for a, b, _ in runs)


def check_chunks(rows: int = 2) -> None:
    model = tiny_model()
    sequences, starts = random_sequences(4, 9)
    temperatures = [(1.0, 0.7, 0.7)[i % 3] for i in range(9)]
    learner = Learner(model, max_tokens_per_pack=50)
    want = learner.score(sequences, starts, temperatures, trace=Trace(["logits"]))  # a trace takes them all at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK_BYTES", 4 * model.config.vocab_size * rows)
        for a, b in zip(learner.score(sequences, starts, temperatures), want, strict=True):
            assert_bits_equal(a, b, "scores")


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_scores_ignore_the_chunks(rows):
    check_chunks(rows)
