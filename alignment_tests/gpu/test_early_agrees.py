"""The law of the GPU for kernels launched before the one in front of them has ended: they wait for its rows."""

from types import SimpleNamespace

import pytest
import torch

from alignment_tests import inputs
from minitransformer.models.qwen3_moe.experts import QuantisedExperts, no_trace
from minitransformer.ops import dispatch
from minitransformer.recipe import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is launched"),
]


def test_kernels_that_begin_early_wait_for_their_rows():
    """A captured chain of layers, its buffers used again from layer to layer, against layers with a pause between."""
    E, D, F, T = 64, 512, 256, 3
    shapes = {"gate_up": (E, 2 * F, D), "down": (E, D, F)}
    mlp = SimpleNamespace(**{name: SimpleNamespace(weight=inputs.bf16(30 + i, *shape).cuda())
                             for i, (name, shape) in enumerate(shapes.items())})  # fmt: skip
    leaf, x = QuantisedExperts(get("nvfp4_per_token")), inputs.bf16(32, T, D).cuda()
    routed = inputs.normal(33, T, 4).abs().cuda()
    plans = [dispatch.plan(inputs.integers(34 + i, E, T, 4).cuda(), E) for i in range(8)]

    def layers(note) -> list[torch.Tensor]:
        return [leaf(mlp, x, plan, routed, note) for plan in plans]

    with torch.no_grad():
        want, graph = layers(lambda *stage: torch.cuda.synchronize()), torch.cuda.CUDAGraph()
        layers(no_trace)  # compiles
        with torch.cuda.graph(graph):
            got = layers(no_trace)
        for _ in range(50):
            for y in got:
                y.fill_(torch.nan)
            graph.replay()
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"layer {i}"
