"""On an H200: the laws with our Triton kernels inside SGLang, and output tokens a second beside stock SGLang.

  python3 -m alignment_tests.plugin.h200 checkpoints DIR      makes DIR/tiny and DIR/wide (widths of Qwen3-30B-A3B)
  python3 -m alignment_tests.plugin.h200 laws DIR             the law table on DIR/tiny, learner in this process
  python3 -m alignment_tests.plugin.h200 speed DIR            ours, and SGLang's own model in the same run

docs/sglang.md says how SGLang gets onto such a machine. --cpu runs all of it on the CPU, to try the script.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from alignment_tests.plugin import laws
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import Server

TINY = dict(vocab_size=1024, hidden_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64,
            intermediate_size=512, expert_size=128, num_experts=8, top_k=2)  # fmt: skip
WIDE = dict(vocab_size=151936, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144,
            expert_size=768, num_experts=128, top_k=8)  # fmt: skip
DETERMINISTIC = ["--enable-deterministic-inference", "--attention-backend", "triton", "--sampling-backend", "pytorch",
                 "--moe-runner-backend", "triton"]  # fmt: skip
FAST = ["--sampling-backend", "pytorch", "--attention-backend", "triton"]
GRAPHS = ["--cuda-graph-backend-decode", "full", "--cuda-graph-max-bs-decode", "256"]
RECIPE = ["--json-model-override-args", '{"minitransformer_recipe": "nvfp4_per_token"}']


def checkpoint(directory: Path, sizes: dict, seed: int = 0) -> None:
    """Random weights of the size 1 / sqrt(fan-in)."""
    config = Qwen3MoeConfig(
        **sizes, norm_topk_prob=True, sparse_layers=(True,) * sizes["num_layers"], rms_eps=1e-6, rope_theta=1e6,
        max_positions=4096, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng, device=device, dtype=torch.bfloat16)
            p.copy_(1 + 0.1 * noise if "norm" in name else noise * p.shape[-1] ** -0.5)
    model.save_pretrained(directory)


def serve(args: argparse.Namespace, name: str, arguments: list[str], stock: bool = False) -> Server:
    began = time.monotonic()
    server = Server(
        args.directory / name, ["--random-seed", "1", "--mem-fraction-static", "0.5", *arguments],
        cpu=args.cpu, stock=stock, timeout=args.timeout,
    )  # fmt: skip
    who = "stock" if stock else "ours"
    print(f"engine up in {time.monotonic() - began:.1f} s: {who} {' '.join(arguments)}", flush=True)
    server.client = Client(server.url)
    return server


def table(args: argparse.Namespace) -> int:
    """The law table of the tiny model, BF16 and NVFP4. -> how many elements differ in all."""
    model = Qwen3MoeForCausalLM.from_pretrained(args.directory / "tiny")
    model = model if args.cpu else model.to("cuda")
    ids = laws.prompts((5, 1, 37, 64, 65, 90, 16, 200), TINY["vocab_size"])
    crowd = laws.prompts([3 + 7 * i % 61 for i in range(32)], TINY["vocab_size"], 7)
    found: list[laws.Count] = []

    def row(name: str, count: laws.Count) -> None:
        found.append(count)
        print(f"{name:<58} {count}", flush=True)

    graphs = GRAPHS if args.graphs else []
    for kind, arguments in (("BF16", ["--enable-return-routed-experts", *graphs]), ("NVFP4", RECIPE + graphs)):
        if kind not in args.kinds:
            continue
        if kind == "NVFP4":
            model.set_recipe("nvfp4_per_token")
        with serve(args, "tiny", arguments) as s:
            assert s.client.identity()["fingerprint"] == model.spec.fingerprint()
            c = s.client
            row(f"{kind}: decode against rescoring", laws.decode_equals_rescoring(c, ids))
            row(f"{kind}: greedy decode against rescoring", laws.decode_equals_rescoring(c, ids, 0.0))
            row(f"{kind}: each token from a fresh prefill, 0.6", laws.decode_equals_fresh_prefill(c, ids[2:4], 0.6))
            row(f"{kind}: alone against a batch of 8", laws.alone_equals_batch(c, ids, 1.0, 8))
            row(f"{kind}: alone against a batch of 32", laws.alone_equals_batch(c, crowd, 0.6, 8))
            row(f"{kind}: two runs", laws.two_runs(c, ids))
            row(f"{kind}: radix hit of 100 tokens against none", laws.hit_equals_miss(c, ids[7][:100], ids[2], 100))
            row(f"{kind}: learner against engine", laws.learner_equals_engine(model, c, ids))
            row(f"{kind}: learner against engine, temperature 0.6", laws.learner_equals_engine(model, c, ids, 0.6))
            if kind == "BF16":
                row(f"{kind}: expert ids", laws.experts_agree(model, c, ids))
                print("log:", [line for line in s.log.read_text().splitlines() if "is live" in line], flush=True)
    return sum(count.differing for count in found)


def speed(args: argparse.Namespace) -> None:
    """Output tokens a second, of engines one after the other: 1024 tokens in, 256 out, log-probs returned."""
    results: dict[str, dict[int, float]] = {}
    graphs = GRAPHS if args.graphs else []
    engines = (("ours BF16", graphs, False), ("stock deterministic", DETERMINISTIC, True), ("stock", FAST, True),
               ("ours NVFP4", RECIPE + graphs, False))  # fmt: skip
    for name, arguments, stock in (engines[i] for i in args.engines):
        try:
            with serve(args, "wide", arguments, stock) as s:
                results[name] = {}
                for batch in args.batches:
                    ids = laws.prompts([args.input] * batch, 1000, batch)
                    laws.run(s.client, ids, 1.0, 8, first=-1)  # compiles
                    begin = time.monotonic()
                    outs = laws.run(s.client, ids, 1.0, args.output, first=-1)
                    seconds = time.monotonic() - begin
                    rate = results[name][batch] = sum(len(o.token_ids) for o in outs) / seconds
                    print(f"{name}: batch {batch}: {rate:.0f} output tokens/s ({seconds:.2f} s)", flush=True)
        except Exception as error:  # one engine that fails must not take the others' numbers along
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(json.dumps(results))
    ours, other = results.get("ours BF16", {}), results.get("stock deterministic", {})
    print("ours / stock deterministic:", {b: round(ours[b] / other[b], 3) for b in ours.keys() & other.keys()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["checkpoints", "laws", "speed"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["BF16", "NVFP4"], help="number formats of the law table")
    parser.add_argument("--layers", type=int, default=4, help="of the wide checkpoint")
    parser.add_argument("--engines", type=int, nargs="+", default=[0, 1], help="0 ours 1 deterministic 2 stock 3 NVFP4")
    parser.add_argument("--graphs", action="store_true", help="our decode steps as CUDA graphs")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=150)
    args = parser.parse_args()
    if args.what == "checkpoints":
        checkpoint(args.directory / "tiny", TINY)
        if args.layers:
            checkpoint(args.directory / "wide", WIDE | {"num_layers": args.layers})
    elif args.what == "laws":
        return 1 if table(args) else 0
    else:
        speed(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
