"""The CUDA C++ of the NVFP4 quantiser on a CPU: the bits of nvfp4/1 and its producers, and faults in its text seen."""

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the modules of the kernels do not import")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_quantise as emulated
from alignment_tests.gpu.test_quantised_agrees import KINDS, both_types
from minitransformer.ops import dispatch, nvfp4, swiglu
from minitransformer.ops.gpu import nvfp4 as nvfp4_kernels

NONE = 2**31 - 1


def check(K: int, rows: int, text=None) -> None:
    """Every kind of value, BF16 and FP32, an outer scale a row and one for all, with and without the operand."""
    for kind in KINDS:
        for x in both_types(KINDS[kind](1, rows, K)):
            for group, steps, decode in ((1, 1, True), (1, 2, False), (rows, 1, False)):
                amax = nvfp4.row_amax(x) if group == 1 else nvfp4.row_amax(x).max()[None]
                got = emulated.quantize(x, amax, group, steps, decode, text=text)
                want = nvfp4.quantize(x, amax if group == 1 else amax[0])
                wanted = [want.codes, want.scales, want.outer.reshape(-1), *([nvfp4.decode(want)] if decode else [])]
                for a, b in zip(got, wanted, strict=False):
                    assert_bits_equal(a, b, f"{kind} {x.dtype}")
                assert got[-1].tolist() == [NONE, NONE]


# Rows longer and shorter than a block of threads, an odd number of blocks in all.
@pytest.mark.parametrize(("K", "rows"), [(16, 301), (48, 11), (2064, 3)])
def test_has_the_bits_of_the_spec(K, rows):
    check(K, rows)


def producers(T: int, K: int, kind: str):
    """(name, input, its plan, what is quantised, its row maxima) of both producers."""
    plan, x = dispatch.plan(inputs.integers(13, 8, T, 4), 8), KINDS[kind](14, T, K)
    wide = KINDS[kind](15, 4 * T, 2 * K).float() * 1.0009765625
    wide = torch.where(wide.abs() < 1e15, wide, 1.0)  # the product of gate and up is finite
    return [(True, x, plan, *dispatch.gather_amax_forward(x, plan)), (False, wide, plan, *swiglu.forward_amax(wide))]


@pytest.mark.parametrize("K", [16, 96, 592])
def test_producers_have_the_bits_of_the_spec(K):
    for kind in KINDS:
        for gather, x, plan, y, amax in producers(3, K, kind):
            want = nvfp4.quantize(y, amax)
            got = emulated.produce(x, plan, K, gather)
            wanted = [y, want.codes, want.scales, want.outer, nvfp4.decode(want)]
            for a, b in zip(got, wanted, strict=False):
                assert_bits_equal(a, b, f"{kind} {gather}")
            assert got[-1].tolist() == [NONE, NONE]
            outer, decoded = emulated.produce(x, plan, K, gather, keep=False)[3:5]
            assert_bits_equal(outer, want.outer, f"{kind} {gather} alone")
            assert_bits_equal(decoded, nvfp4.decode(want), f"{kind} {gather} alone")


def test_bad_values_name_their_token():
    plan, x = dispatch.plan(inputs.integers(3, 8, 6, 2), 8), inputs.bf16(4, 6, 64)
    rows = x[plan.order_R // 2].clone()
    assert emulated.quantize(rows, torch.full((12,), 1e-3), 1, 1, False)[-1].tolist() == [NONE, 0]
    amax = nvfp4.row_amax(rows)
    rows[7, 3], rows[9, 1] = torch.inf, torch.nan
    assert emulated.quantize(rows, amax, 1, 1, False)[-1].tolist() == [7, NONE]
    named = min(int(plan.order_R[r]) // 2 for r in (7, 9))
    assert emulated.quantize(rows, amax, 1, 1, False, plan)[-1].tolist() == [named, NONE]
    amax[5] = torch.nan
    assert emulated.quantize(rows, amax, 1, 1, False)[-1].tolist() == [7, 5]
    x[named, 2] = torch.nan
    assert emulated.produce(x, plan, 64, True)[-1].tolist() == [named, NONE]


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
def test_every_float_around_a_tie_has_its_code(tie):
    u = int(torch.tensor(tie).view(torch.int32))
    assert emulated.wrong_codes(u - 4096, u + 4096) == 0


@pytest.mark.slow  # two minutes
def test_every_float_has_its_code():
    """All 2,139,095,041 magnitudes up to infinity, in each of a sum's four places."""
    assert emulated.wrong_codes(0, 0x7F800001) == 0


# A fault in the text: what it replaces, and by what.
FAULTS = {
    "ties away from the even code": ("float sum = MAGIC", "float sum = MAGIC + 1.0f"),
    "a piece that begins too early": ("ramp(y, -2.0f)", "ramp(y, -1.9999999f)"),
    "signs of neighbours exchanged": ("(even & 0x08080808) | (odd & 0x80808080)",
                                      "((even << 4) & 0x80808080) | ((odd >> 4) & 0x08080808)"),
    "a scale above the largest": ("fminf(__fmul_rn(top, row.encode), MOST)", "__fmul_rn(top, row.encode) * 1.01f"),
    "the block's scale without its clamp": ("fminf(__frcp_rn(__fmul_rn(scale, row.decode)), MOST)",
                                            "__frcp_rn(__fmul_rn(scale, row.decode))"),
    "a row of zeros": ("amax == 0.0f || ", ""),
    "the first row's scale for all": ("b < blocks ? row - first_row : 0", "0"),
    "halves of decoded blocks not exchanged": ("odd ? d[i] : d[4 + i]", "d[i]"),
}  # fmt: skip


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(cuda_host.source(nvfp4_kernels.SOURCE), *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(48, 11, text)
