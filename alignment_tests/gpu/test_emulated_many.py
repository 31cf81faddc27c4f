"""The CUDA C++ of the packed product of many rows on a CPU: the spec's bits, and faults in its text that are seen."""

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no schedules to read")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_many as emulated
from alignment_tests.gpu.test_emulated_product import operands
from minitransformer.ops import nvfp4, quantised_linear, swiglu
from minitransformer.ops.gpu import cuda, many_rows, pack
from minitransformer.ops.gpu.many_rows import Many

FP32, BF16 = torch.float32, torch.bfloat16


def check(schedule, counts, N, K, quantised, out_dtype, fused=False, text=None, blocks=2) -> None:
    x, scale, w, plan = operands(counts, N, K, quantised)
    got = emulated.product(schedule, x, scale, pack.pack(w), w.outer, plan, out_dtype, fused, blocks, text)
    want = quantised_linear.forward(x, scale, nvfp4.decode(w), w.outer, plan, FP32 if fused else out_dtype)
    assert_bits_equal(got, swiglu.swiglu_amax(want)[0] if fused else want, f"{schedule}")


# Rows of each expert, N, K, quantised rows or BF16, what comes out, with SwiGLU.
CASES = (
    (Many(64, 2), [0, 3, 70, 0, 9], 40, 176, True, FP32, False), (Many(64, 3), [65, 1], 146, 64, False, BF16, False),
    (Many(64, 2), [5, 0, 66], 96, 272, True, BF16, True), (Many(128, 2), [130, 0, 2, 100], 136, 96, True, BF16, False),
    (Many(192, 2), [250, 1, 180], 96, 96, True, BF16, True),
)  # fmt: skip


@pytest.mark.slow  # 384 threads a block
@pytest.mark.parametrize("case", CASES, ids=str)
def test_has_the_bits_of_the_spec(case):
    check(*case)


def test_few_units_and_one_tile():
    check(Many(64, 2), [3, 5], 16, 128, True, BF16, blocks=1)


FAULTS = {
    "gate in the place of up": ("row + tiles / 2", "row"),
    "a narrow instruction for many rows": ("rows > N)", "rows > N + 32)"),
    "a tile's second part taken from the first": ("acc + 4 * (p * (PART / 8) + j)", "acc + 4 * j"),
    "2^-19 left in": ("EXACT ? acc[c] : __fmul_rn(acc[c], 524288.0f)", "acc[c]"),
    "steps of x in another order": ("x + 2 * step", "x + 2 * (step ^ 1)"),
    "rows from an expert's neighbour": ("first = at.first + warp", "first = (at.first & ~7) + warp"),
    "both groups take the first one's columns": ("at.column += which * COLUMNS", "at.column += 0"),
    "a tile's place without its column":
        ("s.places[ring.slot] = at;", "s.places[ring.slot] = at, s.places[ring.slot].column = 0;"),
    "gate and up exchanged": ("swiglu(gate.x, up.x)", "swiglu(up.x, gate.x)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(cuda.source_of(many_rows.SOURCE), *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(Many(64, 2), [0, 3, 47], 192, 128, True, BF16, True, text)
