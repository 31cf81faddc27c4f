"""The learner at the size of Qwen3-30B-A3B on one GPU: `python benchmarks/qwen3_30b_learner.py`.

Random weights with realistic norms are made on the device. Three parts, each with its peak memory:

    bits      an update of one layer, few tokens: how many elements of gradients and masters differ from the CPU's
    backward  forward, loss and backward at as many of the 48 layers as memory holds (weights and BF16 gradients: 4
              bytes a parameter), layers recomputed, twice: the two runs' gradients must have the same bits
    update    whole updates (with FP32 sums, masters and moments 18 bytes a parameter) at as many layers as fit
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch

GIB = 2**30
SPARE = 10 * GIB  # for one layer's activations, the allocator's gaps and the CUDA context


def parameters(config) -> tuple[int, int]:
    """(of the layer, of everything else) of a config of one layer."""
    from minitransformer.models.qwen3_moe.layout import parameter_shapes

    counts = [0, 0]
    for name, shape in parameter_shapes(config).items():
        counts[not name.startswith("layers.")] += torch.Size(shape).numel()
    return counts[0], counts[1]


def layers_that_fit(bytes_each: int, tokens: int, scored: int, free: int, most: int = 48) -> int:
    from gpu_bench.decoder import config

    from minitransformer.learner.scoring import CHUNK_BYTES

    layer, rest = parameters(config(1))
    kept = 2 * 2 * tokens * config().hidden_size  # a layer's two inputs, BF16
    head = 2 * CHUNK_BYTES + 6 * scored * config().hidden_size  # parts of logits and gradient; dX twice
    largest = layer * (bytes_each > 4) * 2  # the BF16 gradient of the largest tensor beside its FP32 sum
    return max(1, min(most, int((free - SPARE - head - largest - rest * bytes_each) // (layer * bytes_each + kept))))


def build(layers: int):
    from gpu_bench.decoder import config, fill

    from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config(layers))
    fill(model, 0)
    return model


def samples(tokens: int, length: int, scored: int, vocab: int):
    """Sequences of `length` fed tokens; `scored` of all of them are completions."""
    from minitransformer.learner.packing import Sample

    gen, count = torch.Generator().manual_seed(0), tokens // length
    ids = torch.randint(0, vocab, (count, length + 1), generator=gen).tolist()
    return [Sample(one, length + 1 - scored // count, 1.0 - 2.0 * (i % 2)) for i, one in enumerate(ids)]


def checksums(model) -> list[int]:
    """An integer of each gradient's bits, order and all."""
    found, places = [], torch.arange(1, (1 << 25) + 1, device="cuda", dtype=torch.int32)
    for p in model.parameters():
        for part in p.grad.view(-1).view(torch.int16).split(len(places)):
            found.append((part * places[: len(part)]).sum())
    return torch.stack(found).tolist()


def check_bits() -> dict:
    """An update of one layer and the head: elements of the gradients, and of the masters, that are not the CPU's."""
    from minitransformer.learner.learner import Learner
    from minitransformer.learner.losses import nll
    from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

    gpu = build(1)
    cpu = Qwen3MoeForCausalLM(gpu.config)
    cpu.load_state_dict(gpu.state_dict())
    caught = []
    for model in (gpu, cpu):
        learner, sums = Learner(model, lr=1e-3), {}
        apply = learner._apply
        learner._apply = lambda totals, clip, sums=sums, apply=apply: (sums.update(totals), apply(totals, clip))
        learner.update(samples(40, 20, 8, min(512, gpu.config.vocab_size)), nll)
        caught.append((sums, learner.masters))
    return {name: sum(int((ours[n].cpu().view(torch.int32) != x.view(torch.int32)).sum()) for n, x in theirs.items())
            for name, ours, theirs in zip(("differing", "masters_differing"), *caught, strict=True)}  # fmt: skip


def backward(layers: int, args) -> dict:
    """One pass of forward, loss and backward, twice."""
    from minitransformer.learner.learner import Learner

    model = build(layers)
    learner = Learner(model, recompute=True, max_tokens_per_pack=args.tokens)
    every = samples(args.tokens, args.length, args.scored, model.config.vocab_size)
    (pack,) = learner._pack([s.ids for s in every], [s.prompt_len for s in every])
    times, sums = [], []
    for _ in range(3):  # the first one compiles
        for p in model.parameters():
            p.grad = None
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        log_probs = learner._log_probs(pack, [1.0] * len(every))
        torch.cuda.synchronize()
        middle = time.perf_counter()
        log_probs.sum().backward()
        torch.cuda.synchronize()
        times.append((middle - begin, time.perf_counter() - middle))
        sums.append(checksums(model))
        print(f"  forward {times[-1][0]:.3f} s, backward {times[-1][1]:.3f} s", flush=True)
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {
        "layers": layers, "parameters": total, "tokens": args.tokens, "scored": args.scored,
        "repeats": sums[0] == sums[1] == sums[2], "finite": finite,
        "forward_s": times[-1][0], "backward_s": times[-1][1],
        "tokens_a_second": args.tokens / sum(times[-1]), "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }  # fmt: skip


def update(layers: int, args) -> dict:
    """Whole updates through Learner.update."""
    from minitransformer.learner.learner import Learner
    from minitransformer.learner.losses import nll

    model = build(layers)
    learner = Learner(model, recompute=True, max_tokens_per_pack=args.tokens)
    every, times = samples(args.tokens, args.length, args.scored, model.config.vocab_size), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        begin = time.perf_counter()
        norm = learner.update(every, nll).grad_norm
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        print(f"  update {times[-1]:.3f} s, gradient norm {norm:.6g}", flush=True)
    return {"layers": layers, "update_s": times[-1], "peak_gib": torch.cuda.max_memory_allocated() / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["bits", "backward", "update"])
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--scored", type=int, default=1024, help="completion tokens among them")
    parser.add_argument("--out", type=Path, help="folder for qwen3_30b_learner.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    from minitransformer.tuning.origin import origin

    free, _ = torch.cuda.mem_get_info()
    found = origin()
    print(f"{found['machine']}, {free / GIB:.1f} GiB free", flush=True)
    for part in args.parts:
        gc.collect()
        torch.cuda.empty_cache()
        if part == "bits":
            found[part] = check_bits()
        else:
            size = 4 if part == "backward" else 18
            layers = args.layers or layers_that_fit(size, args.tokens, args.scored, torch.cuda.mem_get_info()[0])
            print(f"{part}: {layers} layers, {args.tokens} tokens", flush=True)
            found[part] = (backward if part == "backward" else update)(layers, args)
        print(f"{part}: {found[part]}", flush=True)
        if args.out:
            (args.out / "qwen3_30b_learner.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
