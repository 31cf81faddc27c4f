"""WeightsStamp: equal only if nothing that it can see has changed."""

import copy
import pickle

import torch
from torch.nn import Parameter

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.experts import QuantisedExperts
from minitransformer.recipe import get
from minitransformer.sampler.sampler import Sampler
from minitransformer.weights_stamp import WeightsStamp


def test_what_it_sees():
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    stamp = WeightsStamp([p], facts=(1,))
    assert stamp == WeightsStamp([p], facts=(1,)) and stamp != WeightsStamp([p], facts=(2,))
    assert stamp != WeightsStamp([q], facts=(1,)) and stamp != WeightsStamp([p, q], facts=(1,)) and stamp != 0
    with torch.no_grad():
        p.copy_(q)
    written = WeightsStamp([p], facts=(1,))
    assert stamp != written
    p.data = torch.zeros(3)
    assert written != WeightsStamp([p], facts=(1,))
    assert WeightsStamp([p], [q]) == WeightsStamp([p], [q]) != WeightsStamp([p], [p])


def test_another_tensor_at_the_same_address_is_another():
    data = torch.ones(3)
    p = Parameter(data)
    stamp = WeightsStamp([p])
    del p
    q = Parameter(data)
    assert stamp != WeightsStamp([q])
    dead = WeightsStamp([Parameter(data)])
    assert dead != dead


def test_tensors_without_a_count_are_compared_by_identity():
    with torch.inference_mode():
        p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
        assert WeightsStamp([p]) == WeightsStamp([p]) != WeightsStamp([q])


def test_a_copy_equals_nothing():
    stamp = WeightsStamp([p := Parameter(torch.ones(3))])
    for other in (copy.deepcopy(stamp), pickle.loads(pickle.dumps(stamp))):
        assert other != stamp and other != WeightsStamp([p]) and stamp == stamp


def replaced_weights_are_quantised_again() -> None:
    """Also where the new parameter has the address and the count of writes of the one before."""
    experts, data = QuantisedExperts(get("nvfp4_per_token")), tiny_model(1).layers[0].mlp.gate_up.weight.data
    experts.weight_operand("gate_up", Parameter(data.clone()))
    first = Parameter(data)
    experts.weight_operand("gate_up", first)
    data.data.mul_(-1)  # uncounted: only the identity of the next parameter betrays it
    second = Parameter(data)
    assert (first.data_ptr(), first._version) == (second.data_ptr(), second._version)
    want = QuantisedExperts(get("nvfp4_per_token")).weight_operand("gate_up", second)
    for got, expected in zip(experts.weight_operand("gate_up", second), want, strict=True):
        assert_bits_equal(got, expected)


def test_replaced_weights_are_quantised_again():
    replaced_weights_are_quantised_again()


def written_behind_torchs_back(announce) -> None:
    """announce(model, sampler) says so, as Sampler.reset_cache asks for; then no copy of the old weights is used."""
    model, other = tiny_model(1), tiny_model(1)
    model.set_recipe("nvfp4_per_token")
    sampler = Sampler(model)
    old = sampler.generate([[1, 2, 3]])
    for changed in (model, other):
        for layer in (changed.layers[0], changed.layers[2]):
            layer.mlp.down.weight.data.mul_(-2)
    announce(model, sampler)
    new = sampler.generate([[1, 2, 3]])
    other.set_recipe("nvfp4_per_token")
    want = Sampler(other).generate([[1, 2, 3]])
    assert (new[0].token_ids, new[0].log_probs) == (want[0].token_ids, want[0].log_probs)
    assert new[0].log_probs != old[0].log_probs
    with torch.no_grad():
        assert_bits_equal(model(Batch.packed([[4, 5]])), other(Batch.packed([[4, 5]])))


def raises_the_version(model, sampler) -> None:
    model.weights_version += 1


def resets_the_cache(model, sampler) -> None:
    sampler.reset_cache()


def test_quantised_copies_do_not_outlive_weights_that_torch_did_not_see_change():
    written_behind_torchs_back(raises_the_version)
    written_behind_torchs_back(resets_the_cache)
