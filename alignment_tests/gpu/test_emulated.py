"""The kernels' own code, run on a CPU by the emulator, gives the reference's bits; faults in it are seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to interpret")

from alignment_tests.gpu import emulated_gradients, emulated_rows

MODULES = {module.__name__: module for module in (emulated_gradients, emulated_rows)}


def _run(*args: str) -> list[tuple[int, str]]:
    """(elements that differ, case) of each case; a process of its own, for the interpreter is chosen at import."""
    command = [sys.executable, "-m", *args]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_the_kernels_have_the_references_bits(module):
    found = _run(module)
    assert len(found) > 15
    assert [case for wrong, case in found if wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize(("module", "mutation"), [(name, m) for name, one in MODULES.items() for m in one.MUTATIONS])
def test_a_fault_in_a_kernel_is_seen(module, mutation):
    assert any(wrong for wrong, _ in _run(module, mutation))
