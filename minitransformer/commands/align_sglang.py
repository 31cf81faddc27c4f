"""`align --sampler`: its options, the server that it starts or talks to, and its table. No command of its own."""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitransformer.commands import common, prompt_lines
from minitransformer.errors import InputError

if TYPE_CHECKING:
    import torch

    from minitransformer.plugins.sglang.align import EngineAlignment
    from minitransformer.plugins.sglang.client import Client

COMPARED = "compared: what the server tells over HTTP; the stages in between stay inside it"
PREFILL = "compared: SGLang's own prefill (the sampler) with the learner on SGLang's kernels"
PARTS = {
    "check": "asking the server what it serves", "sampler": "SGLang samples",
    "rescore": "SGLang's prefill scores the same tokens", "learner": "scoring with the learner",
    "transformers": "scoring with transformers",
}  # fmt: skip
# Arguments that _client gives, so that it finds the server.
CHOSEN_HERE = ("--port", "--host", "--model-path", "--model", "--device", "--help", "--version")
SLOWEST = 100e6  # bytes a second, of a disk that a server loads from
# A server for one comparison captures no graph that it will not use; --sglang-arg comes later and wins.
FEW_GRAPHS, MOST_CAPTURED = ("--cuda-graph-backend-prefill", "disabled"), 256


def add_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("SGLang as the sampler")
    group.add_argument(
        "--sampler", metavar="sglang|URL", help="sglang: start a server here; http://host:port: a running one"
    )
    group.add_argument(
        "--sglang-arg", action="append", default=[], metavar="ARGS",
        help="arguments of the server that is started, such as --sglang-arg='--chunked-prefill-size 64'; may repeat",
    )  # fmt: skip
    group.add_argument(
        "--stock", action="store_true",
        help="SGLang with its own model; on a GPU the learner runs on SGLang's kernels, and equals its prefill",
    )  # fmt: skip


def refuse_without(args: argparse.Namespace) -> None:
    """InputError for an option that means nothing because miniTransformer itself samples."""
    for option, given in (("--sglang-arg", args.sglang_arg), ("--stock", args.stock)):
        if given:
            raise InputError(f"{option} is for --sampler; add --sampler sglang, or leave it out")


def run(args: argparse.Namespace, learner_device: "torch.device | None") -> int:
    _check(args)
    model = common.load_model(args, learner_device)
    prompts, lines = common.read_prompt_ids(args, model)
    from minitransformer.commands import align
    from minitransformer.plugins.sglang.align import align_engine
    from minitransformer.plugins.sglang.identity import refuse_for_stock

    if args.stock:
        refuse_for_stock(model.config)
    with common.progress(lines=True) as show, prompt_lines.naming_prompts(args.prompts, lines):
        began = time.monotonic()
        with _client(args, model, len(prompts), show) as client:
            started = {"start": time.monotonic() - began} if args.sampler == "sglang" else {}
            found = align_engine(
                model,
                client,
                prompts,
                common.sampling_params(args, len(prompts)),
                checkpoint=None if args.no_contrast else args.model,
                on_step=lambda part: show(PARTS.get(part, part)),
                stock_kernels=args.stock,
            )
    found = replace(found, seconds=started | found.seconds)
    server = {key: found.server.get(key) for key in ("version", "model_path")} | {"stock": found.stock}
    rescored = {"not_run": found.rescored} if isinstance(found.rescored, str) else vars(found.rescored)
    more = {"server": server, "rescored": rescored, "kernels": found.kernels, "why_own_kernels": found.why_own}
    content = common.as_json(align.to_json(args, model, found) | more)
    common.report(args.json, content, lambda: _print(args, model, found))
    return 0 if found.equal else 1


def _words(options: list[str]) -> list[str]:
    """Split as a shell does. InputError for a quote that is not closed."""
    try:
        return [word for words in options for word in shlex.split(words)]
    except ValueError as error:
        given = " ".join(options)
        raise InputError(f"--sglang-arg {given}: {str(error).lower()}; expected words as in a shell") from None


