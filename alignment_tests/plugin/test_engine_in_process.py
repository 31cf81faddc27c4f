"""`learner.sync(engine)` with an sglang.Engine object, on the CPU; in_process.py runs there."""

import json
import subprocess
import sys

import pytest

from minitransformer.models.qwen3_moe.nvfp4_layout import MODELOPT
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang.launch import environment
from minitransformer.recipe import get

pytestmark, RECIPE = pytest.mark.sglang, "nvfp4_per_token"


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "alignment_tests.plugin.in_process", *map(str, arguments)]
    done = subprocess.run(command, env=environment(cpu=True), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("all held\n"), done.stdout[-1000:] + done.stderr[-4000:]


def test_an_engine_of_the_same_process(checkpoint):
    run(checkpoint)


@pytest.mark.slow  # another engine
def test_one_with_packed_experts(checkpoint, tmp_path):
    quantise(checkpoint, tmp_path / "packed", get(RECIPE), MODELOPT)
    run(tmp_path / "packed", RECIPE)


@pytest.mark.slow  # another engine
def test_updates_and_syncs_as_on_an_h200(tmp_path):
    """The command."""
    command = [sys.executable, "-m", "alignment_tests.plugin.h200"]
    subprocess.run([*command, "make", tmp_path, "tiny.bare", "--cpu"], check=True)
    rows = tmp_path / "rows.jsonl"
    more = ["--cpu", "--tokens", "4096", "--batches", "8", "--routes", "default", "--json", rows]
    subprocess.run([*command, "engine", tmp_path, "tiny-bf16-bare", *more], check=True, timeout=600)
    first, other, equal, *counts = map(json.loads, rows.read_text().splitlines())
    assert first["moved"] and other["moved"] and not equal["moved"]
    assert {(row["learner_differing"], row["decode_differing"]) for row in (first, other, equal)} == {(0, 0)}
    names = "prefills_from_graphs", "decode_steps_from_graphs"  # there are none on a CPU
    assert [{name: row[name] for name in names if name in row} for row in counts] == [{name: 0} for name in names]
