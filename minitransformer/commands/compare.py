"""Compare two traces on bits: the first diverging stage, counts, distance in ulp, the first five values.

Rows are matched by request and position; rows that only one side has are counted. Exit status 0 only if no element
differs, no id differs, and every stage was compared at every generated token (rows of a prompt may be on one side only:
a prefix-cache hit spares them); else 1; 2 for bad input, which two traces of different execution specs are.

Example:
  minitransformer compare sampler.safetensors learner.safetensors
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from minitransformer.commands import common
from minitransformer.errors import InputError

if TYPE_CHECKING:
    from minitransformer.alignment.difference import StageResult
    from minitransformer.alignment.trace import Trace

SHOWN = 5  # lines about what was not compared; the JSON has all


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", type=common.path, metavar="A", help="a trace that `trace` wrote")
    command.add_argument("b", type=common.path, metavar="B", help="another")
    command.add_argument("--any-spec", action="store_true", help="compare although the execution specs differ")
    command.add_argument("--full", action="store_true", help="print every layer's stages, not only those that differ")
    common.add_json(command, "the results as JSON")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.a, args.b])
    from minitransformer.alignment.compare import compare, first_divergence, left_out, nothing_compared, unlike_requests
    from minitransformer.alignment.trace import Trace

    a, b = Trace.load(args.a), Trace.load(args.b)
    results = compare(a, b, any_spec=args.any_spec)
    if nothing_compared(results):
        raise InputError(f"{args.a} and {args.b} have no stage and row in common; nothing was compared")
    unlike, worst = unlike_requests(a, b), first_divergence(results)
    missing = left_out(a, b, results)
    equal = worst is None and not unlike and not missing
    content = {
        "equal": equal,
        "first_diverging_stage": worst.stage if worst else None,
        "unverified": {"a": a.unverified, "b": b.unverified},
        "requests_with_other_ids": unlike,
        "not_compared": missing,
        "stages": [asdict(r) for r in results],
    }
    common.report(args.json, common.as_json(content), lambda: _print(args, a, b, results, unlike, missing))
    return 0 if equal else 1


def _print(
    args: argparse.Namespace,
    a: "Trace",
    b: "Trace",
    results: "list[StageResult]",
    unlike: list[str],
    missing: list[str],
) -> None:
    from minitransformer.alignment import report
    from minitransformer.alignment.compare import first_divergence

    console, worst = common.console(), first_divergence(results)
    report.print_table(console, report.STAGE_COLUMNS, report.stage_rows(results, args.full))
    console.print(report.stage_footnote(f"first ({args.a})", f"second ({args.b})"), markup=False, soft_wrap=True)
    for line in (*unlike, *(f"not compared: {line}" for line in missing[:SHOWN])):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    for path, one in ((args.a, a), (args.b, b)):
        if one.unverified:
            console.print(f"UNVERIFIED: {path}: {one.unverified}", markup=False, soft_wrap=True)
    for line in report.first_values(worst) if worst else ():
        console.print(line, style="red", markup=False)
    equal = worst is None and not unlike and not missing
    verdict = f"EQUAL: no element differs, in {len(results)} stages"
    if not equal:
        verdict = _verdict(results, len(unlike), len(missing))
    console.print(verdict, style="bold green" if equal else "bold red", soft_wrap=True)


def _verdict(results: "list[StageResult]", unlike: int, missing: int) -> str:
    elements, differing = (sum(getattr(r, name) for r in results) for name in ("elements", "differing"))
    wrong = sum(not r.equal for r in results)
    notes = f"; {unlike} requests have other ids" if unlike else ""
    notes += f"; {missing} stages or requests were not compared whole" if missing else ""
    return f"DIFFERENT: {differing:,} of {elements:,} elements in {wrong} of {len(results)} stages{notes}"