def _check(args: argparse.Namespace) -> None:
    own = [option for option, name, default in args.own_options if getattr(args, name) != default]
    own += ["--stages"] if args.stages else []
    if own:
        raise InputError(f"{own[0]} is for miniTransformer's own sampler; with --sampler use --sglang-arg, or leave it")
    for word in _words(args.sglang_arg):
        option = word.split("=")[0]
        if len(option) > 4 and any(one.startswith(option) for one in CHOSEN_HERE):  # argparse takes beginnings
            raise InputError(
                f"--sglang-arg {option}: the command chooses it itself; leave it out, or start the server by hand and "
                "give its URL as --sampler"
            )
    if args.sampler == "sglang":
        if args.layers:
            raise InputError("--layers can't be told to SGLang; `minitransformer quantize` writes such a checkpoint")
        from minitransformer.plugins.sglang.plugin import sglang_version

        sglang_version()
    elif not args.sampler.startswith(("http://", "https://")):
        raise InputError(f"--sampler {args.sampler}: expected sglang or http://host:port")
    elif args.sglang_arg:
        raise InputError("--sglang-arg is for a server that is started: --sampler sglang")
    else:  # before a large model is loaded
        from minitransformer.plugins.sglang.client import QUICK, Client

        Client(args.sampler, QUICK).about()


@contextmanager
def _client(args: argparse.Namespace, model: Any, requests: int, show: Callable[[str], None]) -> "Iterator[Client]":
    """Of the running server, or of one that lives as long as this context."""
    from minitransformer.plugins.sglang.client import Client

    if args.sampler != "sglang":
        yield Client(args.sampler)
        return
    from minitransformer.plugins.sglang import stock, stock_kernels
    from minitransformer.plugins.sglang.arguments import RECIPE
    from minitransformer.plugins.sglang.launch import Server

    cpu = common.device(args.device, args).type == "cpu"
    arguments = [] if args.stock else ["--enable-return-routed-experts"]
    if args.stock:  # its other attention backends need a GPU
        arguments += ["--attention-backend", "torch_native"] if cpu else stock_kernels.ARGUMENTS
    if args.recipe is not None and not args.stock:
        arguments += ["--json-model-override-args", json.dumps({RECIPE: args.recipe})]
    if not cpu:
        arguments += [*FEW_GRAPHS, "--cuda-graph-max-bs-decode", str(min(requests, MOST_CAPTURED))]
    arguments += _words(args.sglang_arg)

    def meanwhile() -> None:
        if args.stock and stock.unable_here(model) is None:
            show("starting SGLang; here, loading its kernels")
            kernels = stock.SglangKernels()
            show("starting SGLang; here, compiling its kernels")
            stock.warm(model, kernels)

    show("starting SGLang")
    size = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    more = stock_kernels.ENVIRONMENT if args.stock else None
    with Server(
        args.model, arguments, cpu=cpu, stock=args.stock, extra_environment=more, meanwhile=meanwhile,
        timeout=300 + size / SLOWEST, on_phase=lambda phase: show(f"starting SGLang: {phase}"),
    ) as server:  # fmt: skip
        try:
            yield Client(server.url)
        except InputError as error:
            if "no server answers" not in str(error):
                raise
            raise InputError(f"{error}; the server's log, {server.log}, ends: {server.reason()}") from None
    server.log.unlink(missing_ok=True)


def _print(args: argparse.Namespace, model: Any, found: "EngineAlignment") -> None:
    from minitransformer.alignment.report import gap_row
    from minitransformer.commands import align

    console, version = common.console(), found.server["version"]
    ours = "miniTransformer's model, same fingerprint and weights"
    whose = "a STOCK server, SGLang's own model" if found.stock else ours
    for line in align.header(args, model, found, f"SGLang {version}: {whose}", passes=found.passes):
        console.print(line, markup=False, soft_wrap=True)
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds.items())
    console.print(f"seconds  {parts}", markup=False, soft_wrap=True)
    console.print(PREFILL if found.kernels == "sglang" else COMPARED)
    if found.why_own:
        console.print(f"the learner runs on its own operators: {found.why_own}", markup=False, soft_wrap=True)
    console.print()
    rows = [gap_row("SGLang's own prefill", found.rescored)]
    if found.kernels == "own":
        align.print_tables(console, args, found, rows)
    else:
        align.print_tables(console, args, found, rows, "learner, SGLang's kernels", _prefill_verdict(found))


def _prefill_verdict(found: "EngineAlignment") -> str:
    rows, differing = (sum(getattr(r, name) for r in found.stages) for name in ("rows", "differing"))
    gap = f"; of what its decode emitted, {found.gap.differing:,} of {found.gap.tokens:,} differ"
    said = f"{differing:,} of {rows:,} log-probs of SGLang's own prefill differ from the learner's on SGLang's kernels"
    return f"{'EQUAL' if found.equal else 'DIFFERENT'}: {said}{gap}"
