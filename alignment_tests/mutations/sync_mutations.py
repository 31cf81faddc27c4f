"""Faults of a weight transfer and of its proof, put back on purpose, with the check that must notice."""

import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.mutations import Mutation, patched
from alignment_tests.plugin import test_align, test_probe, test_receiver, test_send, test_sync
from alignment_tests.plugin.fake import Fake
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.nvfp4_layout import MODELOPT
from minitransformer.plugins.sglang import align, identity, probe, send, sync, weights

_named, _quantise, _expected, _score = sync._named, sync._quantise, sync._expected, align.score
_by_tensor, _handle = send.by_tensor, send._handle


def arrives() -> None:
    """An update arrives, in BF16."""
    with Fake(tiny_model(0)) as server:
        test_sync.trained().sync(server)


def two_updates_arrive_packed() -> None:
    """And so does the next one: nothing is left over from the first."""
    with tempfile.TemporaryDirectory() as directory:
        learner = test_sync.trained(recipe="nvfp4_per_token")
        with Fake(test_sync.packed(Path(directory)), MODELOPT) as server:
            learner.sync(server)
            learner.update([Sample(list(range(20)), 3)], nll)
            learner.sync(server)


def _one_left_out(model, packed, form):
    return list(_named(model, packed, form))[:-1]


def _two_experts_swapped(model, packed, form):
    tensors = dict(_named(model, packed, form))
    a, b = (f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in (3, 4))
    return (tensors | {a: tensors[b], b: tensors[a]}).items()


@contextmanager
def _stale_quantised():
    """Quantised once and for all."""
    made = {}

    def kept(model, server):
        return made.setdefault(id(model), _quantise(model, server))

    with mock.patch.object(sync, "_quantise", kept):
        yield


def _of_another_tensor(model, packed):
    sums = _expected(model, packed)
    return dict(zip(sums, [*list(sums.values())[1:], next(iter(sums.values()))], strict=True))


@contextmanager
def _by_torchs_handles(tensors, same_gpu):
    for _, tensor in tensors:
        tensor.share_memory_()
    with _by_tensor(tensors, same_gpu) as request:
        yield request


def _handle_anew(storage):
    send._handles.clear()
    return _handle(storage)


@contextmanager
def _without_checksums():
    with mock.patch.object(sync, "unlike", lambda ours, theirs: []):
        yield


def _one_bit() -> None:
    test_sync.test_one_wrong_bit_on_the_server_is_named("layers.2.mlp.gate_up.weight")

def _another_gpu() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_send.test_handles_go_to_the_learners_own_gpu_only(patch, "b", None, "distributed", None)


MUTATIONS = [
    Mutation("one tensor is not sent", "all arrives", patched(sync, "_named", _one_left_out), arrives),
    Mutation("two experts are swapped", "all arrives", patched(sync, "_named", _two_experts_swapped), arrives),
    Mutation("a stale quantised copy is sent", "the newest weights arrive", _stale_quantised,
             two_updates_arrive_packed),
    Mutation("checksums of other tensors", "each tensor is compared with itself",
             patched(sync, "_expected", _of_another_tensor), arrives),
    Mutation("checksums are not compared", "one wrong bit is seen", _without_checksums, _one_bit),
    Mutation("the probe is scored by nobody", "other arithmetic is seen",
             patched(probe, "log_prob_gap", lambda a, b: sync.Gap(1, 0, 0.0, 0.0, 0.0, 0.0)),
             test_sync.test_a_server_that_computes_otherwise_fails_the_probe),
    Mutation("a probe without regard to room", "what can't be proven is not sent",
             patched(probe, "LEAST", 0), test_probe.test_a_learner_without_room_for_a_probe_sends_nothing),
    Mutation("the last of two tensors of one name wins", "a bad update changes nothing",
             patched(weights, "once", lambda tensors: tensors),
             test_receiver.test_a_tensor_that_comes_twice_is_refused_before_anything_is_written),
    Mutation("torch's handles, which move the parameters", "the learner is left as it was",
             patched(send, "by_tensor", _by_torchs_handles), test_sync.test_the_learner_is_left_as_it_was),
    Mutation("a piece has a handle of its own", "one handle a storage",
             patched(send, "_handle", _handle_anew), test_send.test_one_handle_for_all_pieces_of_a_storage),
    Mutation("another number is given back", "no memory waits for a server that is gone",
             patched(send, "COUNTER", slice(9, 11)), test_send.test_one_handle_for_all_pieces_of_a_storage),
    Mutation("handles of what is gone stay", "another tensor at an address has its own handle",
             patched(send.StorageWeakRef, "expired", lambda self: False),
             test_send.test_memory_that_is_gone_has_no_handle),
    Mutation("a handle names its GPU by the learner's number", "processes may number their GPUs differently",
             patched(send, "DEVICE", 5), test_send.test_one_handle_for_all_pieces_of_a_storage),
    Mutation("a learner that knows no GPU", "handles go to the learner's own GPU only",
             patched(send, "default_route", lambda url, directory, here, there: "tensor"), _another_gpu),
    Mutation("specs are not compared", "another recipe is told before sampling",
             patched(identity, "_forward", lambda entries: {}), test_align.check_another_recipe),
    Mutation("weights are not compared", "other weights are told before sampling",
             patched(align, "unlike", lambda ours, theirs: []), test_align.check_other_weights),
    Mutation("sampled tokens scored at temperature 1", "log-probs at the request's temperature",
             patched(align, "score", lambda model, done, t, trace: _score(model, done, [1.0] * len(t), trace)),
             test_align.check_equal),
]  # fmt: skip
