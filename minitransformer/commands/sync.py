"""Send a checkpoint's weights to a running SGLang server, and prove that they are there.

The server takes them in one message: nothing is written before it has checked all of it. Then the checksums of every
tensor are compared, and the log-probs of a probe prompt on bits. Layers that the server keeps in NVFP4 are quantised
here, once. Exit status 0 if everything is proven equal, 1 if not (a stock SGLang has no checksums, so with it always),
2 for bad input and for a server that refuses or does not answer; the message names what the server holds then.

Example:
  minitransformer sync --model demo/checkpoint --to http://127.0.0.1:30000
  minitransformer sync --model demo/checkpoint --recipe nvfp4_per_token --to http://gpu7:30000 --directory /shared
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from minitransformer.commands import common
from minitransformer.errors import InputError

if TYPE_CHECKING:
    from minitransformer.plugins.sglang.sync import SyncReport


def add_arguments(command: argparse.ArgumentParser) -> None:
    common.add_model(command)
    common.add_device(command)
    command.add_argument("--to", required=True, metavar="URL", help="http://host:port of the server")
    command.add_argument(
        "--route",
        metavar="ROUTE",
        help="tensor: through memory, same host; disk: through a directory that both read; distributed: over a process "
        "group (default: disk with --directory or for another host, distributed for another GPU, else tensor)",
    )
    command.add_argument(
        "--backend", metavar="NAME", help="of the route distributed: nccl (default on a GPU) or gloo (default on a CPU)"
    )
    what = "where the route disk may write (default: the temporary directory)"
    command.add_argument("--directory", type=common.path, metavar="DIR", help=what)
    command.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds of one answer (default 600)")
    common.add_json(command, "the report")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.model])
    if not args.to.startswith(("http://", "https://")):
        raise InputError(f"--to {args.to}: expected http://host:port")
    from minitransformer.plugins.sglang.client import LONGEST, QUICK, Client
    from minitransformer.plugins.sglang.send import require_route
    from minitransformer.plugins.sglang.sync import sync

    if not 0 < args.timeout <= LONGEST:
        raise InputError(f"--timeout {args.timeout:g} must be above 0 and at most {LONGEST:g}")
    require_route(args.route, args.backend, args.directory)
    Client(args.to, min(QUICK, args.timeout)).about()  # before a large model is loaded
    model = common.load_model(args)
    from minitransformer.learner.learner import Learner

    with common.progress() as show:
        report = sync(Learner(model), args.to, args.route, args.directory, args.timeout, show, args.backend)
    common.report(args.json, common.as_json(asdict(report) | {"equal": report.equal}), lambda: _print(report))
    return 0 if report.equal else 1


def _print(report: "SyncReport") -> None:
    console = common.console()
    packed = f", the experts of {report.packed} layers packed in NVFP4" if report.packed else ""
    seconds = ", ".join(f"{part} {s:.2f}" for part, s in report.seconds.items())
    lines = [
        f"server   {report.url}: {'a STOCK SGLang' if report.stock else 'miniTransformer, the same spec'}",
        f"sent     {report.tensors:,} tensors, {report.bytes / 2**20:,.1f} MiB by {report.route}{packed}",
        f"seconds  {seconds}",
    ]
    if report.unverified:
        lines.append(f"UNVERIFIED: {report.unverified}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(report.verdict(), style="bold green" if report.equal else "bold red", markup=False, soft_wrap=True)
