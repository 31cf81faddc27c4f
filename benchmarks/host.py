"""What a forward pass costs the host: eager steps at the widths of Qwen3-30B-A3B, random weights, on one GPU.

    python benchmarks/host.py --layers 48

Each batch runs as it is, without one layer's launches serving the others (ops/gpu/repeat.py), and without the short way
of a launch (ops/gpu/launch.py), in one run, and the logits' bits are compared. `host_ms` is the time until the call
returns, `wall_ms` until the GPU is done too (medians): where they are equal, the GPU waits for Python. A launch is a
kernel of any library, counted by PyTorch's profiler.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from qwen3_30b import WIDTHS, make
from torch.profiler import ProfilerActivity, profile

from minitransformer.batch import Batch
from minitransformer.devices import resolve
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.ops.gpu import launch, repeat
from minitransformer.sampler.cache import KVCache
from minitransformer.tuning.origin import origin

PAGE = 16


def batches(vocab: int) -> dict[str, tuple[Batch, bool]]:
    """name -> (batch on the host, whether its keys and values lie in pages)."""
    found, rng = {}, torch.Generator().manual_seed(0)
    for requests in (1, 16):
        tables = [range(64 * s, 64 * s + 64) for s in range(requests)]
        ids = torch.randint(vocab, (requests, 1), generator=rng).tolist()
        found[f"decode {requests} x 1023"] = Batch.paged(ids, [1022] * requests, tables, PAGE), True
    for tokens in (128, 1024, 4096):
        ids = torch.randint(vocab, (1, tokens), generator=rng).tolist()
        found[f"prefill {tokens}"] = Batch.paged(ids, [0], [range(tokens // PAGE)], PAGE, [tokens - 1]), True
        found[f"packed {tokens}"] = Batch.packed(ids), False
    return found


def times(step: Callable[[], torch.Tensor], repeats: int) -> tuple[float, float]:
    """Median milliseconds: until the call returns, and until the GPU is done."""
    host, wall = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(host), 1e3 * statistics.median(wall)


def launches(step: Callable[[], torch.Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(1 for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)


@contextmanager
def only(way: str) -> Iterator[None]:
    """repeated: as it is. short: no layer serves another. triton: nor is any call's key known."""
    most, key_of = repeat.MAX_TOKENS, launch.Quick.key_of
    try:
        if way != "repeated":
            repeat.MAX_TOKENS = 0
        if way == "triton":
            launch.Quick.key_of = lambda *_: (None, None)
        yield
    finally:
        repeat.MAX_TOKENS, launch.Quick.key_of = most, key_of


@torch.no_grad()
def measure(model, cache: KVCache, name: str, batch: Batch, paged: bool, repeats: int) -> dict:
    batch, row, bits = batch.to(model.device), {"batch": name, "recipe": model.recipe.name}, []

    def step() -> torch.Tensor:
        h_TD = model.hidden(batch, cache if paged else None)
        return model.logits(h_TD[-1:])

    for way in ("repeated", "short", "triton"):
        with only(way):
            step()
            bits.append(step().view(torch.int32).clone())
            host, wall = times(step, repeats)
        row |= {f"{way}_host_ms": round(host, 3), f"{way}_wall_ms": round(wall, 3)}
    row["launches"] = launches(step)
    row["differing"] = sum(int((one != bits[-1]).sum()) for one in bits)
    row["us_a_launch"] = round(1e3 * row["repeated_host_ms"] / row["launches"], 2)
    row["ratio"] = round(row["triton_wall_ms"] / row["repeated_wall_ms"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "nvfp4_per_token"])
    parser.add_argument("--out", type=Path, help="a file for the rows, one JSON object a line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    sizes = WIDTHS | dict(num_layers=args.layers, sparse_layers=(True,) * args.layers)
    model = make(Qwen3MoeConfig(**sizes), resolve("cuda"))
    cache = KVCache(model.config, 1024, PAGE, model.device)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_()
    of = origin() | {"bench": "host", "layers": args.layers}
    for recipe in args.recipes:
        model.set_recipe(recipe)
        for name, (batch, paged) in batches(model.config.vocab_size).items():
            line = json.dumps(of | measure(model, cache, name, batch, paged, args.repeats))
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
