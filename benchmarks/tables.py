"""Markdown of results/*.jsonl for docs/performance.md: `python benchmarks/tables.py dense [grouped ...] [--file F]`.

BENCH: dense, grouped, pipeline, prefill, decode, gradients, rows, all of h200_gpu_ops.jsonl; experts, quantise of
h200_nvfp4.jsonl; layer of h200_layer.json with h200_gpu_ops.jsonl.

The floors are times at three rates, a yardstick and no bound: bytes at 4.3 TB/s, as an H200's memory was seen to move
them (4.65 when only read; 4.8 on paper), tensor-core operations at 790 TFLOP/s, as a large BF16 product was seen to run
(989 on paper), other FP32 operations at 33.5 a picosecond (on paper). *x floor* is our time over the larger floor.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

TB_S, TFLOP_S = 4.3, 790.0
FP32_T_S = 33.5  # 132 multiprocessors x 128 lanes x 1.98 GHz; an FMA is one
HERE = Path(__file__).resolve().parent
HEADS, KV_HEADS, WIDTH, EXPERTS, TOP_K = 32, 4, 128, 128, 8
HIDDEN, EXPERT, VOCAB = 2048, 768, 151936

# FP32 operations a token by the operators' specs (minitransformer/ops/): sums, products, FMAs, divisions, maxima and
# comparisons one each, exp2_32 ten; no conversion, no address, and of a draw neither its hash nor its FP64 logarithms.
EXP2 = 10
OPERATIONS = {
    "rms_norm": 4 * HIDDEN, "rms_norm+res": 5 * HIDDEN, "q_norm": 4 * HEADS * WIDTH, "rope": 3 * HEADS * WIDTH,
    "router": EXPERTS * (5 + EXP2 + TOP_K), "swiglu": TOP_K * EXPERT * (4 + EXP2),
    "swiglu_amax": TOP_K * EXPERT * (5 + EXP2), "embedding": 0, "logprob": VOCAB * (5 + EXP2), "plan": 0,
    "gather": 0, "draw": 2 * VOCAB, "gather_amax": HIDDEN, "combine": TOP_K * HIDDEN, "combine_w": TOP_K * HIDDEN,
}  # fmt: skip
QUANTISE = 3  # an element: the block's maximum, the product, the rounding


def tensor_ms(operations: float) -> float:
    return 1e-9 * operations / TFLOP_S


def memory_ms(size: float) -> float:
    return 1e-9 * size / TB_S


def fp32_ms(operations: float) -> float:
    return 1e-9 * operations / FP32_T_S


def experts_hit(tokens: int) -> float:
    """Experts in use on average, each token's TOP_K uniform."""
    return EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)


def floors(row: dict) -> tuple[float, float]:
    """Milliseconds by bytes and by operations, from a row's shape or from the rates that it states."""
    bench, ms = row.get("bench"), row["ms"]
    if bench in ("prefill", "decode"):
        sequences, length = map(int, row["M"].split(" x "))
        queries = length if bench == "prefill" else 1
        size = 4 * sequences * WIDTH * (KV_HEADS * length + HEADS * queries)
        pairs = length * (length + 1) / 2 if bench == "prefill" else length
        return memory_ms(size), tensor_ms(4 * HEADS * WIDTH * sequences * pairs)
    if bench == "rows":
        return memory_ms(row["bytes"]), fp32_ms(row["M"] * OPERATIONS[row["shape"]])
    if bench == "quantise":
        elements = row["M"] * int(row["shape"].rsplit("x", 1)[1])
        return row["tb_s"] * ms / TB_S, fp32_ms(QUANTISE * elements)
    if bench == "experts":  # weights of 4.5 bits, x and y
        size = experts_hit(row["M"]) * 3 * EXPERT * HIDDEN * 0.5625 + 4 * row["M"] * HIDDEN
        return memory_ms(size), tensor_ms(6 * row["M"] * TOP_K * EXPERT * HIDDEN)
    if bench == "gradients":
        return memory_ms(gradient_bytes(row)), row["tflops"] * ms / TFLOP_S
    return row["tb_s"] * ms / TB_S, row.get("tflops", 0) * ms / TFLOP_S


def gradient_bytes(row: dict) -> float:
    """Both operands read and the gradient written, once a gradient; routing weights left out."""
    grouped, count = row["shape"].endswith(("gate_up", "down")), 1 + ("," in row["shape"])
    rows, matrices = (row["M"] * TOP_K, EXPERTS) if grouped else (row["M"], 1)
    return 2 * count * (rows * (row["N"] + row["K"]) + matrices * row["N"] * row["K"])


