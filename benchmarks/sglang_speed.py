"""Output tokens a second of running SGLang servers, ours beside stock, log-probs returned.

  python benchmarks/sglang_speed.py run DIR ENGINE ... --layers N     adds runs to --file, the engines by turns
  python benchmarks/sglang_speed.py table                             Markdown of that file, for docs/sglang_results.md
  python benchmarks/sglang_speed.py earlier                           tokens a second in the files of earlier runs

ENGINE is kept in DIR by `alignment_tests.plugin.h200 keep`. A run is a batch of requests sent together, and the same
with one new token, which gives the time to the first. An engine of ours is held to its laws before: one that differs
is not measured. Exit status 1 if an engine failed.
"""

import argparse
import fcntl
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from alignment_tests.plugin import laws
from alignment_tests.plugin.h200_engines import connect
from alignment_tests.plugin.h200_laws import prefills
from minitransformer.errors import InputError
from minitransformer.plugins.sglang.client import Client

FILE = Path(__file__).resolve().parent / "results" / "h200_sglang.json"
KINDS = {
    "bf16": "miniTransformer, BF16", "nvfp4": "miniTransformer, `nvfp4_per_token`",
    "own": "stock, not deterministic", "owndeterministic": "stock, deterministic",
}  # fmt: skip
SHORT = {"bf16": "ours BF16", "nvfp4": "ours NVFP4", "own": "stock", "owndeterministic": "stock deterministic"}
RATIOS = [("bf16", "own"), ("bf16", "owndeterministic"), ("nvfp4", "own"), ("nvfp4", "owndeterministic"),
          ("nvfp4", "bf16")]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.names if is_sound(args, name)]
    failed = len(args.names) - len(names)
    print(f"{'engine':<30} {'batch':>5} {'seconds':>8} {'first s':>8} {'tokens/s':>9} {'decode tokens/s':>15}")
    for batch in args.batches:
        ids = laws.prompts([args.input] * batch, 1000, batch)
        for name in names * args.repeats:
            try:
                client = connect(args, name)[0]
                whole, first = (seconds(client, ids, n) for n in (args.output, 1))
            except (InputError, OSError, RuntimeError, AssertionError) as error:  # the others' numbers must stay
                failed += 1
                print(f"{name}: batch {batch}: {type(error).__name__}: {error}", flush=True)
                continue
            row = {"engine": name, "gpu": args.gpu, "batch": batch, "seconds": whole, "first_seconds": first}
            add(args, "runs", row)
            decode = batch * (args.output - 1) / max(whole - first, 1e-9)
            rate = batch * args.output / whole
            print(f"{name:<30} {batch:>5} {whole:>8.3f} {first:>8.3f} {rate:>9.0f} {decode:>15.0f}", flush=True)
    return 1 if failed else 0


def is_sound(args: argparse.Namespace, name: str) -> bool:
    """Whether an engine of ours equals itself, across the border at 1,024 keys too; stock is not asked."""
    if "own" in name.split("-")[1]:
        return True
    ids = laws.prompts((5, 37, 200, 900, 1018), 1000, 3)
    try:
        client = connect(args, name)[0]
        before = prefills(client)
        found = laws.total([laws.decode_equals_rescoring(client, ids), laws.alone_equals_batch(client, ids, 0.6)])
        replayed = prefills(client) - before
    except (InputError, OSError, RuntimeError, AssertionError) as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"{name}: its laws, of {replayed} prefills from graphs: {found}", flush=True)
    row = {"engine": name, "differing": found.differing, "of": found.of, "prefills_from_graphs": replayed}
    add(args, "checks", row)
    return found.differing == 0


def seconds(client: Client, ids: laws.Ids, new_tokens: int) -> float:
    client.flush_cache()
    began = time.monotonic()
    outs = client.generate(ids, laws.params(len(ids), 1.0, new_tokens), first=-1)
    assert all(len(o.token_ids) == new_tokens for o in outs), "an answer of another length"
    return time.monotonic() - began


