"""The CUDA C++ of the experts' dX on a CPU: the spec's bits, and faults in its text that are seen."""

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its package holds the kernel's launch")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_pair as emulated
from minitransformer.ops import dispatch, grouped_linear
from minitransformer.ops.gpu import cuda, pair_product

BF16 = torch.bfloat16


def plan_of(counts: list[int]) -> dispatch.Plan:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return dispatch.plan(ids[inputs.integers(1, 1 << 40, len(ids)).argsort()][:, None], len(counts))


def plain(text, programs: int, counts: list[int], N: int, K: int, backwards: bool = False) -> None:
    R, plan = sum(counts), plan_of(counts)
    dy, w, out = inputs.bf16(1, R, N), inputs.bf16(2, len(counts), N, K), torch.full((R, K), 7.0, dtype=BF16)
    emulated.dx(dy, w, out, programs, list(plan.offsets), text=text, backwards=backwards)
    assert_bits_equal(out, grouped_linear.backward(dy, torch.zeros_like(out), w, plan, None, False)[0], "dX")


def weighted(text, programs: int, counts: list[int], N: int, K: int, backwards: bool = False) -> None:
    R, plan = sum(counts), plan_of(counts)
    dy, x, w = inputs.bf16(1, R, N), inputs.bf16(2, R, K), inputs.bf16(3, len(counts), N, K)
    weights, out = inputs.normal(4, R, 1).contiguous(), torch.full((R, K), 7.0, dtype=BF16)
    dots = emulated.dx(dy, w, out, programs, list(plan.offsets), weights, plan.order_R, x, text, backwards)
    want, _, wanted = grouped_linear.backward(dy, x, w, plan, weights, False)
    assert_bits_equal(out, want, "dX")
    assert_bits_equal(dots, wanted.reshape(-1), "the routing weights' gradient")


# What is run, by how many pairs, and the shape; steps beyond the ring, tiles beyond a round of the grid, ragged edges.
CASES = {
    "an expert without rows": (plain, 1, [70, 0, 3], 64, 136),
    "several tiles an expert": (plain, 2, [130, 5], 128, 264),
    "many steps": (plain, 1, [5, 3, 20], 448, 136),
    "weighted": (weighted, 1, [5, 40, 130], 128, 256),
    "weighted, pairs that wait": (weighted, 2, [5, 40], 128, 384),
    "weighted, the last pair begins first": (weighted, 6, [5, 40], 64, 640, True),
    "the last pair begins first": (plain, 3, [130, 5], 128, 264, True),
}


def check(case: str, text: str | None = None) -> None:
    run, *shape = CASES[case]
    run(text, *shape)


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_spec(case):
    check(case)


# A fault in the text: what it replaces, by what, and the case that must see it.
FAULTS = {
    "both blocks take the same columns": ("(int)rank()", "0", "several tiles an expert"),
    "16 of the depth twice": ("rows + k * 32 / 16", "rows", "an expert without rows"),
    "the wrong 16 of the depth": ("k * 2048", "k * 1024", "an expert without rows"),
    "rows beyond the instruction's": ("rows > 64) chain<80>", "rows > 72) chain<80>", "several tiles an expert"),
    "a row too few": ("at[0], at[1], at[2], u", "at[0], at[1], at[2] - 1, u", "an expert without rows"),
    "another row's weight": ("[order[tile.first + thread]]", "[tile.first + thread]", "weighted"),
    "another order of the lanes": ("int n = 16; n >= 4; n /= 2", "int n = 4; n <= 16; n *= 2", "weighted"),
    "dots of rounded values": ("<< 16) * d[half][i];", "<< 16) * bf16(nearest_bf16(d[half][i]));", "weighted"),
    "columns of one half twice": ("tile.column + APART * half, tile.first", "tile.column, tile.first", "weighted"),
    "lanes that begin anew": ("turn == 0 ?", "turn <= 1 ?", "weighted, pairs that wait"),
    "pairs numbered by their place": (
        "WEIGHTED ? read_first(&at.pair) : blockIdx.x / 2", "blockIdx.x / 2", "weighted, the last pair begins first",
    ),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    before, after, case = FAULTS[fault]
    text = cuda_host.faulty(cuda.source_of(pair_product.SOURCE), before, after)
    with pytest.raises(AssertionError, match="differ"):
        check(case, text)
