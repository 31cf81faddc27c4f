"""The learner's passes on SGLang's kernels are whole sequences, bounded, and told when they do not fit; on the CPU."""

import pytest
import torch

from alignment_tests.learner.tiny import random_sequences, tiny_model
from alignment_tests.plugin import stock_mutations
from alignment_tests.plugin.own_kernels import OwnKernels
from alignment_tests.plugin.test_stock import ALL_SPARSE
from minitransformer.alignment.compare import ComparingTrace
from minitransformer.alignment.trace import Trace
from minitransformer.errors import InputError
from minitransformer.plugins.sglang import stock


def test_short_sequences_and_small_chunks(monkeypatch):
    model = tiny_model(1, **ALL_SPARSE)
    whole = stock.log_probs(model, [[7], [1, 2, 3, 4, 5, 6]], OwnKernels())
    assert [len(x) for x in whole] == [0, 5]
    monkeypatch.setattr(stock, "CHUNK_BYTES", 4 * 96 * 2)
    assert torch.equal(stock.log_probs(model, [[1, 2, 3, 4, 5, 6]], OwnKernels())[0], whole[1])


def check_passes(patch, fault=lambda patch: None) -> None:
    """Whole sequences, at most PASS_TOKENS a pass; no bit and no name in a trace depends on it."""
    model, (sequences, _), whole = tiny_model(1, **ALL_SPARSE), random_sequences(5, 6), Trace(None)
    temperatures, lengths = [1.0, 0.6, 1.0, 2.0, 1.0, 0.7], [len(ids) for ids in sequences]
    expected = stock.log_probs(model, sequences, OwnKernels(), temperatures, whole)
    patch.setattr(stock, "PASS_TOKENS", max(lengths[:-1]) + min(lengths))
    bounds = list(stock.passes(lengths))
    assert len(bounds) > 2 and [a for a, _ in bounds] == [0, *(b for _, b in bounds[:-1])] and bounds[-1][1] == 6
    fault(patch)
    comparing = ComparingTrace(whole)
    found = stock.log_probs(model, sequences, OwnKernels(), temperatures, comparing)
    assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(r.equal and r.rows for r in comparing.results())


def test_passes_are_bounded(monkeypatch):
    check_passes(monkeypatch)


@pytest.mark.parametrize("fault", stock_mutations.OF_PASSES)
def test_a_fault_in_the_passes_is_seen(fault, monkeypatch):
    with pytest.raises(AssertionError):
        check_passes(monkeypatch, stock_mutations.OF_PASSES[fault])


@pytest.mark.parametrize("lengths, most, expected", [
    ([], 10, []), ([3], 10, [(0, 1)]), ([30], 10, [(0, 1)]), ([30, 1, 30], 10, [(0, 1), (1, 2), (2, 3)]),
    ([5, 5, 5, 5], 10, [(0, 2), (2, 4)]), ([5, 5, 1, 9], 10, [(0, 2), (2, 4)]),
    ([1, 10, 1], 10, [(0, 1), (1, 2), (2, 3)]),
])  # fmt: skip
def test_the_bounds_of_passes(lengths, most, expected, monkeypatch):
    monkeypatch.setattr(stock, "PASS_TOKENS", most)
    assert list(stock.passes(lengths)) == expected


@pytest.mark.parametrize("length", [0, 129])
def test_a_sequence_of_a_length_that_cannot_be(length):
    model = tiny_model(0, max_positions=128, **ALL_SPARSE)
    with pytest.raises(InputError, match=rf"sequences\[1\] has {length} tokens; SGLang scores 1 to 128"):
        stock.log_probs(model, [[1, 2], [3] * length], OwnKernels())


def test_what_does_not_fit_is_a_sentence(monkeypatch):
    def full(self, x, weight):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(OwnKernels, "linear", full)
    said = "out of GPU memory in a pass of 1,030 tokens on SGLang's kernels: 2.00 GiB more were needed.*; use shorter"
    with pytest.raises(InputError, match=said):
        stock.log_probs(tiny_model(0, max_positions=2048, **ALL_SPARSE), [[1] * 1030], OwnKernels())


def test_warming_stays_inside_the_model(monkeypatch):
    seen, model = [], tiny_model(0, max_positions=20, vocab_size=11, **ALL_SPARSE)
    monkeypatch.setattr(stock, "log_probs", lambda model, sequences, kernels: seen.extend(sequences))
    stock.warm(model, OwnKernels())
    assert [len(ids) for ids in seen] == [17, 20] and max(max(ids) for ids in seen) == 10
