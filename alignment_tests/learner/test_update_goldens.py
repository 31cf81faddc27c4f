"""Whole updates have the committed hashes: on any CPU, and whatever vector unit torch picks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_tests.goldens import digest, updates

WANT = json.loads(updates.FILE.read_text())


@pytest.mark.parametrize("name", updates.CASES)
def test_known_answer(name):
    assert digest(updates.CASES[name]("cpu")) == WANT[name]


def test_every_answer_has_a_case():
    assert set(WANT) == set(updates.CASES)


def printed(**changes: str) -> dict[str, str]:
    command = [sys.executable, "-m", "alignment_tests.goldens.updates", "--print"]
    env = os.environ | changes
    run = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_same_bits_without_torchs_vector_units():
    """torch's own AdamW need not have them."""
    assert printed(ATEN_CPU_CAPABILITY="default") == WANT


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["haswell", "generic"])
def test_the_same_bits_on_older_cpus(cpu, tmp_path):
    assert printed(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path)) == WANT
