"""The learner's head (lm_head and log-prob), logits in parts against logits made whole: `python benchmarks/head.py`.

At the widths of Qwen3-30B-A3B. First the bits of both, all log-probs and gradients; then medians by turns, and the most
memory of a call above what was there before. Last some layers with it, both ways, all of their tokens scored.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

GIB = 2**30


def whole(h, w, ids, temperatures):
    from minitransformer.ops.linear import linear
    from minitransformer.ops.logprob import logprob

    return logprob(linear(h, w, torch.float32), ids, float(temperatures[0]))


def whole_of_a_pack(self, one, temperatures, trace=None):
    """In the place of Learner._log_probs."""
    from minitransformer.ops.logprob import logprob

    sizes = [b - a for a, b in pairwise(one.bounds)]
    logits = self.model(one.batch, recompute=self.recompute).split(sizes)
    rows = zip(one.sequences, logits, one.target_ids_L.split(sizes), strict=True)
    return torch.cat([logprob(x, ids, temperatures[s]) for s, x, ids in rows])


def call(function, h, w, ids, temperatures, d) -> tuple[list, float, float, float]:
    """(log-probs, dh, dW), milliseconds forward and backward, GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    out = function(h, w, ids, temperatures)
    events[1].record()
    found = [out.detach(), *torch.autograd.grad(out, (h, w), d)]
    events[2].record()
    torch.cuda.synchronize()
    times = (a.elapsed_time(b) for a, b in pairwise(events))
    return found, *times, (torch.cuda.max_memory_allocated() - before) / GIB


def head(rows: int, repeats: int) -> dict:
    from gpu_bench.decoder import WIDTHS

    from minitransformer.learner import scoring

    V, D = WIDTHS["vocab_size"], WIDTHS["hidden_size"]
    gen = torch.Generator("cuda").manual_seed(0)
    h, w = (torch.randn(n, D, generator=gen, device="cuda") for n in (rows, V))
    h, w = h.bfloat16().requires_grad_(), (w * D**-0.5).bfloat16().requires_grad_()
    ids = torch.randint(V, (rows,), generator=gen, device="cuda")
    args = h, w, ids, torch.full((rows,), 0.7, device="cuda"), torch.randn(rows, generator=gen, device="cuda")
    found = {"bench": "head", "rows": rows, "chunk_bytes": scoring.CHUNK_BYTES}
    a, b = call(scoring.head, *args)[0], call(whole, *args)[0]
    found["wrong"] = sum(int((x.view(torch.int16) != y.view(torch.int16)).sum()) for x, y in zip(a, b, strict=True))
    del a, b
    times = {"parts": [], "whole": []}
    for _ in range(repeats):
        for name, function in (("parts", scoring.head), ("whole", whole)):
            times[name].append(call(function, *args)[1:])
    for name, columns in times.items():
        for key, values in zip(("forward_ms", "backward_ms", "peak_gib"), zip(*columns, strict=True), strict=True):
            found[f"{name}_{key}"] = sorted(values)[len(values) // 2]
    return found


def model_both_ways(layers: int, tokens: int, repeats: int) -> Iterator[dict]:
    """Forward and backward of some layers and the head, then whole updates; layers recomputed, every token scored."""
    from qwen3_30b_learner import build, checksums, samples

    from minitransformer.learner.learner import Learner
    from minitransformer.learner.losses import nll

    model, length = build(layers), min(tokens, 4096)
    every = samples(tokens, length, tokens, model.config.vocab_size)
    learner = Learner(model, lr=0.0, recompute=True, max_tokens_per_pack=tokens)  # the weights stay
    (pack,) = learner._pack([s.ids for s in every], [s.prompt_len for s in every])
    ways = {"parts": Learner._log_probs, "whole": whole_of_a_pack}

    def passes() -> tuple:
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        learner._log_probs(pack, [1.0] * len(every)).sum().backward()
        torch.cuda.synchronize()
        found = time.perf_counter() - begin, torch.cuda.max_memory_allocated() / GIB, *checksums(model)
        for p in model.parameters():
            p.grad = None
        return found

    def update() -> tuple:
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        norm = learner.update(every, nll).grad_norm
        torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / GIB, norm

    for bench, function in (("passes", passes), ("update", update)):
        found, times, bits = {"bench": bench, "layers": layers, "tokens": tokens}, {name: [] for name in ways}, set()
        for _ in range(repeats + 1):  # the first one compiles, and makes the masters
            for name, log_probs in ways.items():
                Learner._log_probs = log_probs
                seconds, peak, *sums = function()
                times[name].append((1000 * seconds, peak))
                bits.add(tuple(sums))
        for name, rows in times.items():
            found[f"{name}_ms"], found[f"{name}_peak_gib"] = sorted(rows[1:])[repeats // 2]
        yield found | {"same_bits": len(bits) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--chunks", type=int, nargs="*", help="log2 of CHUNK_BYTES instead of the package's")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 0: none")
    parser.add_argument("--tokens", type=int, default=16384, help="of the model's pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the results, a line each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    from minitransformer.learner import scoring
    from minitransformer.tuning.origin import origin

    def show(row: dict) -> None:
        row = origin() | row
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    usual = scoring.CHUNK_BYTES
    for chunk in args.chunks or [None]:
        scoring.CHUNK_BYTES = 1 << chunk if chunk else usual
        for rows in args.rows:
            show(head(rows, args.repeats))
            torch.cuda.empty_cache()
    scoring.CHUNK_BYTES = usual
    for row in model_both_ways(args.layers, args.tokens, args.repeats) if args.layers else ():
        show(row)


if __name__ == "__main__":
    main()
