"""docs/learning_alignment.md runs: every block in order, in one session, and each prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "learning_alignment.md"
BLOCK = re.compile(r"```python\n((?:(?!```).)*)```(?:\n\n```text\n((?:(?!```).)*)```)?", re.DOTALL)


def test_every_block_prints_what_the_page_says():
    blocks, session = BLOCK.findall(PAGE.read_text(encoding="utf-8")), {}
    assert sum(bool(said) for _, said in blocks) == 11  # ten causes, and how to find the first
    for code, said in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), session)
        assert printed.getvalue() == said
