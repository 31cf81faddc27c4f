"""One decoder layer of Qwen3-30B-A3B, forward and backward, against transformers: `python benchmarks/layer.py`.

Bits come first: every gradient of a small batch, and parts of the products' gradients at full size, against the CPU
reference. Then medians of eager calls of both in one run, peak memory, and where our time goes, kernel by kernel.
transformers runs its grouped_mm experts and PyTorch's SDPA (not deterministic, other bits). Its rotary embedding and
residual sums are in its time; ours adds the residual in the norms.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import torch
from tables import fp32_ms, memory_ms, tensor_ms


def check_small() -> int:
    """Wrong elements among outputs and gradients of a layer over few tokens, GPU against CPU."""
    from gpu_bench.decoder import Ours

    ours = Ours(2, 37)
    reference = Ours(2, 37, "cpu", layer=type(ours.layer)(ours.layer.attn.config, 0))
    reference.layer.load_state_dict(ours.layer.state_dict())
    wrong = 0
    for one in (ours, reference):
        one.out = one.call()
        torch.autograd.backward(one.out, (one.dy, one.dy))
    pairs = list(zip(ours.out, reference.out, strict=True))
    pairs += [(leaf.grad, reference.leaves[name].grad) for name, leaf in ours.leaves.items()]
    for a, b in pairs:
        wrong += int((a.detach().cpu().view(torch.int16) != b.detach().view(torch.int16)).sum())
    return wrong


def floors(T: int, S: int) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    """Part -> forward and backward, each the milliseconds by bytes and by operations at tables.py's rates.

    The backward has two products for each of the forward's, attention's five for two. A product or a row-wise operator
    reads each operand once and writes each output once; a norm's backward reads its operands twice, for dX and for dW.
    """
    pairs, D, F, R, qk, qkv = T * (T // S + 1) / 2, 2048, 768, 8 * T, 36 * 128, 5120
    macs = {"qkv, o, router": T * D * (qkv + 4096 + 128), "experts": R * 3 * F * D, "attention": 2 * pairs * 32 * 128}
    # Elements: a product's x, W and y; attention's q, k, v, o, and in the backward these, dO, dQ, dK and dV.
    sizes = {
        "qkv, o, router": T * (2 * D + qkv + 4096 + D + 128) + D * (qkv + 4096 + 128),
        "experts": R * (D + 2 * F + F + D) + 128 * 3 * F * D,
        "attention": T * (qkv + 4096),
    }
    backward = {"attention": (2.5, 2)}
    found = {}
    for part, n in macs.items():
        operations, size = backward.get(part, (2, 2))
        forward = memory_ms(2 * sizes[part]), tensor_ms(2 * n)
        found[part] = (forward, (size * forward[0], operations * forward[1]))
    rows = (
        8 * T * D + T * (4 * qk + 2 * qkv) + 2 * (T + R) * D + 3 * R * F,
        16 * T * D + T * (7 * qk + 2 * qkv) + 2 * (T + R) * D + 5 * R * F + 2 * R * D + 3 * T * D,
    )
    # FP32 operations by the specs: two norms, q's and k's, rope, SwiGLU, combine; twice that in the backward.
    each = T * (10 * D + 7 * qk) + 14 * R * F + R * D
    found["row-wise"] = tuple((memory_ms(2 * n), k * fp32_ms(each)) for k, n in enumerate(rows, 1))
    return found


def kernels(call, rounds: int = 3) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds a call, launches a call), the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    total: dict[str, list] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = total[event.name.split("<")[0].split("(")[0][:60]]
            entry[0] += event.time_range.elapsed_us() / 1000 / rounds
            entry[1] += 1
    return sorted(((name, ms, n // rounds) for name, (ms, n) in total.items()), key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each")
    parser.add_argument("--no-checks", action="store_true", help="skip the comparison with the CPU")
    parser.add_argument("--no-peer", action="store_true", help="skip transformers")
    parser.add_argument("--out", type=Path, help="folder for layer.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    from gpu_bench.decoder import Ours, Theirs

    from minitransformer.tuning.origin import origin

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    S, length = args.sequences, args.length
    of = origin()
    print(f"{of['machine']}, {S} x {length} tokens")
    wrong = {} if args.no_checks else check(S, length)
    sides = {"ours": Ours(S, length)}
    if not args.no_peer:
        sides["transformers"] = Theirs(sides["ours"], S, length)
    facts = of | {"tokens": [S, length], "wrong": wrong} | compare(sides, args.rounds)
    save(args.out, facts)
    facts["kernels"] = kernels(sides["ours"].train)
    for name, ms, launches in facts["kernels"][:26]:
        print(f"  {ms:8.3f} ms {launches:4d} x  {name}")
    print(f"  {sum(row[1] for row in facts['kernels']):8.3f} ms in all kernels of forward + backward")
    for part, both in floors(S * length, S).items():
        print(f"  floors of {part:15}", *(f"bytes {b:.3f} ms, operations {o:.3f} ms;" for b, o in both))
    save(args.out, facts)


def save(folder: Path | None, facts: dict) -> None:
    if folder:
        (folder / "layer.json").write_text(json.dumps(facts, indent=1))


def check(S: int, length: int) -> dict[str, int]:
    """What was compared with the CPU reference -> how many elements are wrong."""
    from gpu_bench.gradient_checks import checks

    begin, found = time.monotonic(), {"layer over 74 tokens, all outputs and gradients": check_small()}
    for what, wrong in checks(S, length):
        found[what] = wrong
        print(f"wrong elements: {what}: {wrong}   ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"wrong elements in all: {sum(found.values())}", flush=True)
    torch.cuda.empty_cache()
    return found


def compare(sides: dict, rounds: int) -> dict:
    """Name -> times and memory of each side; with two, the ratios too."""
    from gpu_bench.decoder import peak_gib
    from gpu_bench.timing import alternating

    found: dict = {name: {} for name in sides}
    with torch.no_grad():
        outs = [sum(x.float().flatten() for x in one.outputs()) for one in sides.values()]
        if len(outs) > 1:
            found["outputs_differ"] = ((outs[0] - outs[1]).norm() / outs[1].norm()).item()
            print(f"outputs differ by {found['outputs_differ']:.4f} (2-norm, relative)", flush=True)
        del outs
        for name, ms in zip(sides, medians([one.call for one in sides.values()], alternating, rounds), strict=True):
            found[name]["forward_ms"] = ms
    for name, ms in zip(sides, medians([one.train for one in sides.values()], alternating, rounds), strict=True):
        found[name]["train_ms"] = ms
    for name, one in sides.items():
        begin = time.perf_counter()
        one.train()
        found[name]["host_ms"] = 1000 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        found[name]["before_gib"], found[name]["peak_gib"] = peak_gib(one.train)
        print(f"{name:13} {line(found[name])}", flush=True)
    if len(sides) > 1:
        ours, theirs = (found[name] for name in sides)
        found["ratio"] = {key: theirs[key] / ours[key] for key in ("forward_ms", "train_ms")}
        forward, train = found["ratio"].values()
        print(f"ratio         forward {forward:.2f}, forward + backward {train:.2f}", flush=True)
    return found


def medians(calls: list, alternating, rounds: int) -> list[float]:
    """Of eager calls that take turns, host included where it is the slower one; two calls each come before."""
    alternating(calls, 2)
    return alternating(calls, rounds)


def line(row: dict[str, float]) -> str:
    return (
        f"forward {row['forward_ms']:7.3f} ms, forward + backward {row['train_ms']:7.3f} ms "
        f"(host {row['host_ms']:.2f} ms); {row['before_gib']:.2f} GiB before, {row['peak_gib']:.2f} GiB peak"
    )


if __name__ == "__main__":
    main()
