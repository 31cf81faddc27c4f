"""Log-probs of given tokens, from the learner, one JSON object a line.

Each line of the input is one of
  {"prompt": "text", "completion": "text"}      scores the completion
  {"prompt_ids": [..], "token_ids": [..]}       the same in ids; what `generate --json` writes
  {"text": "text"} or {"ids": [..]}             scores all but the first token, which nothing predicts
{"ids", "prompt_len"}, as this command writes them, scores the tokens after the prompt. Other keys than those of
`generate` and `score` are refused.
Each line of the output has the ids, the prompt's length, and one log-prob in nats for each token after the prompt.

Example:
  echo '{"prompt": "The sky is", "completion": " blue."}' > lines.jsonl
  minitransformer score --model demo/checkpoint --input lines.jsonl
"""

import argparse
from dataclasses import fields
from typing import Any

from minitransformer.commands import common, prompt_lines
from minitransformer.errors import InputError
from minitransformer.files import parse_json, read_text, shown, tell

EXPECTED = 'expected {"prompt", "completion"}, {"prompt_ids", "token_ids"}, {"text"} or {"ids"}'
# The keys of a form -> those that may stand beside them: what `score` writes, so that its lines can be scored again.
# Of these only prompt_len is used. The first form takes a completion's other keys, which `generate` writes.
FORMS: dict[tuple[str, ...], set[str]] = {
    ("prompt_ids", "token_ids"): set(),
    ("prompt", "completion"): set(),
    ("ids",): {"prompt_len", "log_probs", "sum", "unverified"},
    ("text",): set(),
}
TEMPERATURE = "divides the logits: 1e-6 to 1e6; 0 divides by 1, as greedy sampling does (default 1)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    common.add_device(command)
    command.add_argument("--input", required=True, type=common.path, metavar="FILE", help="JSON lines, see above")
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help=TEMPERATURE)
    what = "write the lines here instead of to the screen"
    command.add_argument("--json", type=common.file, metavar="FILE", help=what)


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.input, args.model])
    from minitransformer.sampler.sequence import SamplingParams

    SamplingParams(temperature=args.temperature)  # the same bounds as when sampling, told before a model is loaded
    model = common.load_model(args)
    sequences, prompt_lens, numbers = read_sequences(args.input, model, args.temperature)
    from minitransformer.learner.learner import Learner

    with common.progress() as show, prompt_lines.naming_prompts(args.input, numbers):
        show("scoring")
        longest = max(map(len, sequences))
        scores = Learner(model, max_tokens_per_pack=max(1024, longest)).score(sequences, prompt_lens, args.temperature)
    why = common.unverified(model.device)
    lines = common.json_lines(
        common.marked({"ids": ids, "prompt_len": n, "log_probs": s.tolist(), "sum": sum(s.tolist())}, why)
        for ids, n, s in zip(sequences, prompt_lens, scores, strict=True)
    )
    if args.json is None:
        print(lines, end="")
    else:
        common.write_text(args.json, lines)
    return 0


def read_sequences(path: str, model: Any, temperature: float) -> tuple[list[list[int]], list[int], list[int]]:
    """Ids of each line of a JSON-lines file, how many of them are prompt, and its number. InputError names the line.

    A warning on stderr if lines of `generate` were sampled at another temperature: their log-probs will not be these.
    """
    lines = read_text(path, f"{EXPECTED} on each line").split("\n")
    numbers = [i for i, line in enumerate(lines, 1) if line.strip()]
    items = [parse_json(f"{path}:{i}", lines[i - 1]) for i in numbers]
    parsed = [_sequence(f"{path}:{i}", item, model) for i, item in zip(numbers, items, strict=True)]
    if not parsed:
        raise InputError(f"{path}: holds no line; {EXPECTED} on each line")
    _warn_of_other_temperatures(path, items, numbers, temperature)
    return [prompt + rest for prompt, rest in parsed], [len(prompt) for prompt, _ in parsed], numbers


def _warn_of_other_temperatures(path: str, items: list[dict], numbers: list[int], temperature: float) -> None:
    from minitransformer.sampler.sequence import SamplingParams

    wanted = SamplingParams(temperature=temperature).log_prob_of.split(",")[0]
    said = [(i, str(item["log_prob_of"])) for i, item in zip(numbers, items, strict=True) if "log_prob_of" in item]
    other = [(i, what.split(",")[0]) for i, what in said if what.split(",")[0] != wanted]
    if other:
        line, what = other[0]
        what = f"{path}:{line}: its log-probs are of the {shown(what)}, --temperature {temperature:g} gives others"
        more = f" ({len(other)} such lines)" if len(other) > 1 else ""
        tell(f"warning: {what}{more}")


def _sequence(where: str, item: Any, model: Any) -> tuple[list[int], list[int]]:
    from minitransformer.sampler.sequence import Completion

    form = next((form for form in FORMS if isinstance(item, dict) and item.keys() >= set(form)), None)
    if form is None:
        raise InputError(f"{where}: {EXPECTED}")
    # A key that is not looked at may be a misspelt one that was meant to be.
    written = {field.name for field in fields(Completion)} | {"unverified"}  # by `generate`
    beside = written if "token_ids" in form else FORMS[form]
    unknown = item.keys() - set(form) - beside
    if unknown:
        raise InputError(f"{where}: {shown(min(unknown))} is not known beside {' and '.join(form)}; remove it")
    if item.get("error") is not None:
        what = shown(item["error"])
        raise InputError(f"{where}: this request failed when it was generated ({what}); remove the line")
    parts = [_ids(where, key, item[key], model) for key in form]
    if len(parts) == 1:
        n = item.get("prompt_len", 1)
        if type(n) is not int or not 1 <= n:
            raise InputError(f"{where}: prompt_len = {shown(n)} must be an integer of at least 1")
        parts = [parts[0][:n], parts[0][n:]]
    prompt, rest = parts
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
    return model.tokenizer.encode(value, where=f"{where}: {key}")
