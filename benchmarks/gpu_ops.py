"""Times of the GPU kernels against PyTorch's libraries in one run: `python benchmarks/gpu_ops.py [--ops ...]`.

Bits come first: every row says how many sampled outputs differ from the CPU reference (wrong, to be 0), and how many of
the library's outputs differ from ours (torch bits; a split K shows here). A ratio is the library's time over ours, so
1.00 is as fast; the row-wise operators stand against a device-to-device copy of the same bytes. Products run as the
table of choices says; with --every, `best` is the fastest schedule of ours that has the bits, whatever was chosen.
"""

import argparse
import json
import os
import platform
import time
from functools import partial
from pathlib import Path

import torch


def line(row: dict) -> str:
    """One row of the table, within about 120 columns."""
    fixed = f" fixed {row['fixed_ms'] / row['ms']:5.2f}" if "fixed_ms" in row else ""
    rate = " ".join(f"{row[key]:6.{digits}f} {unit}" for key, digits, unit in
                    (("tflops", 0, "TF/s"), ("tb_s", 2, "TB/s")) if key in row)  # fmt: skip
    bits = f" torch bits {row['torch_differs']}" if "torch_differs" in row else ""
    fixed += f" batched {row['batched_ms'] / row['ms']:5.2f}" if "batched_ms" in row else ""
    peers = [name for name in ("loop", "copy") if f"{name}_ms" in row]
    fixed += "".join(f" {name} {row[f'{name}_ms'] / row['ms']:5.2f}" for name in peers)
    best = f" best {row['torch_ms'] / row['best'][1]:5.2f} {row['best'][0].replace(' ', '')}" if "best" in row else ""
    return (
        f"{row['shape']:14} {row['M']!s:>9} wrong {row['wrong']} {row['ms']:8.4f} ms {rate} ratio "
        f"{row['torch_ms'] / row['ms']:5.2f}{fixed}{best}{bits}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["dense", "odd", "grouped", "pipeline", "prefill", "decode", "rows", "adamw"]
    parser.add_argument("--ops", nargs="+", default=every)
    parser.add_argument("--out", type=Path, help="folder for gpu_ops.jsonl, every schedule's time")
    parser.add_argument("--every", action="store_true", help="of products: the time of every schedule, for `best`")
    parser.add_argument("--seconds", type=float, default=420, help="no new row is begun after this many seconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    from gpu_bench import attend, gradients, optimizer, pipeline, products, quantised
    from gpu_bench import rows as row_ops
    from gpu_bench.timing import geometric_mean

    from minitransformer.tuning.origin import origin

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    of = origin()
    print(f"{of['machine']}, Python {platform.python_version()}, sources {of['sources']}")
    sources = {op: partial(getattr(products, op), every=args.every) for op in ("dense", "grouped")}
    sources |= {"odd": products.odd, "prefill": attend.prefill, "decode": attend.decode, "rows": row_ops.rows}
    sources |= {"fp4": quantised.products, "experts": quantised.experts, "quantise": quantised.quantisers}
    sources |= {"adamw": optimizer.optimizer}
    sources |= {"gradients": gradients.gradients, "pipeline": pipeline.pipeline}
    begin, rows = time.monotonic(), []
    for op in args.ops:
        print(f"-- {op}")
        for row in sources[op]():
            rows.append({"bench": op} | of | row)
            print(line(row), flush=True)
            if args.out:
                with open(args.out / "gpu_ops.jsonl", "a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            if time.monotonic() - begin > args.seconds:
                print(f"out of time after {time.monotonic() - begin:.0f} s")
                break
    for op in dict.fromkeys(row["bench"] for row in rows):
        ratios = {"chosen": [], "best": [], "fixed tile / chosen": []}
        for row in (r for r in rows if r["bench"] == op):
            ratios["chosen"].append(row["torch_ms"] / row["ms"])
            ratios["best"] += [row["torch_ms"] / row["best"][1]] if "best" in row else []
            ratios["fixed tile / chosen"] += [row["fixed_ms"] / row["ms"]] if "fixed_ms" in row else []
        text = ", ".join(f"{name} {geometric_mean(v):.2f} (least {min(v):.2f})" for name, v in ratios.items() if v)
        print(f"{op}: geometric mean against torch: {text}")
    wrong = sum(row["wrong"] > 0 for row in rows)
    print(f"{wrong} of {len(rows)} rows with wrong bits; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
