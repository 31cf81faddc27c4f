"""The CUDA C++ of the experts of few tokens on a CPU: the operators' bits, and faults in its text that are seen."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no schedules to read")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_experts as emulated
from alignment_tests.gpu.experts_cases import case, operand, reference
from minitransformer.ops.gpu import (
    cuda,
    device,
    dispatch,
    few_experts,
    quantised_experts,
    quantised_linear,
    quantised_rows,
)


def check(T, slots, E, D, F, blocks, text=None, same=False, **changes) -> None:
    """Three launches in the same place, each with other numbers: what one leaves there is not taken by the next."""
    at = emulated.place(T, slots, F)
    for n in range(3):
        x, plan, routed, weights = case(T, slots, E, D, F, 10 * n + 1, same)
        operands = [operand(weights[name]) for name in ("gate_up", "down")]
        got, faults = emulated.forward(x, plan, routed, *operands, blocks, at, text, **changes)
        want = reference(x, plan, routed, weights)
        assert_bits_equal(got, want, f"launch {n}, {T} tokens, {D} x {F}, {blocks} blocks")
        assert (faults == 2**31 - 1).all() and at[1] == blocks * (n + 1)
        assert_bits_equal(at[0][1 - n % 2], torch.full_like(at[0][0], -1), "cells for the next launch")


# Tokens, experts a token, experts, hidden, width, blocks; warps, those that multiply, units a piece (two), depth.
CASES = (
    (1, 2, 3, 128, 64, 8, 3, 2, 2, 1, 3), (1, 1, 130, 320, 64, 3, 4, 2, 5, 1, 2), (2, 3, 5, 64, 128, 4, 5, 4, 1, 2, 2),
    (9, 1, 1, 64, 64, 3, 3, 2, 1, 1, 2), (1, 2, 2, 256, 192, 5, 3, 2, 2, 3, 5),
)  # fmt: skip


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_has_the_bits_of_the_operators_one_by_one(shape):
    """Blocks with several columns, several turns, a ring that goes round or is not filled, warps without tiles."""
    *shape, warps, workers, first, second, depth = shape
    check(*shape, WARPS=warps, WORKERS=workers, FIRST=first, SECOND=second, DEPTH=depth, SHARED=1 << 17)


@pytest.mark.slow
def test_two_tokens_with_the_same_experts():
    check(2, 2, 4, 64, 64, 4, same=True, WARPS=3, WORKERS=2, DEPTH=2, SHARED=1 << 17)


def test_a_row_that_is_not_finite_names_its_token():
    x, plan, routed, weights = case(3, 1, 2, 64, 64)
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    operands = [operand(weights[name]) for name in ("gate_up", "down")]
    how = {"WARPS": 3, "WORKERS": 2, "DEPTH": 2, "SHARED": 1 << 17}
    _, faults = emulated.forward(x, plan, routed, *operands, 4, emulated.place(3, 1, 64), **how)
    assert faults[0] == 1


def test_what_is_asked_for_fits():
    """Host and kernel agree on the shared memory (a static_assert of the kernel), for the largest shapes too."""
    for T in range(1, few_experts.MOST + 1):
        for slots, D, F in ((8, 2048, 768), (8, 4096, 1536), (4, 576, 384), (1, 64, 64)):
            sizes = dict(few_experts.defines(T, slots, D, F, min(132, D // 16)))
            assert sizes["DEPTH"] < 1 or sizes["SHARED"] <= few_experts.SHARED_LIMIT


# A fault in the text: what it replaces, and by what.
FAULTS = {
    "up in the place of gate": ("swiglu(v[c], s.up[turn & 1][warp / 2][c][lane])",
                                "swiglu(s.up[turn & 1][warp / 2][c][lane], v[c])"),
    "2^-19 left in": ("v[c] = __fmul_rn(__fmul_rn(acc[c], 524288.0f),", "v[c] = __fmul_rn(acc[c],"),
    "a token's outer scale for another's": ("__fmul_rn(s.x_outer[token],", "__fmul_rn(s.x_outer[0],"),
    "the next unit's operands": ("multiply(acc, now)", "multiply(acc, next)"),
    "a row's maximum from one block of 16": ("atomicMax(top + row", "if (b % (COLUMNS / 16) == 0) atomicMax(top + row"),
    "a shift too far": ("(word & 0x20072007u) * 68", "(word & 0x20072007u) * 72"),
    "the sum in the order of the rows": ("s.row[token * SLOTS + k]", "s.row[token * SLOTS + SLOTS - 1 - k]"),
    "a column of the neighbour's": ("blockIdx.x + part * BLOCKS) * 16", "blockIdx.x + part) * 16"),
    "a group's rows from the expert's start": ("{expert, r, min", "{expert, r & ~7, min"),
    "cells left filled": (", emptied[at] = EMPTY", ""),
    "the same half of the cells again": ("s.half = now / BLOCKS & 1", "s.half = 0"),
    "halves that change too late": ("now / BLOCKS & 1", "now / 1000000 & 1"),
    "cells that nobody waits for": ("while (most >> 16 == EMPTY || (most & 0xFFFF) == EMPTY)", "while (false)"),
    "half of the cells waited for": ("most = __vmaxu2(most, __vmaxu2(__vmaxu2(w.x, w.y), __vmaxu2(w.z, w.w)));", ""),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(cuda.source_of(few_experts.SOURCE), *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(3, 3, 4, 128, 64, 3, text, WARPS=4, WORKERS=2, DEPTH=3, SHARED=1 << 17)


@pytest.mark.parametrize(("processors", "each", "taken"), [(132, 1, True), (132, 0, False), (30, 1, True)])
def test_blocks_that_meet_all_run_at_once(processors, each, taken, monkeypatch):
    """With fewer processors there are fewer blocks; where a block does not fit, other kernels serve."""
    asked, home = [], torch.device("cuda", 7)
    monkeypatch.setattr(device, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(cuda, "kernel", lambda *how: dict(how[3]))
    monkeypatch.setattr(cuda, "at_once", lambda sizes, *_: asked.append(sizes["BLOCKS"]) or each)
    monkeypatch.setattr(few_experts, "_place", lambda *_: "a place")
    monkeypatch.setattr(few_experts, "on", lambda _: nullcontext())
    monkeypatch.setattr(quantised_rows, "operand", lambda *_: ())
    few_experts._meet.cache_clear()
    x, plan, routed, weights = case(1, 2, 3, 1024, 64)
    operands = [operand(weights[name]) for name in ("gate_up", "down")]
    found = few_experts.place(home, plan, *operands)
    assert found == ("a place" if taken else None) and asked == [min(processors, 64)]
    monkeypatch.setattr(few_experts, "place", lambda _, *rest, ask=few_experts.place: ask(home, *rest))
    monkeypatch.setattr(few_experts, "forward", lambda *args: f"one kernel at {args[-1]}")
    monkeypatch.setattr(quantised_linear, "forward", lambda *_, **__: "five kernels")
    monkeypatch.setattr(quantised_linear, "joins_swiglu", lambda *_: False)
    monkeypatch.setattr(dispatch, "combine", lambda y, *_: y)
    got = quantised_experts.forward(x, plan, routed, *operands)
    assert got == ("one kernel at a place" if taken else "five kernels")
    few_experts._meet.cache_clear()


def test_launches_that_may_run_at_once_share_no_cells(monkeypatch):
    """Nor do those of other shapes, which would find cells that are filled. Who has a place keeps it where none is
    left, a graph's launches follow one another, and a graph of the same shape has the place of one that is gone."""
    home, stream, capturing, ended = torch.device("cpu"), SimpleNamespace(cuda_stream=1), [None], set()
    monkeypatch.setattr(few_experts, "_places", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0] is not None)
    monkeypatch.setattr(cuda, "capture", lambda _: cuda.Capture(capturing[0], capturing[0]) if capturing[0] else None)
    monkeypatch.setattr(cuda, "end_of", lambda graph: lambda: graph in ended)

    def place(shape: int) -> tuple[int, int]:
        found = few_experts._place(home, 8192 * shape, (shape,))
        assert len(found.cells) == 8192 * shape and (found.cells == -1).all() and found.begun == 0
        return found.cells.data_ptr(), found.begun.data_ptr()

    def refused(why: str, shape: int = 1) -> None:
        with pytest.warns(RuntimeWarning, match=f"five kernels.*{why}"):
            assert few_experts._place(home, 8192 * shape, (shape,)) is None

    capturing[0] = 5
    refused("run it once before")
    capturing[0] = None
    seen = [place(1), place(2)]
    stream.cuda_stream = few_experts.PER_THREAD
    refused("many streams of one handle")
    stream.cuda_stream = 3
    seen.append(place(1))
    stream.cuda_stream = 1  # perhaps a new stream: the old one's work is done if it has its handle
    assert [place(1), place(2)] == seen[:2]
    stream.cuda_stream = 3
    capturing[0] = 0  # the driver doesn't say in which
    refused("which CUDA graph")
    capturing[0] = 1
    count = len(device.meeting(home)[1]) // 8192 - 4
    for number in range(1, count + 1):
        capturing[0] = number
        seen.append(place(1))
        assert place(1) == seen[-1]
    assert len({begun for _, begun in seen}) == len(seen) > 1000
    assert {at - seen[0][0] for at, _ in seen} == {0} | {2 * 8192 * n for n in (1, *range(3, len(seen) + 1))}
    capturing[0] = count + 1
    refused(f"{len(seen)} shapes and CUDA graphs")
    ended |= {7, 9}
    refused("shapes and CUDA graphs", shape=2)  # no graph of this shape is gone
    again = place(1)
    assert again == seen[2 + 7] and place(1) == again
    capturing[0] += 1
    assert place(1) == seen[2 + 9]
    capturing[0] += 1
    refused("shapes and CUDA graphs")  # each is given once
    capturing[0] = 8
    assert place(1) == seen[2 + 8]


@pytest.mark.parametrize("fault", ["the place of a graph that is not gone", "cells of a stream's", "of another shape"])
def test_a_fault_in_the_places_is_seen(fault, monkeypatch):
    left, new = few_experts._left, few_experts._new
    if fault == "cells of a stream's":
        monkeypatch.setattr(few_experts, "_new", lambda home, places, *how: new(home, {}, *how))
    elif fault == "of another shape":
        monkeypatch.setattr(few_experts, "_left", lambda places, how: next(
            (found for owner in [*places] if (found := left(places, owner[0]))), None))  # fmt: skip
    else:
        monkeypatch.setattr(few_experts, "_left", lambda places, how: next(
            (place for owner, place in places.items() if owner[0] == how), None))  # fmt: skip
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_launches_that_may_run_at_once_share_no_cells(monkeypatch)