def add(args: argparse.Namespace, where: str, row: dict) -> None:
    """To the file's list of this name. Others may add at the same time. InputError if its sizes are not these."""
    about = {"machine": args.machine, "layers": args.layers, "input": args.input, "output": args.output}
    with open(args.file, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = json.loads(file.read() or "null") or about | {"runs": []}
        if differing := [name for name, value in about.items() if found.get(name) != value]:
            raise InputError(f"{args.file}: its runs are of another {', '.join(differing)}; give another --file")
        found.setdefault(where, []).append(row)
        file.truncate(0)
        file.write(text(found))


def text(found: dict) -> str:
    """JSON, a line a run."""
    head = json.dumps({name: value for name, value in found.items() if name != "runs"})
    return head[:-1] + ', "runs": [\n' + ",\n".join(json.dumps(row) for row in found["runs"]) + "\n]}\n"


def collected(file: Path) -> tuple[dict, dict, list[int], list[str]]:
    """Output tokens a second and seconds to the first one, by (kind, batch); the batches; the kinds that have all."""
    found = json.loads(file.read_text("utf-8"))
    rates, firsts = defaultdict(list), defaultdict(list)
    for row in found["runs"]:
        key = row["engine"].split("-")[1], row["batch"]
        rates[key].append(row["batch"] * found["output"] / row["seconds"])
        firsts[key].append(row["first_seconds"])
    batches = sorted({batch for _, batch in rates})
    return rates, firsts, batches, [kind for kind in KINDS if all((kind, batch) in rates for batch in batches)]


def earlier(files: list[Path]) -> list[str]:
    """A line a file, by what its name ends in: means of each engine, and of ours in BF16 over stock."""
    lines = [f"| run | {', '.join(SHORT.values())} |".replace(", ", " | ") + " ours BF16 / stock |"]
    lines.append("|---" * (len(SHORT) + 2) + "|")
    for file in files:
        rates, _, batches, kinds = collected(file)
        mean_of = {kind: [mean(rates[kind, batch]) for batch in batches] for kind in kinds}
        cells = [" / ".join(f"{x:,.0f}" for x in mean_of.get(kind, ())) for kind in KINDS]
        ratio = zip(mean_of["bf16"], mean_of.get("own", ()), strict="own" in mean_of)
        cells.append(" / ".join(f"{x / y:.2f}" for x, y in ratio))
        lines.append(f"| `{file.name}` | {' | '.join(cells)} |")
    return lines


def table(file: Path) -> list[str]:
    """Means of all runs, ratios of means, and how far runs of one engine lie apart."""
    rates, firsts, batches, kinds = collected(file)
    head = [f"batch {batch}" for batch in batches]

    def rows(first: str, lines: list[tuple[str, list[float]]], form: str) -> list[str]:
        cells = [[name, *(format(x, form) for x in values)] for name, values in lines]
        heads = [[first, *head], ["---"] * (len(head) + 1)] if first else []
        return [f"| {' | '.join(line)} |" for line in heads + cells]

    def means(of: dict, kind: str) -> list[float]:
        return [mean(of[kind, batch]) for batch in batches]

    pairs = [(a, b) for a, b in RATIOS if a in kinds and b in kinds]
    ratios = [[x / y for x, y in zip(means(rates, a), means(rates, b), strict=True)] for a, b in pairs]
    names = [f"**{SHORT[a]} / {SHORT[b]}**" for a, b in pairs]
    apart = [max(max(rates[k, batch]) / min(rates[k, batch]) for k in kinds) for batch in batches]
    return [
        *rows("engine", [(KINDS[k], means(rates, k)) for k in kinds], ",.0f"),
        *rows("", [*zip(names, ratios, strict=True), ("fastest run / slowest of one engine, at most", apart)], ".2f"),
        "",
        *rows("seconds to the first token", [(KINDS[k], means(firsts, k)) for k in kinds], ".3f"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    runs, tables = jobs.add_parser("run"), jobs.add_parser("table")
    jobs.add_parser("earlier")
    runs.add_argument("directory", type=Path, metavar="DIR")
    runs.add_argument("names", nargs="+", metavar="ENGINE")
    runs.add_argument("--layers", type=int, required=True, help="of the model, for the file")
    runs.add_argument("--gpu", default="0", help="which one, for the file")
    runs.add_argument("--machine", default="", help="for the file")
    runs.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    runs.add_argument("--input", type=int, default=1024)
    runs.add_argument("--output", type=int, default=256)
    runs.add_argument("--repeats", type=int, default=2)
    runs.add_argument("--timeout", type=float, default=300, help="seconds to wait for an engine")
    runs.add_argument("--file", type=Path, default=FILE)
    tables.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    if args.job == "table":
        print(*table(args.file), sep="\n")
        return 0
    if args.job == "earlier":
        print(*earlier(sorted(FILE.parent.glob("h200_sglang_[0-9]*.json"))), sep="\n")
        return 0
    try:
        return run(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
