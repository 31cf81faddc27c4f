"""Draws results/*gpu_ops.jsonl as SVG: `python benchmarks/plot.py [--out docs/plots]`; needs matplotlib.

A point is a library's time over ours in the same run, so above 1.00 we are faster; of a row measured more than once the
last counts. One figure a benchmark, a line a shape.
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
# benchmark -> what the ratio is against, the goal, the name of the horizontal axis
FIGURES = {
    "dense": ("torch.mm as it comes", 1.0, "rows"),
    "dense_fixed": ("the fixed 128x128x64 tile", 1.3, "rows"),
    "grouped": ("torch._grouped_mm", 1.0, "tokens"),
    "pipeline": ("transformers' grouped_mm experts", 1.0, "tokens"),
    "gradients": ("torch.mm, torch._grouped_mm", 1.0, "tokens"),
    "prefill": ("cuDNN SDPA", 0.95, "sequences x tokens"),
    "decode": ("flash SDPA", 1.0, "batch x context"),
    "rows": ("a copy of the same bytes", 0.7, "rows"),
}


def read(files: list[Path]) -> dict[str, dict[str, dict]]:
    """benchmark -> shape -> {place on the axis: ratio}. ValueError names a line that is no row of a benchmark."""
    found: dict[str, dict[str, dict]] = {}
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(text)
                if row["bench"] in ("odd", "adamw") or "torch_ms" not in row:
                    continue  # places of its own for each line, two points, or a row without a peer
                ratios = {row["bench"]: row["torch_ms"] / row["ms"]}
                if "fixed_ms" in row:
                    ratios[row["bench"] + "_fixed"] = row["fixed_ms"] / row["ms"]
                for bench, ratio in ratios.items():
                    found.setdefault(bench, {}).setdefault(row["shape"], {})[row["M"]] = ratio
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(f"{file}:{number}: not a row of a benchmark ({error!r})") from None
    return found


def draw(bench: str, shapes: dict[str, dict], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    against, goal, axis = FIGURES.get(bench, ("the peer", 1.0, ""))
    figure = Figure(figsize=(7, 4), layout="constrained")
    plot = figure.subplots()
    places = list(dict.fromkeys(M for points in shapes.values() for M in points))
    if all(isinstance(M, int) for M in places):
        places.sort()
    for name, points in shapes.items():
        at = [i for i, M in enumerate(places) if M in points]
        plot.plot(at, [points[places[i]] for i in at], marker="o", markersize=3, linewidth=1, label=name)
    plot.axhline(1.0, color="black", linewidth=0.8)
    if goal != 1.0:
        plot.axhline(goal, color="grey", linewidth=0.8, linestyle="--", label=f"goal {goal:g}")
    plot.set_xticks(range(len(places)), [str(M) for M in places], rotation=0 if len(places) < 9 else 45)
    plot.set_xlabel(axis), plot.set_ylabel("their time / ours"), plot.set_title(f"{bench}: against {against}")
    plot.set_ylim(bottom=0)
    plot.legend(fontsize="small", ncols=2 if len(shapes) > 6 else 1)
    with rc_context({"svg.hashsalt": bench}):  # equal rows, equal file
        figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="results (default: benchmarks/results/*gpu_ops.jsonl)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "plots")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for bench, shapes in read(args.files or sorted((HERE / "results").glob("*gpu_ops.jsonl"))).items():
        path = args.out / f"{bench}.{args.format}"
        draw(bench, shapes, path)
        print(path)


if __name__ == "__main__":
    main()
