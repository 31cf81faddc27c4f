"""A server's weights as they are loaded, without a server."""

import torch

from alignment_tests.learner.tiny import tiny_model
from minitransformer.models.qwen3_moe.layout import pieces
from minitransformer.plugins.sglang.weights import Receiver


@torch.no_grad()
def test_what_is_made_of_the_weights_is_there_when_they_are():
    """SGLang gives what memory is left to keys and values: nothing as large as weights may come after that."""
    source, model = tiny_model(0), tiny_model(1)
    model.set_recipe("nvfp4_per_token")
    parameters = dict(source.named_parameters())
    named = [(piece.key, parameters[piece.parameter][piece.index]) for piece in pieces(source.config)]
    Receiver(model).load(named, update=False)
    mlps = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "experts")]
    made = [{name: tensors for name, (_, *tensors) in mlp.experts._made.items()} for mlp in mlps]
    assert mlps and all(of.keys() == {"gate_up", "down"} for of in made)
    for mlp, of in zip(mlps, made, strict=True):
        now = mlp.experts.operands(mlp, "cpu")
        kept = [*of["gate_up"], *of["down"]]
        assert all(a is b for a, b in zip(now, kept, strict=True)), "made again"
