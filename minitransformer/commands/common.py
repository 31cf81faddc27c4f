"""What several commands share: options, loading, names for what they write and show."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitransformer.commands.output import as_json, console, json_lines, report
from minitransformer.commands.progress import progress
from minitransformer.errors import InputError
from minitransformer.files import check_output, tell, write_text

__all__ = ["as_json", "check_output", "console", "json_lines", "progress", "report", "write_text"]  # used from here

if TYPE_CHECKING:
    import torch

    from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from minitransformer.sampler.sequence import Completion, SamplingParams


def path(text: str) -> str:
    """An argument that names a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; name a file or a folder")
    return text


def file(text: str) -> Path:
    return Path(path(text))


def add_model(command: argparse.ArgumentParser) -> None:
    what = "checkpoint in the Hugging Face layout"
    command.add_argument("--model", required=True, type=path, metavar="DIR", help=what)
    command.add_argument(
        "--recipe",
        metavar="NAME",
        help="number format of the experts, quantised while loading; `minitransformer recipes` lists them "
        "(default: the checkpoint's own)",
    )
    add_layers(command)


def add_layers(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--layers",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATTERN=RECIPE",
        help="another recipe for some layers, by number or pattern: 0=bf16, 'model.layers.1?.mlp.experts*=bf16'",
    )


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N (default cpu); no bit depends on it"
    )
    add_allow_unverified(command)


def add_allow_unverified(command: argparse.ArgumentParser) -> None:
    why = "run on a GPU too that is no Hopper, or on which an operator has other bits; the report says so"
    command.add_argument("--allow-unverified", action="store_true", help=why)


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", type=file, metavar="FILE", help=f"also write {what}")


def add_stages(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--stages",
        nargs="+",
        metavar="PATTERN",
        help="only these stages, such as 'layers.0.*' or logits (default all; a large model needs the memory)",
    )


def add_sampling(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the options, as add_sampler does, for a command that uses them only sometimes."""
    group = command.add_argument_group("sampling")
    rows = (
        ("--max-new-tokens", int, 16, "N", "a request, at least 1 (default 16)"),
        ("--seed", int, 0, "S", "request i draws with seed S + i, 0 to 2^63 - 1 (default 0)"),
        ("--temperature", float, 1.0, "T", "1e-6 to 1e6, or 0 for greedy (default 1)"),
        ("--top-k", int, 0, "K", "draw among the K likeliest tokens; 0 means all (default 0)"),
        ("--top-p", float, 1.0, "P", "draw among the likeliest tokens of total probability P, 0 < P <= 1 (default 1)"),
    )
    return [
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=what)
        for name, kind, default, metavar, what in rows
    ]


def add_sampler(
    command: argparse.ArgumentParser, chunk_size: int = 64, max_batch_tokens: int = 512
) -> list[argparse.Action]:
    group = command.add_argument_group("sampler (none of these changes a bit of the result)")
    few = "pages in all; with few, requests are preempted: they lose their pages and are computed again later"
    rows = (
        ("--page-size", 16, "tokens a page (default 16)"),
        ("--num-pages", None, f"{few} (default: as many as fit 512 MiB)"),
        ("--chunk-size", chunk_size, f"tokens of one request in a step (default {chunk_size})"),
        ("--max-batch-tokens", max_batch_tokens, f"tokens of all requests in a step (default {max_batch_tokens})"),
        ("--max-sequences", 64, "requests at once (default 64)"),
    )
    actions = [
        group.add_argument(name, type=int, default=default, metavar="N", help=what) for name, default, what in rows
    ]
    switches = (
        ("--no-prefix-cache", "compute every prompt from its start"),
        ("--no-cuda-graphs", "on a GPU, launch every kernel of a decode step (traced steps do so anyway)"),
    )
    return actions + [group.add_argument(name, action="store_true", help=what) for name, what in switches]


def sampling_params(args: argparse.Namespace, count: int) -> "list[SamplingParams]":
    """One SamplingParams a request."""
    from minitransformer.sampler.sequence import SamplingParams

    if args.seed >= 0 and args.seed + count > 1 << 63:
        raise InputError(f"--seed {args.seed}: request i draws with seed S + i, and {count} of them go beyond 2^63 - 1")
    return [
        SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed + i)
        for i in range(count)
    ]


def sampler_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("page_size", "num_pages", "chunk_size", "max_batch_tokens", "max_sequences")
    switches = {"prefix_cache": not args.no_prefix_cache, "cuda_graphs": not args.no_cuda_graphs}
    return {name: getattr(args, name) for name in names} | switches


def device(name: str, args: argparse.Namespace) -> "torch.device":
    """Of this name; a GPU that --allow-unverified let in is told on stderr, also where stdout is for a program."""
    from minitransformer.devices import allow_unverified, resolve, unverified

    allow_unverified(args.allow_unverified)
    found = resolve(name)
    if unverified(found):
        tell(f"warning: unverified: {unverified(found)}")
    return found


def unverified(*devices: "torch.device") -> str | None:
    """What a report says if one of these is a GPU that --allow-unverified let in; JSON has it as "unverified"."""
    from minitransformer.devices import unverified

    return next(filter(None, map(unverified, devices)), None)


def marked(item: dict[str, Any], why: str | None) -> dict[str, Any]:
    """A line of JSON that says why its bits are unverified, if they are."""
    return item | {"unverified": why} if why else item


def load_model(args: argparse.Namespace, on: "torch.device | None" = None) -> "Qwen3MoeForCausalLM":
    """On a device other than --device if `on` is given."""
    from minitransformer.recipe import get, read_overrides

    base = None if args.recipe is None else get(args.recipe)  # a wrong name is refused before torch is loaded
    overrides = read_overrides(args.layers)
    if overrides and base is None:
        raise InputError("--layers needs --recipe: the recipe of all other layers")
    on = on or device(args.device, args)
    from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

    with progress() as show:
        show("loading " + args.model)
        model = Qwen3MoeForCausalLM.from_pretrained(args.model, device=on)
        if base is not None:
            model.set_recipe(base.with_overrides(overrides, model.config.num_layers))
        return model


def read_prompt_ids(args: argparse.Namespace, model: "Qwen3MoeForCausalLM") -> tuple[list[list[int]], list[int]]:
    """Ids of every prompt of --prompts, and the line of the file that each stands on."""
    from minitransformer.prompts import read_numbered_prompts

    found = read_numbered_prompts(args.prompts, model.tokenizer, model.config.vocab_size)
    return [ids for _, ids in found], [line for line, _ in found]


def check_stages(patterns: list[str] | None, model: "Qwen3MoeForCausalLM") -> None:
    """InputError for a pattern that no stage of this model has."""
    from fnmatch import fnmatchcase

    from minitransformer.alignment.trace import stages_of

    names = stages_of(model.config, model.recipe)
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"--stages {pattern}: no such stage in this model; {names[0]}, {names[2]}, 'layers.*.qkv', logits exist"
            )


def completion_dict(completion: "Completion") -> dict[str, Any]:
    return asdict(completion)


def one_line(ids: list[int], model: "Qwen3MoeForCausalLM", width: int = 60, end: bool = False) -> str:
    """Tokens as one line of text in quotes (or as ids); if it is longer than `width`, its beginning or its end."""
    text = repr(model.tokenizer.decode(ids)) if model.tokenizer is not None else " ".join(map(str, ids))
    if len(text) <= width:
        return text
    return "..." + text[3 - width :] if end else text[: width - 3] + "..."
