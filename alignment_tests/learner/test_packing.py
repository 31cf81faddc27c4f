"""Packing: which row scores which token, first fit by hand, and a round trip over random shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner.packing import Sample, pack, unpack

VOCAB, CONTEXT = 100, 64


def test_rows_and_targets_by_hand():
    (one,) = pack([[5, 6, 7, 8], [9, 10, 11]], [2, 1], max_tokens=16, vocab_size=VOCAB, max_positions=CONTEXT)
    # Fed: 5 6 7 | 9 10. Token 7 (position 2) is scored by row 1, 8 by row 2, 10 by row 3, 11 by row 4.
    assert one.batch.ids_T.tolist() == [5, 6, 7, 9, 10]
    assert one.batch.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert one.batch.logit_rows_L.tolist() == [1, 2, 3, 4]
    assert one.target_ids_L.tolist() == [7, 8, 10, 11]
    assert one.bounds == (0, 2, 4)
    assert one.sequences == one.batch.request_ids == (0, 1)


def test_first_fit_in_the_given_order():
    lengths = [6, 8, 4, 3, 9, 2]  # tokens to feed, budget 10
    sequences = [[1] * (n + 1) for n in lengths]
    packs = pack(sequences, [1] * 6, max_tokens=10, vocab_size=VOCAB, max_positions=CONTEXT)
    assert [p.sequences for p in packs] == [(0, 2), (1, 5), (3,), (4,)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_target_comes_back_once(data):
    budget = data.draw(st.integers(8, 40))
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=20))
    prompts = [data.draw(st.integers(1, n - 1)) for n in lengths]
    sequences = [[(7 * s + p) % VOCAB for p in range(n)] for s, n in enumerate(lengths)]
    packs = pack(sequences, prompts, max_tokens=budget, vocab_size=VOCAB, max_positions=CONTEXT)
    assert sorted(s for p in packs for s in p.sequences) == list(range(len(lengths)))
    for p in packs:
        assert len(p.batch.ids_T) <= budget and list(p.sequences) == sorted(p.sequences)
        # The fed token at a logit row stands one position before its target.
        for i, s in enumerate(p.sequences):
            rows = p.batch.logit_rows_L[p.bounds[i] : p.bounds[i + 1]]
            assert p.batch.positions_T[rows].tolist() == list(range(prompts[s] - 1, lengths[s] - 1))
            assert p.batch.ids_T[rows].tolist() == sequences[s][prompts[s] - 1 : -1]
    targets = unpack(packs, [p.target_ids_L for p in packs])
    assert [t.tolist() for t in targets] == [s[n:] for s, n in zip(sequences, prompts, strict=True)]


def test_tensors_arrays_and_generators_are_sequences_too():
    for ids in (torch.tensor([1, 2, 3]), np.array([1, 2, 3], np.int32), iter([1, 2, 3]), range(1, 4)):
        (one,) = pack(iter([ids]), np.array([1]), max_tokens=8, vocab_size=VOCAB, max_positions=CONTEXT)
        assert one.target_ids_L.tolist() == [2, 3] and one.batch.logit_rows_L.tolist() == [0, 1]
    sample = Sample(np.array([1, 2, 3]), 1, np.array([0.5, 1.0]))
    assert sample.completion_len == 2 and sample.column("advantages", "").tolist() == [0.5, 1.0]
    assert Sample(iter([1, 2, 3]), 1) == Sample([1, 2, 3], 1)


def test_request_ids_are_one_a_sequence():
    for bad in ([], [1], [1, 2, 3]):
        with pytest.raises(InputError, match=f"{len(bad)} request ids for 2 sequences"):
            Batch.packed([[1], [2]], request_ids=bad)
        with pytest.raises(InputError, match=f"{len(bad)} request ids for 2 sequences"):
            Batch.paged([[1], [2]], [0, 0], [[0], [1]], 4, request_ids=bad)


@pytest.mark.parametrize(
    ("sequence", "prompt_len", "message"),
    [
        ([], 1, "sequence 1 is empty"),
        ([1, 100], 1, "sequence 1: id 100 at position 1 is outside the vocabulary of 100"),
        ([1, -1], 1, "sequence 1: id -1"),
        ([1, 2], 2, "sequence 1: 2 tokens with a prompt of 2 leave no completion"),
        ([1, 2], 0, "sequence 1: prompt length 0"),
        ([1] * 65, 1, "sequence 1: 65 tokens exceed the model's context of 64"),
        ([1] * 18, 1, "sequence 1: 17 tokens to feed exceed a pack of 16"),
        ([1, 2.5], 1, "sequence 1: ids must be integers"),
        (1.5, 1, "sequence 1: ids must be integers"),
        ([1, 2, 3], 1.5, "sequence 1: prompt length 1.5; give an integer"),
        ([1, 2, 3], None, "sequence 1: prompt length None; give an integer"),
        ("hi", 1, "sequence 1: ids must be integers"),
    ],
)
def test_bad_input_names_the_sequence(sequence, prompt_len, message):
    with pytest.raises(InputError, match=message):
        pack([[1, 2], sequence], [1, prompt_len], max_tokens=16, vocab_size=VOCAB, max_positions=CONTEXT)


def test_no_sequences_or_missing_prompt_lengths():
    with pytest.raises(InputError, match="no sequences"):
        pack([], [], max_tokens=16, vocab_size=VOCAB, max_positions=CONTEXT)
    with pytest.raises(InputError, match="1 sequences but 2 prompt lengths"):
        pack([[1, 2]], [1, 1], max_tokens=16, vocab_size=VOCAB, max_positions=CONTEXT)


def test_columns_of_a_sample():
    sample = Sample([1, 2, 3, 4], 2, advantages=0.5, old_log_probs=[-1.0, -2.0])
    assert sample.column("advantages", "sample 0").tolist() == [0.5, 0.5]
    assert sample.column("old_log_probs", "sample 0").tolist() == [-1.0, -2.0]
    assert sample.column("ref_log_probs", "sample 0") is None
    with pytest.raises(InputError, match="sample 3: advantages has shape"):
        Sample([1, 2, 3, 4], 2, advantages=[1.0]).column("advantages", "sample 3")
    with pytest.raises(InputError, match="sample 3: advantages is 'much'; give numbers"):
        Sample([1, 2, 3, 4], 2, advantages="much").column("advantages", "sample 3")
    with pytest.raises(InputError, match="sample 3: old_log_probs holds a value that is not finite"):
        Sample([1, 2, 3], 2, old_log_probs=[float("nan")]).column("old_log_probs", "sample 3")
