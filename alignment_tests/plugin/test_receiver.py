"""A server's weights as they are loaded, without a server."""

from types import SimpleNamespace

import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.model.checkpoints import refused
from minitransformer.models.qwen3_moe.layout import pieces
from minitransformer.plugins.sglang.checksums import checksums
from minitransformer.plugins.sglang.identity import read_identity
from minitransformer.plugins.sglang.weights import Receiver, answer


def named(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return [(piece.key, parameters[piece.parameter][piece.index]) for piece in pieces(model.config)]


@torch.no_grad()
def test_what_is_made_of_the_weights_is_there_when_they_are():
    """SGLang gives what memory is left to keys and values: nothing as large as weights may come after that."""
    source, model = tiny_model(0), tiny_model(1)
    model.set_recipe("nvfp4_per_token")
    Receiver(model).load(named(source), update=False)
    mlps = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "experts")]
    made = [{name: tensors for name, (_, *tensors) in mlp.experts._made.items()} for mlp in mlps]
    assert mlps and all(of.keys() == {"gate_up", "down"} for of in made)
    for mlp, of in zip(mlps, made, strict=True):
        now = mlp.experts.operands(mlp, "cpu")
        kept = [*of["gate_up"], *of["down"]]
        assert all(a is b for a, b in zip(now, kept, strict=True)), "made again"


def test_a_tensor_that_comes_twice_is_refused_before_anything_is_written():
    """An update with the same tensor twice, or with two of one name; the first load is refused too."""
    model, source = tiny_model(0), tiny_model(1)
    receiver = Receiver(model)
    receiver.load(named(model), update=False)
    before, version, (key, tensor) = checksums(model), model.weights_version, named(source)[3]
    for again in ([(key, tensor)], [(key, tensor.flip(0))]):
        refused(lambda again=again: receiver.load(named(source) + again, update=True), f"{key} comes twice")
        refused(lambda again=again: receiver.load([(key, tensor), *again], update=True), f"{key} comes twice")
        assert checksums(model) == before and model.weights_version == version
        refused(lambda again=again: Receiver(tiny_model(2)).load(named(source) + again, update=False), "comes twice")
    receiver.load(iter(named(source)), update=True)
    assert checksums(model) == checksums(source)


def test_what_is_live_says_how_many_prefills_were_graphs():
    entry = SimpleNamespace(model=tiny_model(0), receiver=Receiver(tiny_model(0)), prefills=None)
    parallel = SimpleNamespace(model_dump=dict)
    checker = SimpleNamespace(_get_model=lambda: entry, _parallelism_info=lambda: parallel)
    said = lambda: read_identity(answer(None, checker, "identity")["checksums"])["prefills_from_graphs"]  # noqa: E731
    assert said() is None
    entry.prefills = SimpleNamespace(replays=0)
    assert said() == 0
    entry.prefills.replays += 3
    assert said() == 3
