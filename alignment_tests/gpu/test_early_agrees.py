"""The law of the GPU for kernels launched before the one in front of them has ended: they wait for its rows."""

from types import SimpleNamespace

import pytest
import torch

from alignment_tests import inputs
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.experts import QuantisedExperts, no_trace
from minitransformer.ops import dispatch, gpu
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


def test_attention_that_begins_early_waits_for_its_keys():
    """A captured chain of stores and attention over what each has stored, against the same with a pause between."""
    S, n, N, G, H, page = 48, 1100, 16, 2, 128, 16
    pages = -(-n // page)
    tables = inputs.integers(40, 1 << 40, S * pages).argsort().view(S, pages).tolist()
    batch = Batch.paged([[0]] * S, [n - 1] * S, tables, page).to("cuda")
    rows, q = torch.randperm(S * pages * page, device="cuda"), inputs.bf16(41, S, N, H).cuda()
    new = [[torch.randn(len(rows), G, H, device="cuda").bfloat16() for _ in range(2)] for _ in range(2)]
    k, v = (torch.zeros_like(x) for x in new[0])

    def layers(pause=lambda: None) -> list[torch.Tensor]:
        found = []
        for i in range(8):
            gpu.kv_store.store(*new[i % 2], k, v, rows)
            pause()
            found.append(gpu.attention.forward(q, k, v, batch, gpu.attention.Alone(7))[0])
            pause()
        return found

    want, graph = layers(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    assert not torch.equal(want[0], want[1])
    with torch.cuda.graph(graph):
        got = layers()
    for _ in range(50):
        graph.replay()
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"layer {i}"