def markdown(names: list[str], rows: Iterator[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def table(rows: list[dict], scale: float = 1, digits: int = 4) -> list[str]:
    """scale, digits: 1000 and 1 for microseconds."""
    fixed, batched = (any(name in row for row in rows) for name in ("fixed_ms", "batched_ms"))
    decode, order = any(row.get("bench") == "decode" for row in rows), any("in_order_ms" in row for row in rows)
    unit = "ms" if scale == 1 else "µs"
    names = ["shape", "rows", unit, "floor: bytes", "floor: operations", "x floor", f"library, {unit}", "ratio"]

    def cells(row: dict) -> list[str]:
        by = floors(row)
        times = [f"{scale * ms:.{digits}f}" for ms in (row["ms"], *by, row["torch_ms"])]
        found = [row["shape"], str(row["M"]), *times[:3], f"{row['ms'] / max(by):.2f}", times[3]]
        found.append(f"{row['torch_ms'] / row['ms']:.{3 if row.get('bench') == 'prefill' else 2}f}")
        for name, has, places in (("fixed_ms", fixed, 1), ("batched_ms", batched, 2)):
            found += [f"{row[name] / row['ms']:.{places}f}" if name in row else "-"] if has else []
        found += [f"{row['tb_s'] / TB_S:.2f}"] if decode else []
        if order:
            ms = row["in_order_ms"]
            found += [f"{scale * ms:.{digits}f}", f"{row['torch_ms'] / ms:.2f}"]
        return found

    names += ["fixed tile"] * fixed + ["against batched"] * batched + [f"of {TB_S} TB/s"] * decode
    names += [f"pages in order, {unit}", "ratio"] * order
    return markdown(names, map(cells, rows))


def operators(rows: list[dict]) -> list[str]:
    """A line an operator, a column a number of tokens; floors grow with the tokens, so they stand once, for 1,024."""
    counts = sorted({row["M"] for row in rows})
    found = {(row["shape"], row["M"]): row for row in rows}

    def cells(shape: str) -> list[str]:
        line = [shape, *(f"{1000 * ms:.2f}" for ms in floors(found[shape, 1024]))]
        for count in counts:
            if not (row := found.get((shape, count))):
                line.append("-")
                continue
            gap = row["ms"] / max(floors(row))
            ratio = row["torch_ms"] / row["ms"]
            line.append(f"{1000 * row['ms']:.1f}, {gap:.{0 if gap > 10 else 2}f}, **{ratio:.2f}**")
        return line

    names = ["operator", "floor of 1,024, µs: bytes", "operations", *(f"{count:,}" for count in counts)]
    return markdown(names, map(cells, dict.fromkeys(row["shape"] for row in rows)))


def layer(rows: list[dict]) -> list[str]:
    """Parts of a layer of 16,384 tokens: products by their own benchmark, attention by the profiler, row-wise what of
    the profiler's time is left."""
    from layer import floors as parts

    profile = json.loads((HERE / "results" / "h200_layer.json").read_text(encoding="utf-8"))
    kernels = {name: ms for name, ms, _ in profile["kernels"]}
    alone = {(row["bench"], row["shape"]): row["ms"] for row in rows if row["M"] == 16384}
    times = {
        "qkv, o, router": (sum(alone["dense", name] for name in ("qkv", "o", "gate")), sum(
            alone["gradients", f"{d} {name}"] for d in ("dX", "dW") for name in ("qkv", "o", "router"))),
        "experts": (sum(alone["grouped", name] for name in ("fc1", "fc2")),
                    sum(alone["gradients", f"dX, dW {name}"] for name in ("gate_up", "down"))),
        "attention": (kernels["prefill"], sum(kernels[f"{name}_kernel"] for name in ("dkv", "dq", "stats"))),
    }  # fmt: skip
    lines, found = [], parts(16384, 4)
    for part, of_part in times.items():
        lines += [(f"{part}, {name}", of_part[i], *found[part][i]) for i, name in enumerate(("forward", "backward"))]
    both = [sum(pair) for pair in zip(*found["row-wise"], strict=True)]
    rest = sum(kernels.values()) - sum(map(sum, times.values()))
    lines.append(("row-wise operators, forward and backward", rest, *both))
    lines = [(*line, max(line[2:])) for line in lines]
    for name, ms, passes in (("forward", "forward_ms", 1), ("forward and backward", "train_ms", 2)):
        pairs = [pair for part in found.values() for pair in part[:passes]]
        sums = (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs), sum(map(max, pairs)))
        lines.append((f"the layer, {name}", profile["ours"][ms], *sums))
    made = ([name, *(f"{ms:.2f}" for ms in times), f"{times[0] / floor:.2f}"] for name, *times, floor in lines)
    return markdown(["part", "ms", "floor: bytes", "floor: operations", "x floor"], made)


SHOWN: dict[str, Callable] = {"rows": operators, "layer": layer} | {
    bench: lambda rows: table(rows, 1000, 1) for bench in ("pipeline", "decode", "experts", "quantise")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", default=["dense", "grouped"], metavar="BENCH", help="dense, grouped, ...")
    parser.add_argument("--file", type=Path, default=HERE / "results" / "h200_gpu_ops.jsonl")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]
    for bench in args.benches:
        chosen = [row for row in rows if bench in ("layer", row["bench"])]
        print(f"**{bench}**\n", *SHOWN.get(bench, table)(chosen), "", sep="\n")


if __name__ == "__main__":
    main()
