"""What a learner takes and refuses: kinds of lists, ids, temperatures; parameters that are no longer the model's."""

import numpy as np
import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.alignment.trace import Trace
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_a_trace_has_the_names_that_were_given(model):
    """Also where sequences of several packs and of one lie in another order than the names."""
    ids, names, trace = [[1, 2, 3], [4, 5, 6, 7], [8, 9]], [7, 3, 5], Trace()
    log_probs = Learner(model, max_tokens_per_pack=4).score(ids, [1, 1, 1], trace=trace, request_ids=names)
    for name, sequence, log_probs_L in zip(names, ids, log_probs, strict=True):
        want = model.embed_tokens.weight[sequence[:-1]]
        for p, row in enumerate(want):
            assert_bits_equal(trace.row("embedding", name, p), row.detach(), f"request {name}, position {p}")
            assert trace.row("log_prob", name, p) == log_probs_L[p]
    assert set(trace.keys.pairs()[:, 0].tolist()) == set(names)


def replaced_parameters_are_noticed():
    """One replaced by another of the same address and count of writes, and one that the model has no longer."""
    model = tiny_model()
    learner, before = Learner(model, lr=1e-3), model.norm.weight
    model.norm.weight = torch.nn.Parameter(before.data)
    assert (model.norm.weight.data_ptr(), model.norm.weight._version) == (before.data_ptr(), 0)
    calls = [(learner.update, [Sample([1, 2, 3], 1)], nll), (learner.save, "x"), (learner.load, "x")]
    for call, *given in calls:
        with pytest.raises(InputError, match="norm.weight of the model is no longer the parameter it was"):
            call(*given)
    model.norm.weight = before
    learner.update([Sample([1, 2, 3], 1)], nll)


def test_replaced_parameters_are_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replaced_parameters_are_noticed()


def test_any_list_of_integers_is_a_sequence(model):
    learner = Learner(model)
    (want,) = learner.score([[1, 2, 3]], [1])
    for ids in (torch.tensor([1, 2, 3]), np.array([1, 2, 3]), iter([1, 2, 3])):
        (got,) = learner.score(iter([ids]), np.array([1]), np.array([1.0]), trace=Trace(), request_ids=np.array([7]))
        assert_bits_equal(got, want)
    learner = Learner(tiny_model(), lr=1e-3)
    assert learner.update((s for s in [Sample(np.array([1, 2, 3]), np.int64(1))]), nll).tokens == 2


def test_arguments_of_the_wrong_kind(model):
    learner = Learner(model)
    for arguments, options, message in [
        (([[1, 1.5, 2]], [1]), {}, "sequence 0: ids must be integers"),
        (([1.5], [1]), {}, "sequence 0: ids must be integers"),
        ((7, [1]), {}, "sequences is 7; give a list"),
        (([[1, 2, 3]], 1), {}, "prompt_lens is 1; give a list"),
        (([[1, 2, 3]], [1.5]), {}, "sequence 0: prompt length 1.5"),
        (([[1, 2, 3]], [1], "hot"), {}, "sequence 0: temperature 'hot'; give a number"),
        (([[1, 2, 3]], [1], [None]), {}, "sequence 0: temperature None; give a number"),
        (([[1, 2, 3]], [1]), {"request_ids": []}, r"request_ids is \[\]; give 1 different ids"),
        (([[1, 2, 3]] * 2, [1, 1]), {"request_ids": [5, 5]}, r"request_ids is \[5, 5\]; give 2 different ids"),
    ]:
        with pytest.raises(InputError, match=message):
            learner.score(*arguments, **options)
    for samples, message in [(7, "samples is 7"), ([[1, 2]], r"sample 0 is \[1, 2\]; give a Sample")]:
        with pytest.raises(InputError, match=message):
            learner.update(samples)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": "1e-8"}, "eps is '1e-8'; give a number"),  # which YAML reads as a text
        ({"weight_decay": "0.1"}, "weight_decay is '0.1'; give a number"),
        ({"betas": ("0.9", 0.99)}, "betas is '0.9'"),
        ({"lr": 10**400}, "lr is 10.*; give a number"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'; give a number"),
        ({"max_tokens_per_pack": 10.5}, "max_tokens_per_pack 10.5 must be an integer"),
    ],
)
def test_a_setting_that_is_no_number_is_refused_before_an_update(model, settings, message):
    with pytest.raises(InputError, match=message):
        Learner(model, **settings)
