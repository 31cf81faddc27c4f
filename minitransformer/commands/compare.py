"""Compare two traces on bits: the first diverging stage, counts, distance in ulp, the first five values.

Rows are matched by request and position; rows that only one side has are counted. Exit status 0 only if no element
differs, 1 if one does, 2 for bad input, which two traces of different execution specs are.

Example:
  minitransformer compare sampler.safetensors learner.safetensors
"""

import argparse
from dataclasses import asdict

from minitransformer.commands import common
from minitransformer.errors import InputError


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", metavar="A", help="a trace that `trace` wrote")
    command.add_argument("b", metavar="B", help="another")
    command.add_argument("--any-spec", action="store_true", help="compare although the execution specs differ")
    command.add_argument("--full", action="store_true", help="print every layer's stages, not only those that differ")
    common.add_json(command, "the results as JSON")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json)
    from minitransformer.alignment import report
    from minitransformer.alignment.compare import compare, first_divergence, nothing_compared, unlike_requests
    from minitransformer.alignment.trace import Trace

    a, b = Trace.load(args.a), Trace.load(args.b)
    results = compare(a, b, any_spec=args.any_spec)
    if nothing_compared(results):
        raise InputError(f"{args.a} and {args.b} have no stage and row in common; nothing was compared")
    console = common.console()
    report.print_table(console, report.STAGE_COLUMNS, report.stage_rows(results, args.full))
    console.print(report.stage_footnote(f"first ({args.a})", f"second ({args.b})"), markup=False, soft_wrap=True)
    unlike, worst = unlike_requests(a, b), first_divergence(results)
    for line in unlike:
        console.print(line, style="yellow", markup=False)
    for line in report.first_values(worst) if worst else ("no element differs",):
        console.print(line, style="red" if worst else "green", markup=False)
    common.write_json(
        args.json,
        {
            "equal": worst is None,
            "first_diverging_stage": worst.stage if worst else None,
            "requests_with_other_ids": unlike,
            "stages": [asdict(r) for r in results],
        },
    )
    return 0 if worst is None else 1
