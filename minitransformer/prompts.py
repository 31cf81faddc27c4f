r"""Prompts from a file: one a line.

A line that starts with `{` is JSON: {"prompt": "text"} or {"ids": [1, 2, 3]}. Any other line is the text itself, in
which `\n`, `\t` and `\\` mean a newline, a tab and a backslash (every other backslash stands for itself). Blank lines
are skipped. The file is UTF-8, with or without a byte-order mark.
"""

import os
import re

from minitransformer.errors import InputError
from minitransformer.files import parse_json, read_text, shown
from minitransformer.tokenizer import Tokenizer

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def read_prompts(
    path: str | os.PathLike, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> list[list[int]]:
    """Ids of every prompt in the file, in order. InputError names the file and the line."""
    return [ids for _, ids in read_numbered_prompts(path, tokenizer, vocab_size)]


def read_numbered_prompts(
    path: str | os.PathLike, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> list[tuple[int, list[int]]]:
    """(line number from 1, ids) of every prompt in the file, in order. InputError names the file and the line."""
    text = read_text(path, "write one prompt a line")
    # Not splitlines(): a prompt may hold U+2028 and the like.
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1)]
    prompts = [(i, _prompt(f"{path}:{i}", line, tokenizer, vocab_size)) for i, line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path}: holds no prompt; write one a line")
    return prompts


def _prompt(where: str, line: str, tokenizer: Tokenizer | None, vocab_size: int | None) -> list[int]:
    content = _json(where, line) if line.startswith("{") else {"prompt": _unescape(line)}
    if content.keys() == {"prompt"} and isinstance(content["prompt"], str):
        if tokenizer is None:
            raise InputError(f'{where}: the checkpoint has no tokenizer.json; give ids, {{"ids": [1, 2, 3]}}')
        ids = tokenizer.encode(content["prompt"], where=where)
    elif content.keys() == {"ids"} and isinstance(content["ids"], list):
        ids = content["ids"]
    else:
        raise InputError(f'{where}: expected {{"prompt": "text"}} or {{"ids": [1, 2, 3]}}')
    if not ids:
        raise InputError(f"{where}: the prompt is empty; give at least one token")
    for i in ids:
        if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size):
            raise InputError(f"{where}: {shown(i)} is not an id of the vocabulary (0 to {(vocab_size or 2**31) - 1})")
    return ids


def _json(where: str, line: str) -> dict:
    content = parse_json(where, line, "; a line that starts with { is read as JSON")
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected one JSON object on the line")
    return content


def _unescape(line: str) -> str:
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match.group()], line)
