"""Sample, score the same tokens with the learner, and compare every stage of every layer on bits.

The sampler generates with pages, chunked prefill, continuous batching and a prefix cache; the learner scores the same
tokens in one packed pass. Beside it, as a contrast, transformers scores them in BF16 (if it is installed).
With --sampler an SGLang server samples, and what it says of its tokens is compared (docs/sglang.md).
A request whose activations are not finite fails alone: the others are compared, and stderr names it.
Exit status 0 only if nothing differs and no request failed, else 1; 2 for bad input, or if every request failed.

Example:
  minitransformer align --model demo/checkpoint --prompts examples/prompts.txt --max-new-tokens 32 --seed 7
  minitransformer align --model demo/checkpoint --prompts examples/prompts.txt --device cuda --learner-device cpu
  minitransformer align --model demo/checkpoint --prompts examples/prompts.txt --sampler sglang
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minitransformer.commands import align_sglang, common, prompt_lines

if TYPE_CHECKING:
    from rich.console import Console

    from minitransformer.alignment.align import Alignment

SHOWN_COMPLETIONS = 4
PARTS = {"sampler": "sampling", "learner": "scoring with the learner", "transformers": "scoring with transformers"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    common.add_device(command)
    command.add_argument(
        "--learner-device", metavar="DEVICE", help="another device for the learner (default: the sampler's, --device)"
    )
    what = "one a line: text, or JSON with prompt or ids"
    command.add_argument("--prompts", required=True, type=common.path, metavar="FILE", help=what)
    common.add_sampling(command)
    # Small steps: prompts are cut into chunks beside decoding requests, and find the pages of earlier prompts.
    options = common.add_sampler(command, chunk_size=32, max_batch_tokens=32)
    command.set_defaults(own_options=[(o.option_strings[0], o.dest, o.default) for o in options])
    align_sglang.add_arguments(command)
    command.add_argument("--no-contrast", action="store_true", help="leave transformers out")
    command.add_argument("--full", action="store_true", help="print every layer's stages, not only those that differ")
    common.add_stages(command)
    common.add_json(command, "everything as JSON")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.prompts, args.model])
    common.sampling_params(args, 1)  # a bad parameter is told before a model is loaded
    learner_device = None if args.learner_device is None else common.device(args.learner_device, args)
    if args.sampler is not None:
        return align_sglang.run(args, learner_device)
    align_sglang.refuse_without(args)
    model = common.load_model(args)
    learner_model = None
    if learner_device not in (None, model.device):
        learner_model = common.load_model(args, learner_device)
    common.check_stages(args.stages, model)
    prompts, lines = common.read_prompt_ids(args, model)
    from minitransformer.alignment.align import align

    with common.progress() as show, prompt_lines.naming_prompts(args.prompts, lines):
        found = align(
            model,
            prompts,
            common.sampling_params(args, len(prompts)),
            common.sampler_options(args),
            stages=args.stages,
            checkpoint=None if args.no_contrast else args.model,
            on_step=lambda part: show(PARTS[part], args.max_new_tokens * len(prompts) if part == "sampler" else None),
            on_token=lambda token: show.advance(),
            learner_model=learner_model,
        )
    content = common.as_json(to_json(args, model, found))
    common.report(args.json, content, lambda: _print(common.console(), args, model, found))
    failed = prompt_lines.report_failed(args.prompts, lines, found.completions)
    return 0 if found.equal and not failed else 1


def _print(console: "Console", args: argparse.Namespace, model: Any, found: "Alignment") -> None:
    for line in _header(args, model, found):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    print_tables(console, args, found, [])


def print_tables(
    console: "Console",
    args: argparse.Namespace,
    found: "Alignment",
    contrasts: list[list[str]],
    learner: str = "learner",
    verdict: str = "",
) -> None:
    """The stages, the gaps (with more rows of contrasts) and the verdict. learner: how the table names it."""
    from minitransformer.alignment import report
    from minitransformer.alignment.compare import first_divergence

    report.print_table(console, report.STAGE_COLUMNS, report.stage_rows(found.stages, args.full))
    console.print(report.stage_footnote("sampler", "learner"))
    worst = first_divergence(found.stages)
    for line in report.first_values(worst, "sampler", "learner") if worst else ():
        console.print(line, style="red", markup=False)
    for result in (r for r in found.recomputed if not r.equal):
        console.print(f"computed again with other bits: {result.stage}, {result.differing:,} elements", style="red")
    console.print()
    rows = [report.gap_row(learner, found.gap), *contrasts, report.gap_row("transformers, BF16", found.contrast)]
    report.print_table(console, report.GAP_COLUMNS, rows)
    console.print(report.gap_footnote())
    console.print()
    console.print(verdict or _verdict(found), style="bold green" if found.equal else "bold red", soft_wrap=True)


def _header(args: argparse.Namespace, model: Any, found: "Alignment") -> list[str]:
    how = f"pages of {args.page_size}, chunks of {args.chunk_size}, {args.max_batch_tokens} a step"
    return header(args, model, found, how, _devices(args))


def header(
    args: argparse.Namespace, model: Any, found: "Alignment", how: str, devices: str = "", passes: int = 1
) -> list[str]:
    """how: the sampler works, in words; passes: of the learner."""
    config, completions = model.config, found.completions
    tokens = sum(len(c.token_ids) for c in completions)
    cached, again = sum(c.cached_tokens for c in completions), sum(c.preemptions for c in completions)
    fed = sum(len(c.prompt_ids) + len(c.token_ids) - 1 for c in found.finished)
    said = "one packed pass" if passes == 1 else f"{passes} packed passes"
    recipe, other = model.recipe.name, "".join(f" {i}->{name}" for i, name in model.recipe.overrides)
    lines = [
        f"model    {args.model}: {config.num_layers} layers, {config.num_experts} experts, top-{config.top_k}, "
        f"vocabulary {config.vocab_size:,}{devices}",
        f"spec     {model.spec.name}, fingerprint {found.fingerprint[:16]}"
        + (f", recipe {recipe}{other}" if recipe != "bf16" or other else ""),
        f"sampler  {len(completions)} requests, {tokens} tokens at temperature {args.temperature:g}; {how};",
        f"         {cached} prompt tokens from the prefix cache, {again} preemptions; {found.seconds['sampler']:.1f} s",
        f"learner  {said} over {fed} tokens; {found.seconds['learner']:.1f} s",
    ]
    if why := _unverified(args, model):
        lines.append(f"UNVERIFIED: {why}")
    for completion in completions[:SHOWN_COMPLETIONS]:
        prompt = common.one_line(completion.prompt_ids, model, 44, end=True)
        lines.append(f"  r{completion.request_id}  {prompt} -> {common.one_line(completion.token_ids, model, 44)}")
    return lines


def _devices(args: argparse.Namespace) -> str:
    other = args.learner_device or args.device
    return "" if other == args.device == "cpu" else f"; sampler on {args.device}, learner on {other}"


def _verdict(found: "Alignment") -> str:
    failed = len(found.completions) - len(found.finished)
    said = f"; {failed} of {len(found.completions)} requests failed and are not compared" if failed else ""
    return _comparison(found) + said


def _comparison(found: "Alignment") -> str:
    elements = sum(r.elements for r in found.stages)
    differing = sum(r.differing for r in found.stages)
    wrong = sum(not r.equal for r in found.stages)
    if found.equal:
        return (
            f"EQUAL: 0 of {elements:,} elements differ, in {len(found.stages)} stages and {found.gap.tokens} log-probs"
        )
    missing = [r.stage for r in found.stages if not r.rows]
    note = f"; not compared: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}" if missing else ""
    again = sum(not r.equal for r in found.recomputed)
    note += f"; {again} stages of the sampler itself have other bits when computed again" if again else ""
    return (
        f"DIFFERENT: {differing:,} of {elements:,} elements in {wrong} of {len(found.stages)} stages, "
        f"{found.gap.differing} of {found.gap.tokens} log-probs{note}"
    )


def _unverified(args: argparse.Namespace, model: Any) -> str | None:
    """Of the device of `model`, and of the learner's if it has another."""
    from minitransformer.devices import resolve

    return common.unverified(model.device, *([resolve(args.learner_device)] if args.learner_device else []))


def to_json(args: argparse.Namespace, model: Any, found: "Alignment") -> dict[str, Any]:
    options = {key: value for key, value in vars(args).items() if key not in ("run", "json", "full", "own_options")}
    contrast = {"not_run": found.contrast} if isinstance(found.contrast, str) else asdict(found.contrast)
    return {
        "equal": found.equal,
        "unverified": _unverified(args, model),
        "options": options,
        "fingerprint": found.fingerprint,
        "spec": model.spec.entries(),
        "stages": [asdict(r) for r in found.stages],
        "recomputed": [asdict(r) for r in found.recomputed],
        "log_prob_gap": {"learner": asdict(found.gap), "transformers_bf16": contrast},
        "requests": [common.completion_dict(c) for c in found.completions],
        "seconds": found.seconds,
    }
