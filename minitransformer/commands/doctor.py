"""What this machine can run with the spec's bits, what it can't, and why.

Compares the CPU's matrix product with its definition, compiles a kernel for Hopper, and on a GPU holds every operator,
forward and backward, and every choice of the table (which schedule or library for which shape) to the CPU's bits.
--tune proves and times all candidates and keeps the fastest in a table of this machine's own: for the products of
Qwen3-30B-A3B, or with --model for those of a checkpoint, beside what the table has.
Exit status 0 if whatever this machine can run has the spec's bits, 1 if something has not, 2 for bad input. A machine
without a GPU, or with one that is no Hopper, is no failure: the CPU runs everything. There --tune is bad input.

Example:
  minitransformer doctor
  minitransformer doctor --tune --seconds 120
  minitransformer doctor --tune --model demo/checkpoint
"""

import argparse

from minitransformer.commands import common
from minitransformer.errors import InputError
from minitransformer.files import holding

MOST_ROWS = 16384
PATIENCE = 30  # seconds, for another run that writes the user's table


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tune", action="store_true", help="prove, time and choose; writes the user's table")
    model = "of --tune: a checkpoint, whose config says the widths (default: Qwen3-30B-A3B's)"
    command.add_argument("--model", type=common.path, metavar="DIR", help=model)
    tokens = f"of --tune: numbers of tokens (1 to {MOST_ROWS})"
    command.add_argument("--rows", type=int, nargs="+", metavar="M", help=tokens)
    command.add_argument("--seconds", type=float, metavar="S", help="of --tune: begin nothing later (default 300)")
    command.add_argument("--seed", type=int, metavar="S", help="of the operands (default: a new one each time)")
    command.add_argument("--table", action="store_true", help="show the table's rows, not the checks alone")
    common.add_allow_unverified(command)
    common.add_json(command, "the checks")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json)
    if args.rows is not None and min(args.rows) < 1:
        raise InputError(f"--rows {min(args.rows)}: must be at least 1")
    if args.rows is not None and max(args.rows) > MOST_ROWS:
        raise InputError(f"--rows {max(args.rows)}: must be at most {MOST_ROWS}")
    if args.seconds is not None and not args.seconds > 0:
        raise InputError(f"--seconds {args.seconds:g}: must be above 0")
    if args.seed is not None and not 0 <= args.seed < 1 << 63:
        raise InputError(f"--seed {args.seed}: must be 0 to 2^63 - 1")
    for option, given in (("--rows", args.rows), ("--seconds", args.seconds), ("--model", args.model)):
        if given is not None and not args.tune:
            raise InputError(f"{option} is for --tune; add that, or leave it out")
    from minitransformer.devices import allow_unverified
    from minitransformer.tuning import checks
    from minitransformer.tuning.origin import origin

    allow_unverified(args.allow_unverified)
    seed = checks.fresh_seed() if args.seed is None else args.seed
    candidates, wrong = _tune(args, seed) if args.tune else ([], None)
    found, tuned = [], [] if wrong is None else [checks.Check("tune", "failed", f"no table is written: {wrong}")]
    for check in (*tuned, *checks.run(seed, print if args.table else lambda line: None)):
        print(f"{check.state:8} {check.name}: {check.text}", flush=True)
        found.append(check)
    failed = sum(check.state == "failed" for check in found)
    verdict = f"{failed} of {len(found)} checks failed" if failed else "what this machine can run has the spec's bits"
    content = origin() | {"seed": seed, "checks": [vars(check) for check in found]}
    content |= {"candidates": candidates} if args.tune else {}
    common.report(args.json, common.as_json(content), lambda: print(verdict))
    return 1 if failed else 0


def _tune(args: argparse.Namespace, seed: int) -> tuple[list[dict], str | None]:
    """Writes the user's table -> (every candidate's time or refusal, why the tiles can't be trusted here or None)."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("--tune needs an NVIDIA GPU; this machine has none that torch can use")
    from minitransformer.devices import unverified, unverified_allowed
    from minitransformer.models.qwen3_moe.weights import read_config
    from minitransformer.ops.gpu import choice
    from minitransformer.tuning import reverify, table, tune
    from minitransformer.tuning.subject import WrongReference

    products = tune.PRODUCTS
    if args.model is not None:
        config, hf = read_config(args.model, quantised=True)
        products = tune.products_of(config, "quantization_config" not in hf)
    home, path = torch.device("cuda", 0), table.user_path()
    if unverified(home) and not unverified_allowed():
        raise InputError(f"--tune: {unverified(home)}; add --allow-unverified to tune it all the same")
    path.parent.mkdir(parents=True, exist_ok=True)
    common.check_output(path)  # before minutes of work
    tried: list[dict] = []
    try:
        with reverify.unasked():  # candidates are proven here, the operators by the checks that follow
            made = tune.tune(home, products=products, rows=args.rows or tune.ROWS, seed=seed,
                             seconds=args.seconds or 300, note=tried.append)  # fmt: skip
    except WrongReference as error:
        return tried, str(error)
    if not made.rows:
        print("nothing was tuned, and no table is written; raise --seconds")
        return tried, None
    with holding(path.with_suffix(".lock"), PATIENCE):  # between reading and writing nobody else's rows come
        try:
            before = table.read(path) if path.exists() else None
        except InputError as error:
            print(f"{error}; it is replaced")
            before = None
        kept = before is not None and (before.machine, before.spec) == (made.machine, made.spec)
        (before.updated(made) if kept else made).write(path)
    choice.forget()
    print(f"wrote {path}: {len(made.rows)} rows")
    return tried, None
