"""The row-wise operators' known answers, natively and compiled for CPUs without AVX-512 and without FMA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_tests.goldens import digest, row_ops

WANT = json.loads(row_ops.FILE.read_text())


@pytest.mark.parametrize("name", row_ops.CASES)
def test_known_answer(name):
    assert digest(row_ops.CASES[name]("cpu")) == WANT[name]


def test_every_answer_has_a_case():
    assert set(WANT) == set(row_ops.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["haswell", "generic"])
def test_the_same_bits_on_older_cpus(cpu, tmp_path):
    env = dict(os.environ, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "alignment_tests.goldens.row_ops", "--print"]
    run = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == WANT
