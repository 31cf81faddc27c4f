"""`make bench` runs every benchmark that needs no arguments, and ends well on a machine without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
WITH_ARGUMENTS = {"perplexity", "sglang_speed", "sglang_sync"}
OF_THE_PAGES = {"page", "page_tables", "plot", "tables"}
ON_A_CPU = {"chain", "compare_quantisers"}


def named() -> set[str]:
    found = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return set(found[1].split())


def test_every_benchmark_is_run_or_needs_arguments():
    assert named() | WITH_ARGUMENTS | OF_THE_PAGES == {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert not named() & (WITH_ARGUMENTS | OF_THE_PAGES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: they would run")
def test_without_a_gpu_they_say_so():
    pytest.importorskip("triton")
    commands = {name: [sys.executable, f"benchmarks/{name}.py"] for name in sorted(named() - ON_A_CPU)}
    running = {name: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for name, command in commands.items()}  # fmt: skip
    said = {name: process.communicate(timeout=300) + (process.returncode,) for name, process in running.items()}
    assert said == {name: ("no CUDA device: nothing measured\n", "", 0) for name in commands}
