"""What page.py puts into the tables of docs/performance.md and its notes: each function makes a table's rows.

It is given the rows as they stand, whose words it keeps; results/ owns the numbers.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean as mean

import tables

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RECIPES = {"bf16": "", "nvfp4_per_token": ", NVFP4"}
Cells = list[list[str]]


def read(name: str) -> list[dict]:
    """Rows of a file of results; one object is one row."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(text)] if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


def rows(bench: str, name: str = "h200_gpu_ops.jsonl") -> list[dict]:
    return [row for row in read(name) if row.get("bench") == bench]


def body(lines: list[str]) -> Cells:
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def same(bench: str, drop: int = 0, name: str = "h200_gpu_ops.jsonl") -> Callable[[Cells], Cells]:
    """tables.py's own, without its first columns."""
    return lambda old: [row[drop:] for row in body(tables.SHOWN.get(bench, tables.table)(rows(bench, name)))]


def ratios(chosen: list[dict], key: str = "torch_ms") -> list[float]:
    return [row[key] / row["ms"] for row in chosen]


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def dense(old: Cells) -> Cells:
    """A line a shape, a column a number of rows: our time against torch.mm, in brackets against the fixed tile."""
    found = {(r["shape"], r["M"]): f"{ratios([r])[0]:.2f} ({ratios([r], 'fixed_ms')[0]:.1f})" for r in rows("dense")}
    counts = sorted({M for _, M in found})
    return [[row[0], *(found.get((row[0].split()[0], M), "-") for M in counts)] for row in old]


def odd(old: Cells) -> Cells:
    """A line a shape: some numbers of rows that nobody chose, then all of them."""
    made = []
    for row in old:
        found = {r["M"]: ratios([r])[0] for r in rows("odd") if r["shape"] == row[0].split()[0]}
        least = min(found, key=found.get)
        chosen = [f"{found[M]:.2f}" if M in found else "-" for M in (1100, 1500, 3000, 5000, 12345)]
        made.append([row[0], *chosen, str(len(found)), f"{mean(found.values()):.2f}", f"{found[least]:.2f} ({least})"])
    return made


def pipeline(old: Cells) -> Cells:
    """In graphs, then eagerly."""
    both = {kind: [r for r in rows("pipeline") if r["shape"] == kind] for kind in ("CUDA graphs", "eager")}
    graphs, eager = (body(tables.table(chosen, 1000, 1)) for chosen in both.values())
    return [[*a[1:6], *a[7:9], f"{float(b[2]):.0f}", *b[7:9]] for a, b in zip(graphs, eager, strict=True)]


def quantise(old: Cells) -> Cells:
    return [[row[0].replace(" ", ", "), *row[2:]] for row in body(tables.SHOWN["quantise"](rows("quantise", NVFP4)))]


def whole(old: Cells) -> Cells:
    """Words of the page with the numbers of both recipes."""
    found = {recipe: {row["bench"]: row for row in read(MODEL) if row.get("recipe") == recipe} for recipe in RECIPES}
    lines = {
        "sampling": lambda r: seconds(r["whole"], "sampling_s_second", "prefill_tokens_s"),
        "scoring": lambda r: seconds(r["whole"], "scoring_s_second", "scored_tokens_s"),
        "peak": lambda r: f"{r['memory']['peak_gib']:.1f} GiB",
    }
    made = []
    for row in old:
        text = next(line for name, line in lines.items() if row[0].startswith(name))
        made.append([row[0], *(replaced(cell, text(of)) for cell, of in zip(row[1:], found.values(), strict=True))])
    return made


def seconds(row: dict, time: str, rate: str) -> str:
    return f"{row[time]:.2f} s; {round(row[rate], -2):,.0f}"


def replaced(cell: str, numbers: str) -> str:
    """A cell that begins with these numbers, and then has what it had."""
    pattern = re.sub(r"[\d.,]+\d|\d", r"[\\d.,]*\\d", re.escape(numbers).replace(r"\.", ".").replace(r"\ ", " "))
    return re.sub(f"^{pattern}", numbers, cell, count=1)


