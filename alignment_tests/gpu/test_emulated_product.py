"""The CUDA C++ of the packed product on a CPU: the bits of quantised_linear, and faults in its text that are seen."""

import itertools
import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no schedules to read")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_product as emulated
from minitransformer.ops import dispatch, nvfp4, quantised_linear
from minitransformer.ops.gpu import pack
from minitransformer.ops.gpu.quantised_linear import Packed

COUNTS = {"some empty": [0, 3, 0, 9, 17, 1], "many experts": [0] * 130 + [5, 0, 2] + [0] * 60}
# One of each: tiles, warps, groups of rows, depth.
SCHEDULES = (Packed(1, 2, 1, 1), Packed(2, 1, 2, 3), Packed(1, 2, 2, 1))


def operands(counts: list[int], N: int, K: int, quantised: bool):
    """(x, its outer scales or None, weight, plan) with every code and scales of every size."""
    E, R = len(counts), sum(counts)

    def numbers(seed: int, *lead: int) -> nvfp4.Nvfp4:
        codes = inputs.integers(seed, 256, *lead, K // 2).to(torch.uint8)
        scales = inputs.integers(seed + 1, 0x7F, *lead, K // 16).to(torch.uint8)
        return nvfp4.Nvfp4(codes, scales, inputs.normal(seed + 2, *lead).abs() + 0.01)

    q = numbers(1, R)
    x, scale = (nvfp4.decode(q), q.outer) if quantised else (inputs.bf16(4, R, K), None)
    ids = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    return x, scale, numbers(5, E, N), dispatch.plan(ids[:, None], E)


def check(schedule, counts, N, K, quantised, out_dtype, text=None) -> None:
    x, scale, w, plan = operands(counts, N, K, quantised)
    got = emulated.product(schedule, x, scale, pack.pack(w), w.outer, plan.bounds_E1, out_dtype, text)
    want = quantised_linear.forward(x, scale, nvfp4.decode(w), w.outer, plan, out_dtype)
    assert_bits_equal(got, want, f"{schedule}")


@pytest.mark.parametrize(("schedule", "counts"), list(zip(SCHEDULES, itertools.cycle(COUNTS), strict=False)), ids=str)
def test_has_the_bits_of_the_spec(schedule, counts):
    for quantised, out_dtype in ((True, torch.float32), (False, torch.bfloat16)):
        check(schedule, COUNTS[counts], 40, 176, quantised, out_dtype)


# A fault in the text: what it replaces, and by what.
FAULTS = {
    "a step has other columns than the spec's": ("u * 128 + step * 32", "u * 128 + (step ^ 2) * 32"),
    "one scale for both rows": ("a[1] = mul2((word << 3) & (TRIPLE | SIGN), high)",
                                "a[1] = mul2((word << 3) & (TRIPLE | SIGN), low)"),
    "2^-19 left in": ("__fmul_rn(acc[i][j][c], 524288.0f)", "acc[i][j][c]"),
    "the outer scales one after the other": ("__fmul_rn(sum, factor)",
        "__fmul_rn(__fmul_rn(sum, row_factor[j][c & 1]), column_factor[i][c >> 1])"),
    "the tail of x not cleared": ("memset", None),
    "a group's rows from the expert's start": ("begin + place * ROWS_X", "begin"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault, monkeypatch):
    before, after = FAULTS[fault]
    text = cuda_host.source(emulated.SOURCE)
    if after is None:
        monkeypatch.setitem(emulated.CALLS, "st.shared.v4", ";")
    else:
        text = cuda_host.faulty(text, before, after)
    with pytest.raises(AssertionError, match="differ"):
        check(SCHEDULES[0], [0, 3, 0, 9, 17, 1], 40, 176, True, torch.float32, text)
