"""Tables of docs/sglang_results.md, from the rows of `h200 laws` and `stock_h200` and from what `align` printed.

  python3 -m alignment_tests.plugin.h200_table
"""

import json
from collections.abc import Iterator
from pathlib import Path

from alignment_tests.plugin.h200_engines import VARIANTS
from alignment_tests.plugin.stock_operators import HEADER, line

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
CPU_LAWS = RESULTS / "cpu_sglang_laws.jsonl"
NAMES = "laws", "stock", "gsm8k", "prefill_graphs"
LAWS, STOCK, GSM8K, GRAPHS = (RESULTS / f"h200_sglang_{name}.jsonl" for name in NAMES)
MODELS = {"tiny": "tiny: 3 layers, hidden 256, 8 experts, top-2", "smol": "the demo checkpoint",
          "demo": "the demo checkpoint's sizes", "wide": "Qwen3-30B-A3B's widths, {} layers"}  # fmt: skip
KINDS = {"bf16": "BF16", "nvfp4": "`nvfp4_per_token`", "packed": "packed NVFP4"}
COLUMNS = ("one engine", "its long contexts", "page16-chunk64", "chunk16-tight", "chunk64-mixed", "twin")
TITLES = ("one engine", "its long contexts", "pages of 16, chunks of 64", "chunks of 16, retraction", "mixed chunks",
          "on another GPU")  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def column(words: list[str]) -> str | None:
    """Of an engine's VARIANTs, in any order; None: it has none. Some have no column: "other"."""
    variants = {word for word in words if word in VARIANTS}
    return next((one for one in COLUMNS if set(one.split("-")) == variants), "other") if variants else None


def numbers(rows: list[dict]) -> dict[tuple, dict[str, list[int]]]:
    """(size, layers, kind, graphs) -> column -> [differing, compared]."""
    found: dict[tuple, dict[str, list[int]]] = {}
    for row in (row for row in rows if "law" in row):
        size, kind, *words = row["engine"].split("-")
        where = column(words) or ("its long contexts" if row["law"].startswith("long") else "one engine")
        key = size, row.get("layers"), kind, "graphs" in words
        cell = found.setdefault(key, {}).setdefault(where, [0, 0])
        cell[0] += row["differing"]
        cell[1] += row["of"]
    return found


def laws_table(rows: list[dict]) -> Iterator[str]:
    """Numbers compared; with how many of them differ, if any does."""
    yield f"| model | format | {' | '.join(TITLES)} |"
    yield "|---|---|" + "---|" * len(TITLES)
    for (size, layers, kind, graphs), cells in numbers(rows).items():
        shown = []
        for column in COLUMNS:
            differing, of = cells.get(column, (0, 0))
            shown.append(f"{differing} of {of:,} differ" if differing else f"{of:,}" if of else "")
        form = KINDS[kind] + ("" if graphs else ", no graphs")
        yield f"| {MODELS[size].format(layers)} | {form} | {' | '.join(shown)} |"


def graphs_table(rows: list[dict]) -> Iterator[str]:
    """Engines whose short prefills are graphs: numbers compared, and what came from graphs meanwhile."""
    yield "| model | format | engine | numbers | differing | decode steps from graphs | prefills from graphs |"
    yield "|---|---|---|---|---|---|---|"
    for end in (row for row in rows if "decode_steps_from_graphs" in row):
        size, kind, *words = end["engine"].split("-")
        counts = [(row["differing"], row["of"]) for row in rows if "law" in row and row["engine"] == end["engine"]]
        what = TITLES[COLUMNS.index(column(words) or "one engine")]
        differing, of = map(sum, zip(*counts, strict=True))
        replayed = end.get("prefills_from_graphs", "not counted")
        cells = MODELS[size].format(end.get("layers")), KINDS[kind], what, f"{of:,}", differing
        yield f"| {' | '.join(map(str, cells))} | {end['decode_steps_from_graphs']:,} | {replayed} |"


def stock_table(rows: list[dict]) -> Iterator[str]:
    """Our operators beside SGLang's (stock_operators.py)."""
    fields = ("operator", "elements", "differing", "max_ulp", "largest")
    yield from HEADER
    yield from (line(*(row[field] for field in fields)) for row in rows if "operator" in row)


def prefill_table(rows: list[dict]) -> Iterator[str]:
    """The learner on SGLang's kernels against an unmodified server's prefill, and its stages."""
    yield "| law | layers | prompts | differing | of what its decode emitted |"
    yield "|---|---|---|---|---|"
    for row in (row for row in rows if row.get("law") == "align --stock"):
        decode = f"{row['decode_differing']:,} of {row['decode_of']:,}, by up to {row['decode_max_nats']:.3g} nats"
        of = f"{row['differing']} of {row['of']:,} log-probs"
        yield f"| `align --stock` | {row['layers']} | {row['prompts']} | {of} | {decode} |"
    for row in (row for row in rows if row.get("law") == "stages"):
        of = f"{row['unlike_stages']} of {row['stages']} stages, {row['differing']} of {row['of']} log-probs"
        yield f"| stage by stage | {row['layers']} | one of {row['prompt']} tokens | {of} | |"


def syncs_table(rows: list[dict]) -> Iterator[str]:
    """The quickest sync of each kind; seconds by part, and what the learner found of the engine after it."""
    yield "| model | format | learner on | route | MiB | quantise | send | load | prove | learner against engine |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    best: dict[tuple, dict] = {}
    for row in (row for row in rows if "route" in row):
        size, kind, *_ = row["engine"].split("-")
        on = ("the same GPU" if row["same_gpu"] else "another GPU") + ", in its process" * row.get("in_process", False)
        key = size, row.get("layers"), kind, on, row["route"] + ", gloo" * (row.get("backend") == "gloo")
        best[key] = min(best.get(key, row), row, key=lambda row: sum(row["seconds"].values()))
    for (size, layers, kind, on, route), row in best.items():
        parts = " | ".join(f"{x:.3f}" for x in row["seconds"].values())
        after = f"{row['learner_differing']} of {row['learner_of']}" if "learner_of" in row else ""
        model, mib = MODELS[size].format(layers), f"{row['bytes'] / 2**20:,.1f}"
        yield f"| {model} | {KINDS[kind]} | {on} | {route} | {mib} | {parts} | {after} |"


def gsm8k_table(rows: list[dict]) -> Iterator[str]:
    """Problems of GSM8K through `align --sampler`."""
    fields = ("tokens", "cached_tokens", "retractions", "log_probs", "expert_ids", "differing")
    yield "| recipe | temperature, top-p | pool | " + " | ".join(field.replace("_", " ") for field in fields) + " |"
    yield "|---|---|---|" + "---|" * len(fields)
    for row in rows:
        how = f"| `{row['recipe']}` | {row['temperature']:g}, {row['top_p']:g} | {row['pool']:,} | "
        yield how + " | ".join(f"{row[field]:,}" for field in fields) + " |"


if __name__ == "__main__":
    laws = read(LAWS)
    tables = laws_table(laws), graphs_table(read(GRAPHS)), laws_table(read(CPU_LAWS)), syncs_table(laws)
    for lines in (*tables, gsm8k_table(read(GSM8K)), prefill_table(read(STOCK)), stock_table(read(STOCK))):
        print(*lines, "", sep="\n")
