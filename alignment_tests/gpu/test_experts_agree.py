"""The law of the GPU for 4-bit experts of few tokens, which are one kernel: the CPU's bits, eagerly, again and again in
graphs, beside another stream, behind another kernel."""

import time

import pytest
import torch

from alignment_tests.gpu.experts_cases import case, operand, reference
from alignment_tests.gpu.values import agree
from minitransformer.ops import gpu

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
# Experts a token, experts, hidden, width.
SHAPES = ((8, 10, 2048, 768), (4, 60, 1088, 320), (3, 5, 64, 64), (1, 1, 192, 1024))


def on_gpu(T: int, shape: tuple[int, ...], seed: int = 1, same: bool = False):
    """(the kernel's arguments, what it must give)."""
    slots, E, D, F = shape
    x, plan, routed, weights = case(T, slots, E, D, F, seed, same)
    operands = [operand(weights[name]) for name in ("gate_up", "down")]
    args = x.cuda(), plan.to("cuda"), routed.cuda(), *(tuple(t.cuda() for t in pair) for pair in operands)
    return args, reference(x, plan, routed, weights)


def one_kernel(x, plan, routed, *operands) -> torch.Tensor:
    at = gpu.few_experts.place(x.device, plan, *operands)
    return gpu.few_experts.forward(x, plan, routed, *operands, at)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("T", range(1, gpu.few_experts.MOST + 1))
def test_few_tokens_are_one_kernel(T, shape):
    for seed, same in ((1, False), (11, True)):
        args, want = on_gpu(T, shape, seed, same)
        if gpu.few_experts.place(args[0].device, args[1], *args[3:]) is None:
            assert shape[2:] != (2048, 768), "the widths of Qwen3-30B-A3B are served"
            continue
        agree([one_kernel(*args)], [want], f"{T} tokens")
    gpu.device.check(torch.device("cuda", 0))


MANY = (200, (2, 3, 320, 96)), (150, (1, 1, 96, 160)), (300, (2, 2, 512, 48)), (250, (1, 1, 64, 64))


@pytest.mark.parametrize(("T", "shape"), MANY, ids=str)
def test_many_tokens_join_fc1_and_swiglu(T, shape):
    """Tiles that are not full, of rows, of gate and of K; a width of gate that ends within a tile."""
    args, want = on_gpu(T, shape)
    assert gpu.quantised_linear.joins_swiglu(args[1], args[3][1])
    for schedule in gpu.many_rows.CANDIDATES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu.many_rows, "choose", lambda *_: schedule)  # noqa: B023
            agree([gpu.quantised_experts.forward(*args)], [want], f"{T} tokens, {schedule}")
    gpu.device.check(torch.device("cuda", 0))


def test_replays_and_two_streams():
    """Forty layers in a graph, of other numbers each time, replayed in two streams at once: no row of another's, nor of
    the time before."""
    shape, tokens, graphs = (8, 32, 512, 256), range(1, gpu.few_experts.MOST + 1), []
    made = [on_gpu(T, shape, T) for T in tokens]
    turns = [[(args[0].clone(), want.cuda()) for args, want in made], []]
    for T, (args, _) in zip(tokens, made, strict=True):
        x, plan, _, weights = case(T, *shape, T + 50)
        turns[1].append((x.cuda(), reference(x, plan, args[2].cpu(), weights).cuda()))
    for args, _ in made:
        one_kernel(*args)  # compiles
    places = gpu.few_experts._places[made[0][0][0].device]
    for _ in range(2):
        graph, outs, before = torch.cuda.CUDAGraph(), [], len(places)
        with torch.cuda.graph(graph):
            for i in range(40):
                outs.append(one_kernel(*made[i % len(made)][0]))
        graphs.append((graph, outs, torch.cuda.Stream()))
        assert len(places) == before + len(made), "layers of a graph share a place"
    torch.cuda.synchronize()
    for turn in range(25):
        for (args, _), (x, _) in zip(made, turns[turn % 2], strict=True):
            args[0].copy_(x)
        torch.cuda.synchronize()
        for graph, outs, stream in graphs:
            with torch.cuda.stream(stream):
                for y in outs:
                    y.fill_(torch.nan)
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        wants = [want for _, want in turns[turn % 2]]
        wrong = [i for _, outs, _ in graphs for i, y in enumerate(outs)
                 if not torch.equal(y.view(torch.int16), wants[i % len(wants)].view(torch.int16))]  # fmt: skip
        assert not wrong, f"layers {wrong[:10]} differ from the first"


def test_a_graph_that_is_gone_gives_its_place_back():
    """To the next one of its shape, which finds cells that the other's last launch has filled."""
    args, want = on_gpu(2, (4, 12, 256, 192))
    one_kernel(*args)  # compiles
    places, ends, count = gpu.few_experts._places[args[0].device], [], 0
    for turn in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = one_kernel(*args)
        mine = next(reversed(places.values()))
        assert not mine.gone()
        ends.append(mine.end)
        count = count or len(places)
        for _ in range(turn + 1):  # each half of the cells is the last one's
            y.fill_(torch.nan)
            graph.replay()
            agree([y], [want], f"graph {turn}")
        del graph
        deadline = time.monotonic() + 10
        while not mine.gone() and time.monotonic() < deadline:  # the driver tells from a thread of its own
            time.sleep(0.01)
        assert mine.gone()
    assert len(set(ends)) == 1 and len(places) == count


def test_a_row_that_is_not_finite_is_named():
    args, _ = on_gpu(2, (3, 5, 64, 64))
    args[0][1, 7] = torch.nan
    one_kernel(*args)
    with pytest.raises(Exception, match="experts.gate_up.*1"):
        gpu.device.check(torch.device("cuda", 0))
