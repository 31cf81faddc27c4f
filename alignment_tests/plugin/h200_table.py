"""The tables of docs/sglang.md from the rows that `h200 laws` and `h200 sync` wrote.

  python3 -m alignment_tests.plugin.h200_table [benchmarks/results/h200_sglang_laws.jsonl]
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from alignment_tests.plugin.h200_engines import VARIANTS

FILE = Path(__file__).resolve().parents[2] / "benchmarks/results/h200_sglang_laws.jsonl"
MODELS = {"tiny": "tiny: 3 layers, hidden 256, 8 experts, top-2", "smol": "the demo checkpoint",
          "wide": "Qwen3-30B-A3B's widths, {} layers"}  # fmt: skip
KINDS = {"bf16": "BF16", "nvfp4": "`nvfp4_per_token`", "packed": "packed NVFP4"}
COLUMNS = ("one engine", "its long contexts", "page16-chunk64", "chunk16-tight", "chunk64-mixed", "twin")
TITLES = ("one engine", "its long contexts", "pages of 16, chunks of 64", "chunks of 16, retraction", "mixed chunks",
          "on another GPU")  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(rows: list[dict]) -> dict[tuple, dict[str, list[int]]]:
    """(size, layers, kind, graphs) -> column -> [differing, compared]."""
    found: dict[tuple, dict[str, list[int]]] = {}
    for row in (row for row in rows if "law" in row):
        size, kind, *words = row["engine"].split("-")
        variants = "-".join(word for word in words if word in VARIANTS)
        column = variants or ("its long contexts" if row["law"].startswith("long") else "one engine")
        key = size, row.get("layers"), kind, "graphs" in words
        cell = found.setdefault(key, {}).setdefault(column, [0, 0])
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


def syncs_table(rows: list[dict]) -> Iterator[str]:
    """The last sync of each route; seconds by part."""
    yield "| model | format | learner | route | MiB | quantise | send | load | prove |"
    yield "|---|---|---|---|---|---|---|---|---|"
    last = {(row["engine"], row.get("same_gpu"), row["route"]): row for row in rows if "route" in row}
    for (engine, same_gpu, route), row in last.items():
        if not row["verdict"].startswith("EQUAL") or any(word in VARIANTS for word in engine.split("-")):
            continue
        size, kind, *_ = engine.split("-")
        parts = " | ".join(f"{x:.3f}" for x in row["seconds"].values())
        where, model = "the same GPU" if same_gpu else "another GPU", MODELS[size].format(row.get("layers"))
        yield f"| {model} | {KINDS[kind]} | {where} | {route} | {row['bytes'] / 2**20:,.1f} | {parts} |"


if __name__ == "__main__":
    rows = read(Path(sys.argv[1]) if sys.argv[1:] else FILE)
    print(*laws_table(rows), "", *syncs_table(rows), sep="\n")