def steps(old: Cells) -> Cells:
    made = []
    for recipe, name in RECIPES.items():
        for r in (row for row in rows("decode", MODEL) if row["recipe"] == recipe):
            share, rate = r["floor_ms"] / r["replay_ms"], r["tokens_s"]
            times = [f"{r[key]:.1f}" for key in ("floor_ms", "replay_ms")]
            made.append([f"{r['requests']}{name}", *times, f"{share:.2f}", f"{r['step_ms']:.1f}",
                         f"{round(rate, -1) if rate >= 1000 else rate:,.0f}", f"{r['pool_mib']:.0f} MiB"])  # fmt: skip
    return made


def host(old: Cells) -> Cells:
    walls = ("triton_wall_ms", "short_wall_ms", "repeated_wall_ms", "repeated_host_ms")
    return [[row["batch"] + RECIPES[row["recipe"]], str(row["launches"]), *(f"{row[key]:.1f}" for key in walls),
             f"{row['ratio']:.2f}"] for row in read("h200_host.jsonl")]  # fmt: skip


def layer(old: Cells) -> Cells:
    (found,) = read("h200_layer.json")
    made = []
    for row, one in zip(old, ("ours", "transformers", "ratio"), strict=True):
        r = found[one]
        if one == "ratio":
            made.append([row[0], f"{r['forward_ms']:.2f}", f"{r['train_ms']:.2f}", ""])
        else:
            ms, above = (f"{r['forward_ms']:.2f} ms", f"{r['train_ms']:.1f} ms"), r["peak_gib"] - r["before_gib"]
            made.append([row[0], *ms, f"{above:.2f} GiB"])
    return made


def learner(old: Cells) -> Cells:
    (found,) = read("h200_qwen3_30b_learner.json")
    b, u = found["backward"], found["update"]
    part = f"{b['layers']} of 48 ({b['parameters'] / 1e9:.1f} of 30.5 billion parameters)"
    rate = f"{round(b['tokens_a_second'], -2):,.0f} tokens/s"
    both = f"{b['forward_s']:.3f} s; {b['backward_s']:.3f} s: {rate}"
    return [[old[0][0], part, both, f"{b['peak_gib']:.1f} GiB"],
            [old[1][0], str(u["layers"]), f"{u['update_s']:.3f} s", f"{u['peak_gib']:.1f} GiB"]]  # fmt: skip


def head(old: Cells) -> Cells:
    """The head alone, then layers with it: logits in parts, whole, and what parts cost and save."""
    made = []
    for r in rows("head", HEAD):
        cells = [f"{r[f'{way}_forward_ms']:.2f}; {r[f'{way}_backward_ms']:.2f}" for way in ("parts", "whole")]
        parts, whole = (r[f"{way}_forward_ms"] + r[f"{way}_backward_ms"] for way in ("parts", "whole"))
        peaks = [f"{r[f'{way}_peak_gib']:.2f}" for way in ("parts", "whole")]
        made.append([f"{r['rows']:,}", *cells, f"{parts / whole:.2f}", *peaks])
    for r in rows("passes", HEAD) + rows("update", HEAD):
        what = "forward and backward" if r["bench"] == "passes" else "an update"
        cells, peaks = ([f"{r[f'{way}_{key}']:.{digits}f}" for way in ("parts", "whole")]
                        for key, digits in (("ms", 0), ("peak_gib", 2)))  # fmt: skip
        made.append([f"{r['tokens']:,}, {what} of {r['layers']} layers", *cells,
                     f"{r['parts_ms'] / r['whole_ms']:.2f}", *peaks])  # fmt: skip
    return made


def align(old: Cells) -> Cells:
    """`minitransformer align` of the demo checkpoint, a line a run."""
    keys = ("recipe", "device", "learner_device", "stages", "log_probs")
    return [[*(str(r[key]) for key in keys), f"{r['compared']:,}", str(r["differing"])]
            for r in read("h200_align_demo.jsonl")]  # fmt: skip


def laws(old: Cells) -> Cells:
    """How many cases of each file held; 0 of 0 of a file that is newer than the run."""
    count: dict[str, list[int]] = {}
    for file, held, of in re.findall(r"^(\w+): .* (\d+) of (\d+)", (RESULTS / "h200_test_gpu.txt").read_text(), re.M):
        one = count.setdefault(f"test_{file}", [0, 0])
        one[0], one[1] = one[0] + int(held), one[1] + int(of)
    made = []
    for row in old:
        files = re.findall(r"`(\w+)`", row[0])
        held, of = map(sum, zip(*(count.pop(file, (0, 0)) for file in files), strict=True))
        made.append([row[0], f"{held} of {of}", *row[2:]])
    if count:
        raise ValueError(f"h200_test_gpu.txt has files that the page's table has not: {', '.join(count)}")
    return made


