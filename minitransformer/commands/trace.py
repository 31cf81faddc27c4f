"""Write a trace: the named tensors of a run, one safetensors file.

With --prompts the sampler generates and is traced; with --input (lines as `score` reads them, or as `generate --json`
wrote them) the learner scores and is traced; of the options below it then uses only --temperature. Rows are named by
request and position, so `compare` can put the two side by side.
Exit status 0 if the trace is whole; 1 if requests of --prompts failed, because their values are not finite: the file
then has the others, the rows of a failed one up to the step that failed, and stderr names it. 1 too if a row that was
computed again has other bits; then nothing is written. 2 for bad input.

Example:
  minitransformer generate --model demo/checkpoint --prompts examples/prompts.txt --json completions.jsonl
  minitransformer trace --model demo/checkpoint --prompts examples/prompts.txt --out sampler.safetensors
  minitransformer trace --model demo/checkpoint --input completions.jsonl --out learner.safetensors
"""

import argparse
import sys
from typing import Any

from minitransformer.commands import common, prompt_lines
from minitransformer.commands.score import read_sequences
from minitransformer.errors import InputError
from minitransformer.files import is_replaceable, tell


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    common.add_device(command)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=common.path, metavar="FILE", help="trace the sampler on these prompts")
    source.add_argument("--input", type=common.path, metavar="FILE", help="trace the learner on these (JSON lines)")
    command.add_argument("--out", required=True, type=common.file, metavar="FILE", help="the safetensors file to write")
    common.add_stages(command)
    options = common.add_sampling(command) + common.add_sampler(command)
    # Defaults are filled in by `run`: it has to tell what was given, because --input has no use for most of them.
    command.set_defaults(sampling_defaults={option.dest: option.default for option in options})
    for option in options:
        option.default = argparse.SUPPRESS


def run(args: argparse.Namespace) -> int:
    common.check_output(args.out, [args.prompts or args.input, args.model])
    _fill_in(args)
    common.sampling_params(args, 1)
    model = common.load_model(args)
    common.check_stages(args.stages, model)
    from minitransformer.alignment.trace import Trace

    trace = Trace(args.stages, strict=False, spec=model.spec.entries())
    trace.unverified = common.unverified(model.device)
    with common.progress() as show:
        completions, lines = (_sample if args.prompts else _score)(args, model, trace, show)
    wrong = [r.stage for r in trace.conflicts({c.request_id for c in completions if c.error is None}) if not r.equal]
    if wrong:
        what = f"stage {wrong[0]}: rows that the sampler computed again have other bits; no trace is written"
        tell(f"error: {what}")
        return 1
    if not trace.stages:
        raise InputError("no stage was traced; widen --stages")
    trace.save(args.out)
    size = sum(trace.rows(stage).nbytes for stage in trace.stages) / 2**20
    requests, rows = len(trace.requests), len(trace.keys)
    # Standard output is the trace's own if the trace goes there.
    where = sys.stdout if is_replaceable(args.out) else sys.stderr
    print(f"{args.out}: {len(trace.stages)} stages, {rows} rows of {requests} requests, {size:.1f} MiB", file=where)
    if trace.unverified:
        print(f"UNVERIFIED: {trace.unverified}", file=where)
    return int(prompt_lines.report_failed(args.prompts, lines, completions))


def _fill_in(args: argparse.Namespace) -> None:
    defaults = args.sampling_defaults
    given = [name for name in defaults if hasattr(args, name) and name != "temperature"]
    if args.input and given:
        raise InputError(
            f"--{given[0].replace('_', '-')} is for --prompts; with --input nothing is sampled, so leave it out"
        )
    for name, default in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, default)


def _sample(args: argparse.Namespace, model: Any, trace: Any, show: Any) -> tuple[list[Any], list[int]]:
    """The completions, and the line of each one's prompt."""
    from minitransformer.sampler.sampler import Sampler
    from minitransformer.sampler.sequence import RequestError

    prompts, lines = common.read_prompt_ids(args, model)
    params = common.sampling_params(args, len(prompts))
    show("sampling", args.max_new_tokens * len(prompts))
    sampler = Sampler(model, **common.sampler_options(args))
    with prompt_lines.naming_prompts(args.prompts, lines):
        try:
            completions = sampler.generate(prompts, params, trace=trace, on_token=lambda token: show.advance())
        except RequestError as error:
            completions = error.completions
    for c in completions:
        trace.requests[c.request_id] = {"prompt_ids": c.prompt_ids, "token_ids": c.token_ids}
    return completions, lines


def _score(args: argparse.Namespace, model: Any, trace: Any, show: Any) -> tuple[list[Any], list[int]]:
    from minitransformer.learner.learner import Learner

    sequences, prompt_lens, numbers = read_sequences(args.input, model, args.temperature)
    show("scoring")
    learner = Learner(model, max_tokens_per_pack=max(1024, max(map(len, sequences))))
    with prompt_lines.naming_prompts(args.input, numbers):
        learner.score(sequences, prompt_lens, args.temperature, trace=trace)
    for request, (ids, n) in enumerate(zip(sequences, prompt_lens, strict=True)):
        trace.requests[request] = {"prompt_ids": ids[:n], "token_ids": ids[n:]}
    return [], []
