"""The norms' gradients in CUDA C++ compile for sm_90a on any machine, to the arithmetic of the spec."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from alignment_tests.gpu.test_compiles import sass
from minitransformer.ops.gpu import rms_norm

LANES = [rms_norm.lanes_defines(D, residual) for D in (15, 128, 2048) for residual in (False, True)]


def test_a_norms_schedules_are_powers_of_two_for_every_width():
    """tl.arange takes no other number."""
    for D in range(1, 8193):
        numbers = [rms_norm.rows_of(T, D) for T in (1, 1 << 14)]
        assert all(n > 0 and n & (n - 1) == 0 for n in numbers), (D, numbers)


@pytest.mark.parametrize("D", [D for D in range(1, 300) if rms_norm.short(D)])
def test_the_short_norms_gradient_compiles_to_the_arithmetic_of_the_spec(D, tmp_path):
    """FFMA and FADD.FTZ on scaled operands belong to the division and the root."""
    text = sass(rms_norm.SHORT_SOURCE, (("D", D),), tmp_path)
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    names = {name.split(".")[0] for name in found}
    assert {"FMUL", "FADD"} <= names <= {"FMUL", "FADD", "FFMA", "FSETP", "HFMA2"}, found
    assert "F2FP.BF16.F32.PACK_AB" in text and "STL" not in text, "spills"


@pytest.mark.parametrize("defines", LANES, ids=str)
def test_the_norms_lanes_compile_to_the_arithmetic_of_the_spec(defines, tmp_path):
    text = sass(rms_norm.LANES_SOURCE, defines, tmp_path)
    found = set(re.findall(r"\b([HFD](?:MMA|MUL|ADD|FMA|MNMX|SETP|SET)2?\b[.\w]*)", text))
    assert {"FMUL", "FADD"} <= found <= {"FMUL", "FADD", "HFMA2.MMA"}, found  # the last moves constants
    assert "STL" not in text, "spills"
