"""Markdown of results/*.jsonl for docs/performance.md: `python benchmarks/tables.py dense [grouped ...] [--file F]`.

The floors are what no kernel can beat: the bytes that must move at the 4.3 TB/s seen on an H200, and the operations at
the 790 TFLOP/s that its BF16 tensor cores were seen to do. *x floor* is our time over the larger of the two.
"""

import argparse
import json
from pathlib import Path

TB_S, TFLOP_S = 4.3, 790.0
HERE = Path(__file__).resolve().parent


def floors(row: dict) -> tuple[float, float]:
    """Milliseconds by bytes and by operations, from the rates that the row states."""
    return row["tb_s"] * row["ms"] / TB_S, row.get("tflops", 0) * row["ms"] / TFLOP_S


def table(rows: list[dict]) -> list[str]:
    fixed = any("fixed_ms" in row for row in rows)
    names = ["shape", "rows", "ms", "floor: bytes", "floor: operations", "x floor", "library, ms", "ratio"]
    lines = ["| " + " | ".join(names + ["fixed tile"] * fixed) + " |", "|---" * (len(names) + fixed) + "|"]
    for row in rows:
        by_bytes, by_operations = floors(row)
        cells = [row["shape"], str(row["M"]), f"{row['ms']:.4f}", f"{by_bytes:.4f}", f"{by_operations:.4f}",
                 f"{row['ms'] / max(by_bytes, by_operations):.2f}", f"{row['torch_ms']:.4f}",
                 f"{row['torch_ms'] / row['ms']:.2f}"]  # fmt: skip
        cells += [f"{row['fixed_ms'] / row['ms']:.1f}"] if fixed else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", default=["dense", "grouped"], metavar="BENCH", help="dense, grouped, ...")
    parser.add_argument("--file", type=Path, default=HERE / "results" / "h200_gpu_ops.jsonl")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]
    for bench in args.benches:
        print(f"**{bench}**\n", *table([row for row in rows if row["bench"] == bench]), "", sep="\n")


if __name__ == "__main__":
    main()
