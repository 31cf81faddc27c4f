"""Machine code of the 4-bit kernels in CUDA C++, compiled for sm_90a without a GPU: the spec's arithmetic alone."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from alignment_tests.gpu.test_compiles import sass
from minitransformer.ops.gpu import few_experts, many_rows, nvfp4, quantised_linear, quantised_rows


@pytest.mark.parametrize("schedule", quantised_linear.PACKED_CANDIDATES, ids=str)
def test_the_packed_product_compiles_to_the_arithmetic_of_the_spec(schedule, tmp_path):
    """Machine code: the tensor core, exact BF16 products, FP32 multiplications of the epilogue, and no other floats."""
    for exact in (False, True):
        text = sass(quantised_linear.SOURCE, schedule.defines(exact, fp32=not exact), tmp_path)
        found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|SETP|SET)2?\b[.\w]*)", text))
        names = {name.split(".")[0] for name in found}
        # HFMA2 is a product too: the compiler spreads them over two pipes, adding -0.
        assert {"HMMA", "HMUL2", "FMUL"} <= names <= {"HMMA", "HMUL2", "HFMA2", "FMUL", "FSETP"}, found
        assert not any("FTZ" in name for name in found)
        assert "HMMA.16816.F32.BF16" in found
        assert text.count("STL") <= 8, "spills"  # values that only the epilogue needs


@pytest.mark.parametrize("schedule", many_rows.CANDIDATES, ids=str)
@pytest.mark.parametrize("out", [many_rows.FP32, many_rows.BF16, many_rows.SWIGLU])
def test_the_packed_product_of_many_rows_stays_ahead_of_itself(schedule, out, tmp_path):
    """Machine code: exact BF16 products between those of the tensor core, of which three are under way at a time."""
    for exact in (False, True):
        text = sass(many_rows.SOURCE, schedule.defines(exact, out), tmp_path)
        found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|SETP|SET)2?\b[.\w]*)", text))
        swiglu = {"FADD", "FFMA"} if out == many_rows.SWIGLU else set()
        assert {name.split(".")[0] for name in found} <= {"HMUL2", "HFMA2", "FMUL", "FSETP"} | swiglu, found
        widths = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", text)
        assert text.count("HGMMA.") == len(widths) == 4 * len(set(widths))
        assert max(map(int, widths)) == schedule.rows
        # A wait for all but two behind each: the assembler waits for all where it finds no registers.
        assert text.count("WARPGROUP.DEPBAR.LE gsb0, 0x2") == len(widths)
        assert "STL" not in text, "spills"
        assert schedule.shared(out) <= 227 << 10


@pytest.mark.parametrize("T", range(1, few_experts.MOST + 1))
def test_the_experts_of_few_tokens_compile_to_the_arithmetic_of_the_spec(T, tmp_path):
    text = sass(few_experts.SOURCE, few_experts.defines(T, 8, 2048, 768, 128), tmp_path)
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    names = {name.split(".")[0] for name in found}
    assert {"HMMA", "HMUL2", "FFMA"} <= names, found
    assert names <= {"HMMA", "HMUL2", "HFMA2", "FMUL", "FADD", "FFMA", "FMNMX", "FSETP"}, found
    assert "HMMA.16816.F32.BF16" in found
    assert "STL" not in text, "spills"
    # Where blocks meet: numbers that are written and read past the first cache, each for itself.
    assert re.search(r"STG\.E\.U16\.STRONG\.GPU.*LDG\.E\.128\.STRONG\.GPU", text, re.S)


FORMS = ((torch.bfloat16, False, 4), (torch.bfloat16, True, 1), (torch.float32, True, 4))  # dtype, decode, steps
QUANTISERS = [nvfp4.defines(K, *form) for K in (576, 768, 2048) for form in FORMS]
QUANTISERS += [quantised_rows.defines(K, *how) for K in (576, 768, 2048, 8192)
               for how in itertools.product(range(3), (True, False))]  # fmt: skip


@pytest.mark.parametrize("defines", QUANTISERS, ids=str)
def test_the_nvfp4_quantiser_compiles_to_the_arithmetic_of_the_spec(defines, tmp_path):
    """Machine code. FFMA beside the ramps: divisions (FFMA.FTZ on scaled operands among them), codes, exp2_32."""
    text = sass(nvfp4.SOURCE, defines, tmp_path)
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    assert {"FFMA", "FFMA.SAT", "FMUL", "FADD"} <= found
    names = {name.split(".")[0] for name in found}
    assert names <= {"FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "HMUL2", "HFMA2"}, found
    assert "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C" in text
    assert text.count("STL") <= 6, "spills"  # addresses, over a division's slow path


@pytest.mark.parametrize(("K", "rows"), [(K, R) for K in (64, 96, 576, 768, 2048, 8192) for R in (1, 512, 1 << 13)])
def test_the_chosen_packed_schedules_are_candidates(K, rows):
    schedule = quantised_linear.choose_packed(rows, 128, K)
    assert schedule in quantised_linear.PACKED_CANDIDATES and schedule.fits(K)
    assert quantised_linear.choose_packed(rows, 128, 1 << 14) is None
