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

TENSOR_TFLOPS, MEMORY_TB_S = 989.0, 4.8  # an H200's dense BF16 peak and memory


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


def floors(T: int, S: int) -> dict[str, tuple[float, float]]:
    """Part -> least milliseconds, forward and backward, by multiply-adds or by bytes at the hardware's peak.

    The backward has two products for each of the forward's, attention's five for two. Row-wise operators read each
    operand once and write each output once; a norm's backward reads its operands twice, for dX and for dW.
    """
    pairs, D, F, R, qk, qkv = T * (T // S + 1) / 2, 2048, 768, 8 * T, 36 * 128, 5120
    macs = {
        "qkv, o, router": T * D * (qkv + 4096 + 128),
        "experts": R * 3 * F * D,
        "attention": 2 * pairs * 32 * 128,
    }
    found = {part: tuple(2e-9 * n * k / TENSOR_TFLOPS for k in (1, 2)) for part, n in macs.items()}
    found["attention"] = (found["attention"][0], 2.5 * found["attention"][0])
    rows = (
        8 * T * D + T * (4 * qk + 2 * qkv) + 2 * (T + R) * D + 3 * R * F,
        16 * T * D + T * (7 * qk + 2 * qkv) + 2 * (T + R) * D + 5 * R * F + 2 * R * D + 3 * T * D,
    )
    return found | {"row-wise": tuple(2e-9 * n / MEMORY_TB_S for n in rows)}


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
    parser.add_argument("--no-checks", action="store_true", help="skip the comparison with the CPU")
    parser.add_argument("--no-peer", action="store_true", help="skip transformers")
    parser.add_argument("--out", type=Path, help="folder for layer.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    import triton
    from gpu_bench.decoder import Ours, Theirs, median_ms, peak_gib
    from gpu_bench.gradient_checks import checks

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    S, length = args.sequences, args.length
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{machine}, {S} x {length} tokens")
    begin = time.monotonic()
    if not args.no_checks:
        print(f"wrong elements: layer over 74 tokens, all outputs and gradients: {check_small()}", flush=True)
        for what, wrong in checks(S, length):
            print(f"wrong elements: {what}: {wrong}   ({time.monotonic() - begin:.0f} s)", flush=True)
        torch.cuda.empty_cache()
    ours = Ours(S, length)
    facts = {"machine": machine, "tokens": [S, length], "ours": measure(ours, median_ms, peak_gib)}
    print(f"ours          {line(facts['ours'])}", flush=True)
    if not args.no_peer:
        compare(ours, Theirs(ours, S, length), facts, median_ms, peak_gib)
    facts |= {"floors_ms": floors(S * length, S), "kernels": kernels(ours.train)}
    for name, ms, launches in facts["kernels"][:26]:
        print(f"  {ms:8.3f} ms {launches:4d} x  {name}")
    print(f"  {sum(row[1] for row in facts['kernels']):8.3f} ms in all kernels of forward + backward")
    for part, (forward, backward) in facts["floors_ms"].items():
        print(f"  floor of {part:15} forward {forward:.3f} ms, backward {backward:.3f} ms")
    if args.out:
        (args.out / "layer.json").write_text(json.dumps(facts, indent=1))


def compare(ours, theirs, facts: dict, median_ms, peak_gib) -> None:
    """transformers' times into facts, and how far apart the outputs are."""
    with torch.no_grad():
        a, b = sum(x.float() for x in ours.call()), theirs.call().flatten(0, 1).float()
        print(f"outputs differ by {((a - b).norm() / b.norm()).item():.4f} (2-norm, relative)")
        del a, b
    facts["transformers"] = measure(theirs, median_ms, peak_gib)
    print(f"transformers  {line(facts['transformers'])}")
    ratios = [facts["transformers"][key] / facts["ours"][key] for key in ("forward_ms", "train_ms")]
    print(f"ratio         forward {ratios[0]:.2f}, forward + backward {ratios[1]:.2f}", flush=True)


def measure(one, median_ms, peak_gib) -> dict[str, float]:
    with torch.no_grad():
        forward = median_ms(one.call)
    train = median_ms(one.train)
    begin = time.perf_counter()
    one.train()
    host = 1000 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    before, peak = peak_gib(one.train)
    return {"forward_ms": forward, "train_ms": train, "host_ms": host, "before_gib": before, "peak_gib": peak}


def line(row: dict[str, float]) -> str:
    return (
        f"forward {row['forward_ms']:7.3f} ms, forward + backward {row['train_ms']:7.3f} ms "
        f"(host {row['host_ms']:.2f} ms); {row['before_gib']:.2f} GiB before, {row['peak_gib']:.2f} GiB peak"
    )


if __name__ == "__main__":
    main()
