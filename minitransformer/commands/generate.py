"""Sample completions of prompts.

A request's tokens depend on its prompt, its seed and the weights, not on the batch, the chunks or the pages. Log-probs
are of the softmax over the whole vocabulary at the temperature, whatever --top-k and --top-p are.
Exit status 0 if every request was finished; 1 if some failed, because their activations or logits are not finite: the
others are printed and written all the same, a failed one with what it had, and stderr names each; 2 for bad input.

Example:
  minitransformer generate --model demo/checkpoint --prompts examples/prompts.txt --json completions.jsonl
"""

import argparse
from typing import TYPE_CHECKING, Any

from minitransformer.commands import common, prompt_lines

if TYPE_CHECKING:
    from minitransformer.sampler.sequence import Completion

SOME_FAILED = 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    common.add_device(command)
    what = "one a line: text, or JSON with prompt or ids"
    command.add_argument("--prompts", required=True, type=common.path, metavar="FILE", help=what)
    common.add_sampling(command)
    common.add_sampler(command)
    common.add_json(command, "ids and log-probs, one JSON object a request and line; `score` and `trace` read them")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.prompts, args.model])
    common.sampling_params(args, 1)
    model = common.load_model(args)
    prompts, lines = common.read_prompt_ids(args, model)
    from minitransformer.sampler.sampler import Sampler
    from minitransformer.sampler.sequence import RequestError

    with common.progress() as show, prompt_lines.naming_prompts(args.prompts, lines):
        show("sampling", args.max_new_tokens * len(prompts))
        try:
            completions = Sampler(model, **common.sampler_options(args)).generate(
                prompts, common.sampling_params(args, len(prompts)), on_token=lambda token: show.advance()
            )
        except RequestError as error:
            completions = error.completions
    why = common.unverified(model.device)
    lines_of = (common.marked(common.completion_dict(completion), why) for completion in completions)
    common.report(args.json, common.json_lines(lines_of), lambda: _print(model, completions, why))
    return SOME_FAILED if prompt_lines.report_failed(args.prompts, lines, completions) else 0


def _print(model: Any, completions: "list[Completion]", why: str | None) -> None:
    console = common.console()
    if why:
        console.print(f"UNVERIFIED: {why}", markup=False, soft_wrap=True)
    for completion in completions:
        log_prob = sum(completion.log_probs)
        console.print(
            f"[{completion.request_id}] {common.one_line(completion.prompt_ids, model)}  "
            f"({len(completion.token_ids)} tokens, {completion.finish_reason}, log-prob {log_prob:.4f})",
            style="bold", markup=False, soft_wrap=True,
        )  # fmt: skip
        text = completion.text if completion.text is not None else " ".join(map(str, completion.token_ids))
        console.print(text, markup=False, soft_wrap=True)
