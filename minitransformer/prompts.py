r"""Prompts from a file: one a line.

A line that starts with `{` is JSON: {"prompt": "text"} or {"ids": [1, 2, 3]}. Any other line is the text itself, in
which `\n`, `\t` and `\\` mean a newline, a tab and a backslash (every other backslash stands for itself). Blank lines
are skipped. The file is UTF-8.
"""

import json
import os
import re
from pathlib import Path

from minitransformer.errors import InputError
from minitransformer.tokenizer import Tokenizer

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def read_prompts(
    path: str | os.PathLike, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> list[list[int]]:
    """Ids of every prompt in the file, in order. InputError names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; write one prompt a line") from None
    # Not splitlines(): a prompt may hold U+2028 and the like.
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1)]
    prompts = [_prompt(f"{path}:{i}", line, tokenizer, vocab_size) for i, line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path}: holds no prompt; write one a line")
    return prompts


def _prompt(where: str, line: str, tokenizer: Tokenizer | None, vocab_size: int | None) -> list[int]:
    content = _json(where, line) if line.startswith("{") else {"prompt": _unescape(line)}
    if content.keys() == {"prompt"} and isinstance(content["prompt"], str):
        if tokenizer is None:
            raise InputError(f'{where}: the checkpoint has no tokenizer.json; give ids, {{"ids": [1, 2, 3]}}')
        ids = tokenizer.encode(content["prompt"])
    elif content.keys() == {"ids"} and isinstance(content["ids"], list):
        ids = content["ids"]
    else:
        raise InputError(f'{where}: expected {{"prompt": "text"}} or {{"ids": [1, 2, 3]}}')
    if not ids:
        raise InputError(f"{where}: the prompt is empty; give at least one token")
    for i in ids:
        if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size):
            raise InputError(f"{where}: {i!r} is not an id of the vocabulary (0 to {(vocab_size or 2**31) - 1})")
    return ids


def _json(where: str, line: str) -> dict:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: starts with {{ but is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected one JSON object on the line")
    return content


def _unescape(line: str) -> str:
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match.group()], line)