def headline(old: Cells) -> Cells:
    """The last column of the rows whose numbers are in results/."""
    few, many = ([r for r in rows("pipeline") if (r["M"] <= 64) == small] for small in (True, False))
    graphs = [[r for r in part if r["shape"] != "eager"] for part in (few, many)]
    attend = {kind: ", ".join(f"{x:.3f}" for x in ratios([r for r in rows("prefill") if kind in r["shape"]]))
              for kind in ("packed", "paged")}  # fmt: skip
    decode = {r["M"]: ratios([r])[0] for r in rows("decode")}
    worst = min(decode, key=decode.get)
    rest = span([x for M, x in decode.items() if M != worst])
    ordered = [r["torch_ms"] / r["in_order_ms"] for r in rows("decode") if "in_order_ms" in r]
    experts = span(ratios([r for r in rows("experts", NVFP4) if r["M"] <= 64]))
    copies = [r for r in rows("rows") if r["shape"] in COPIES] + rows("quantise", NVFP4)
    one = read("h200_layer.json")[0]["ratio"]
    reached = {
        "dense products": f"{mean(ratios(rows('dense'))):.2f}, least {min(ratios(rows('dense'))):.2f}",
        "at other": f"{mean(ratios(rows('odd'))):.2f}, least {min(ratios(rows('odd'))):.2f}",
        "the same": f"{mean(ratios(rows('dense'), 'fixed_ms')):.2f}",
        "attention, prefill": f"{attend['packed']}; out of pages {attend['paged']}",
        "attention, decode": f"{decode[worst]:.3f} ({worst.replace('32768', '32,768')}), the others {rest}"
        + (f"; pages in order {span(ordered)}" if ordered else ""),
        "experts, BF16": "; ".join(span(ratios(part)) for part in graphs),
        "experts, NVFP4": experts,
        "one layer": f"{one['forward_ms']:.2f}; {one['train_ms']:.2f}",
        "norm, SwiGLU": span(ratios(copies)),
    }
    made = []
    for row in old:
        name = next((name for name in reached if row[0].startswith(name)), None)
        made.append(row if name is None else [*row[:-1], reached[name]])
    return made


def adamw(old: Cells) -> Cells:
    return [[f"{r['M']:,}", f"{r['ms']:.3f}", f"{r['tb_s']:.2f}", *(f"{r[f'{peer}_ms'] / r['ms']:.2f}" for peer in
             ("torch", "loop", "copy"))] for r in rows("adamw")]  # fmt: skip


def origins(old: Cells) -> Cells:
    """Which run a number is of: rows by file, day and sources."""
    found: dict[tuple, Counter] = {}
    for path in (p for p in sorted(RESULTS.glob("h200_*.json*")) if "sglang" not in p.name):
        for row in read(path.name):
            key = path.name, row.get("date", "earlier"), row.get("sources", "not said")
            found.setdefault(key, Counter())[row.get("bench", "")] += 1
    return [[f"`{name}`", day, sources, ", ".join(f"{what} {n}".strip() for what, n in count.items())]
            for (name, day, sources), count in found.items()]  # fmt: skip


MODEL, NVFP4, HEAD = "h200_qwen3_30b.jsonl", "h200_nvfp4.jsonl", "h200_head.jsonl"
COPIES = ("rms_norm", "rms_norm+res", "q_norm", "rope", "swiglu", "swiglu_amax")
TABLES: dict[str, Callable[[Cells], Cells]] = {
    "headline": headline, "laws": laws, "dense": dense, "dense odd": odd, "grouped": same("grouped"),
    "pipeline": pipeline, "experts": same("experts", 1, NVFP4), "quantise": quantise, "prefill": same("prefill"),
    "decode": same("decode", 1), "rows": same("rows"), "whole": whole, "steps": steps, "host": host, "layer": layer,
    "layer parts": lambda old: body(tables.SHOWN["layer"](read("h200_gpu_ops.jsonl"))), "gradients": same("gradients"),
    "learner": learner, "head": head, "adamw": adamw, "align": align, "dense floors": same("dense"), "origins": origins,
}  # fmt: skip
