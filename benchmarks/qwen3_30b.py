"""Qwen3-30B-A3B's widths whole on one GPU, random weights: sampling, scoring, and a gap of exactly 0 between them.

    python benchmarks/qwen3_30b.py            48 layers, 61 GB of BF16 weights, made on the GPU
    python benchmarks/qwen3_30b.py --tiny     the same script at toy widths on any machine

Times are wall times, host included; the floor of a decode step is the bytes it has to read (weights of the experts that
the batch is expected to hit, keys and values) at the rate of a device-to-device copy in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from minitransformer.devices import resolve, room_on
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.layout import parameter_bytes
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.sampler.cache import KVCache
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams
from minitransformer.tuning.origin import origin

WIDTHS = dict(
    vocab_size=151936, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144,
    expert_size=768, num_experts=128, top_k=8, norm_topk_prob=True, rms_eps=1e-6, rope_theta=1e6, max_positions=40960,
    tie_word_embeddings=False,
)  # fmt: skip
TINY = dict(
    vocab_size=512, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, expert_size=32,
    num_experts=8, top_k=2, max_positions=512,
)  # fmt: skip


def make(config: Qwen3MoeConfig, device: torch.device) -> Qwen3MoeForCausalLM:
    """Norms around 1, matrices of standard deviation 1 / sqrt(fan-in), the head's three times that."""
    with room_on(device, parameter_bytes(config), "the weights in BF16"):
        model = Qwen3MoeForCausalLM(config)
    rng = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = (3 if "lm_head" in name else 1) * p.shape[-1] ** -0.5
            p.normal_(1, 0.1, generator=rng) if "norm" in name else p.normal_(0, scale, generator=rng)
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy within the device."""
    if device.type == "cpu":
        return float("nan")
    a = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    b, times = torch.empty_like(a), []
    for _ in range(5):
        begin = time.perf_counter()
        b.copy_(a)
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return 2 * a.numel() / min(times)


def step_bytes(model: Qwen3MoeForCausalLM, requests: int, context: float) -> float:
    """Bytes that a decode step has to read: each weight that is used once, and every key and value."""
    c, bits = model.config, 16 if model.recipe.weights == "bf16" else 4.5
    experts = c.num_layers * c.num_experts * 3 * c.hidden_size * c.expert_size
    hit = 1 - (1 - c.top_k / c.num_experts) ** requests  # the share of experts that a batch is expected to use
    others = parameter_bytes(c) - 2 * experts - 2 * c.vocab_size * c.hidden_size  # a few rows of the embedding only
    return others + hit * experts * bits / 8 + requests * context * KVCache.bytes_per_row(c)


def sample(sampler: Sampler, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list, dict]:
    """The completions, and the seconds of every step: those that only decode all requests, and the others."""
    device, ids, done = sampler.model.device, [], {}
    times: dict[str, list[float]] = {"decode": [], "other": []}
    for prompt, p in zip(prompts, params, strict=True):
        ids.append(sampler.add(prompt, p))
    while len(done) < len(ids):
        running = sampler.scheduler.running
        pure = len(running) == len(ids) - len(done) > 0 and all(s.remaining == 1 for s in running)
        synchronize(device)
        begin = time.perf_counter()
        tokens = sampler.step()
        synchronize(device)
        times["decode" if pure and not done else "other"].append(time.perf_counter() - begin)
        done |= {t.request_id: t.completion for t in tokens if t.completion is not None}
    return [done[i] for i in ids], times


def decode_rows(model, args, rate: float) -> Iterator[dict]:
    """One row a batch size: the decode step from CUDA graphs and without."""
    device = model.device
    for requests in args.batches:
        for graphs in (True, False) if args.eager else (True,):
            pages = requests * -(-(args.prompt + args.new) // 16)
            sampler = Sampler(
                model, 16, pages, args.batch_tokens, args.prompt, prefix_cache=False, max_sequences=requests,
                cuda_graphs=graphs,
            )  # fmt: skip
            rng = torch.Generator().manual_seed(requests)
            vocab, lengths = model.config.vocab_size, (requests, args.prompt)
            prompts = torch.randint(vocab, lengths, generator=rng).tolist()
            new = args.new if graphs else min(24, args.new)
            params = [SamplingParams(new, seed=i, ignore_eos=True) for i in range(requests)]
            done, times = sample(sampler, prompts, params)
            step = statistics.median(times["decode"])
            floor = step_bytes(model, requests, args.prompt + args.new / 2) / rate
            row = {"bench": "decode", "recipe": model.recipe.name, "requests": requests, "graphs": graphs}
            row |= {"step_ms": 1e3 * step, "floor_ms": 1e3 * floor, "tokens_s": requests / step}
            row |= {"steps": len(times["decode"])}
            if graphs and sampler.graphs is not None:
                _, replay = next(iter(sampler.graphs._graphs.values()))
                row |= {"replay_ms": 1e3 * timed(replay, device), "pool_mib": pool_bytes(sampler) / 2**20}
                if args.profile:
                    profile(replay, args.out / f"decode_{model.recipe.name}_{requests}.txt")
            yield row
            del sampler


def pool_bytes(sampler: Sampler) -> int:
    """What the graphs' pool holds of the GPU's memory."""
    pool = tuple(sampler.graphs._pool)
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool)


def timed(call, device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def whole(model, args) -> dict:
    """Sampling with continuous batching, then scoring the same tokens; the gap must be 0."""
    device, rng = model.device, torch.Generator().manual_seed(1)
    prompts = torch.randint(model.config.vocab_size, (args.requests, args.prompt), generator=rng).tolist()
    params = [SamplingParams(args.new, seed=i, ignore_eos=True) for i in range(args.requests)]
    pages = args.requests * -(-(args.prompt + args.new) // 16)
    row = {"bench": "whole", "recipe": model.recipe.name, "requests": args.requests, "prompt": args.prompt}
    row["new"] = args.new
    for run in ("first", "second"):  # the first compiles and captures
        sampler = Sampler(
            model, 16, pages, args.batch_tokens, args.prompt, prefix_cache=False, max_sequences=args.requests
        )
        synchronize(device)
        begin = time.perf_counter()
        done, times = sample(sampler, prompts, params)
        row[f"sampling_s_{run}"] = time.perf_counter() - begin
    row["prefill_tokens_s"] = args.requests * args.prompt / sum(times["other"])
    row["new_tokens_s"] = args.requests * args.new / row["sampling_s_second"]
    if device.type == "cuda":
        row["peak_sampling_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    del sampler
    sequences, starts = [c.prompt_ids + c.token_ids for c in done], [len(c.prompt_ids) for c in done]
    learner = Learner(model, max_tokens_per_pack=args.pack)
    for run in ("first", "second"):
        synchronize(device)
        begin = time.perf_counter()
        scores = learner.score(sequences, starts)
        synchronize(device)
        row[f"scoring_s_{run}"] = time.perf_counter() - begin
    row["scored_tokens_s"] = sum(map(len, sequences)) / row["scoring_s_second"]
    sampled, scored = torch.tensor([x for c in done for x in c.log_probs]), torch.cat(scores).cpu()
    row["tokens"], row["differing"] = len(sampled), int((sampled.view(torch.int32) != scored.view(torch.int32)).sum())
    row["max_gap_nats"] = float((sampled - scored).abs().max())
    return row


def profile(call, to: Path) -> None:
    """Writes which kernels a call's time goes to."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    to.write_text(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64], help="requests of the decode rows")
    parser.add_argument("--eager", action="store_true", help="decode rows without graphs too")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of a sampler's step")
    parser.add_argument("--pack", type=int, default=16384, help="tokens of a learner's pass")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "nvfp4_per_token"])
    parser.add_argument("--parts", nargs="+", default=["whole", "decode"], choices=["whole", "decode"])
    parser.add_argument("--tiny", action="store_true", help="toy widths, on the CPU")
    parser.add_argument("--profile", action="store_true", help="write the kernels of each graph to --out")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder; rows are added to its qwen3_30b.jsonl")
    args = parser.parse_args()
    if not (args.tiny or torch.cuda.is_available()):
        print("no CUDA device: nothing measured")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    device = resolve("cpu" if args.tiny else "cuda")
    sizes = WIDTHS | dict(num_layers=args.layers, sparse_layers=(True,) * args.layers) | (TINY if args.tiny else {})
    begin = time.perf_counter()
    model = make(Qwen3MoeConfig(**sizes), device)
    synchronize(device)
    of, size, rate = origin(), parameter_bytes(model.config), copy_rate(device)
    print(f"{args.layers} layers, {size / 1e9:.1f} GB of weights made in {time.perf_counter() - begin:.1f} s; copies "
          f"move {rate / 1e12:.2f} TB/s", flush=True)  # fmt: skip

    def note(row: dict) -> None:
        row = of | {key: None if value != value else value for key, value in row.items()}  # JSON has no NaN
        print(json.dumps(row), flush=True)
        with open(args.out / "qwen3_30b.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    note({"bench": "copy", "layers": args.layers, "weights_gb": size / 1e9, "copy_tb_s": rate / 1e12})
    for recipe in args.recipes:
        model.set_recipe(recipe)
        if "whole" in args.parts:
            note(found := whole(model, args))
            assert found["differing"] == 0, "the sampler's and the learner's log-probs differ"
            print(f"{recipe}: gap 0 over {found['tokens']:,} tokens", flush=True)
        for row in decode_rows(model, args, rate) if "decode" in args.parts else ():
            note(row)
        if device.type == "cuda":
            peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            note({"bench": "memory", "recipe": recipe, "peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30})
            torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
