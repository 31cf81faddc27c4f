"""Log-probs of given tokens, from the learner, one JSON object a line.

Each line of the input is one of
  {"prompt": "text", "completion": "text"}      scores the completion
  {"prompt_ids": [..], "token_ids": [..]}       the same in ids; what `generate --json` writes
  {"text": "text"} or {"ids": [..]}             scores all but the first token, which nothing predicts
Each line of the output has the ids, the prompt's length, and one log-prob in nats for each token after the prompt.

Example:
  echo '{"prompt": "The sky is", "completion": " blue."}' > lines.jsonl
  minitransformer score --model demo/checkpoint --input lines.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

from minitransformer.commands import common
from minitransformer.errors import InputError

FORMS = 'expected {"prompt", "completion"}, {"prompt_ids", "token_ids"}, {"text"} or {"ids"}'


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    command.add_argument("--input", required=True, metavar="FILE", help="JSON lines, see above")
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (default 1)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the lines here instead of to the screen")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json)
    model = common.load_model(args)
    sequences, prompt_lens = read_sequences(args.input, model)
    from minitransformer.learner.learner import Learner

    with common.progress() as show:
        show("scoring")
        longest = max(map(len, sequences))
        scores = Learner(model, max_tokens_per_pack=max(1024, longest)).score(sequences, prompt_lens, args.temperature)
    lines = common.json_lines(
        {"ids": ids, "prompt_len": n, "log_probs": s.tolist(), "sum": sum(s.tolist())}
        for ids, n, s in zip(sequences, prompt_lens, scores, strict=True)
    )
    if args.json is None:
        print(lines, end="")
    else:
        common.write_text(args.json, lines)
    return 0


def read_sequences(path: str, model: Any) -> tuple[list[list[int]], list[int]]:
    """Ids of each line of a JSON-lines file, and how many of them are prompt. InputError names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; {FORMS} on each line") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    parsed = [_sequence(f"{path}:{i}", line, model) for i, line in enumerate(lines, 1) if line.strip()]
    if not parsed:
        raise InputError(f"{path}: holds no line; {FORMS} on each line")
    return [prompt + rest for prompt, rest in parsed], [len(prompt) for prompt, _ in parsed]


def _sequence(where: str, line: str, model: Any) -> tuple[list[int], list[int]]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    if not isinstance(item, dict):
        raise InputError(f"{where}: {FORMS}")
    for first, second in (("prompt_ids", "token_ids"), ("prompt", "completion")):
        if first in item and second in item:
            prompt, rest = (_ids(where, key, item[key], model) for key in (first, second))
            break
    else:
        key = next((key for key in ("ids", "text") if key in item), None)
        if key is None:
            raise InputError(f"{where}: {FORMS}")
        ids = _ids(where, key, item[key], model)
        prompt, rest = ids[:1], ids[1:]
    if not prompt or not rest:
        raise InputError(f"{where}: {len(prompt + rest)} tokens; a prompt and a token to score are needed")
    return prompt, rest


def _ids(where: str, key: str, value: Any, model: Any) -> list[int]:
    if key.endswith("ids"):
        size = model.config.vocab_size
        if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < size for i in value):
            raise InputError(f"{where}: {key} must be a list of ids from 0 to {size - 1}")
        return value
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} must be a text")
    if model.tokenizer is None:
        raise InputError(f"{where}: the checkpoint has no tokenizer.json; give ids instead of {key}")
    return model.tokenizer.encode(value)
