"""On an H200: the laws with our Triton kernels inside SGLang, and syncs (benchmarks/sglang_speed.py: its speed).

  python3 -m alignment_tests.plugin.h200 make DIR tiny demo wide    checkpoints of random weights (wide: --layers)
  python3 -m alignment_tests.plugin.h200 keep DIR ENGINE ... &      starts engines all at once; ends them at DIR/stop
  python3 -m alignment_tests.plugin.h200 laws DIR ENGINE ...        the law table, the learner in this process
  python3 -m alignment_tests.plugin.h200 sync DIR ENGINE ...        new weights by each route, and the old ones again

ENGINE is CHECKPOINT-KIND[-graphs|-default][-bare][-VARIANT], such as wide-nvfp4-graphs or tiny-bf16-graphs-chunk64.
CHECKPOINT may be any other directory in DIR too: a real checkpoint, such as that of `make demo`.
bare: no weights but those that `laws` sends first (make wide.bare, wide.packed.bare). KIND is bf16, nvfp4 (from the
BF16 checkpoint), packed (from NVFP4 made of it: make tiny.packed), or SGLang's own model: stock and deterministic with
its Triton kernels, own and owndeterministic with what it chooses by itself.
graphs: of --batches; default: SGLang's own choice of graphs. VARIANT (h200_engines.py) is compared with the engine of
the name without it, which must be kept too.
docs/sglang.md says how SGLang gets onto such a machine. --cpu runs all of it on the CPU, to try the script.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alignment_tests.plugin import laws
from alignment_tests.plugin.h200_engines import VARIANTS, connect, keep, learners, sizes_of, write, write_bare
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.sync import ROUTES, SyncReport, sync
from minitransformer.recipe import get

Laws = dict[str, Callable[[], laws.Count]]


def of_an_engine(c: Client, model: Qwen3MoeForCausalLM, experts: bool) -> Laws:
    ids = laws.prompts((5, 1, 37, 64, 65, 90, 16, 200), 1024)
    crowd = laws.prompts([3 + 7 * i % 61 for i in range(32)], 1024, 7)
    return {
        "decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids),
        "greedy decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids, 0.0),
        "each token from a fresh prefill, 0.6": lambda: laws.decode_equals_fresh_prefill(c, ids[2:4], 0.6),
        "learner against engine": lambda: laws.learner_equals_engine(model, c, ids),
        "learner against engine, temperature 0.6": lambda: laws.learner_equals_engine(model, c, ids, 0.6),
        "alone against a batch of 2": lambda: laws.alone_equals_batch(c, ids[2:4], 1.0, 8),
        "alone against a batch of 5, padded to 8": lambda: laws.alone_equals_batch(c, ids[:5], 1.0, 8),
        "alone against a batch of 8": lambda: laws.alone_equals_batch(c, ids, 1.0, 8),
        "alone against a batch of 32": lambda: laws.alone_equals_batch(c, crowd, 0.6, 8),
        "two runs": lambda: laws.two_runs(c, ids),
        "radix hit of 100 tokens against none": lambda: laws.hit_equals_miss(c, ids[7][:100], ids[2], 100),
        "our sampler against engine": lambda: laws.sampler_equals_engine(model, c, ids),
        "our sampler against engine, top_p 0.9": lambda: laws.sampler_equals_engine(model, c, ids, 0.8, 8, top_p=0.9),
        **({"expert ids": lambda: laws.experts_agree(model, c, ids)} if experts else {}),
    }


def of_a_variant(c: Client, variant: str, plain: Client) -> Laws:
    """plain: the engine without it."""
    ids = laws.prompts((5, 1, 37, 64, 65, 90, 16, 200), 1024)

    def retracted() -> laws.Count:
        found, times = laws.squeezed(c, plain, laws.prompts([20 + i for i in range(24)], 1024, seed=5), 32)
        assert times > 0, "the pool was never short: the law shows nothing"
        return found

    if variant == "small":
        return {"retraction against none": retracted}
    hits = ((15, 0), (16, 16), (17, 16), (100, 96)) if variant == "page16" else ()
    return {
        f"{variant} against none": lambda: laws.engines_agree(plain, c, ids),
        f"{variant} against none, 0.6": lambda: laws.engines_agree(plain, c, ids, 0.6),
        "decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids),
        **{f"radix hit of {n} tokens, {reused} reused": lambda n=n, reused=reused: laws.hit_equals_miss(
            c, ids[7][:n], ids[2], reused) for n, reused in hits},
    }  # fmt: skip


def table(args: argparse.Namespace, name: str) -> int:
    """The law table of one engine. -> how many elements differ in all."""
    size, kind, *rest = name.split("-")
    c, _ = connect(args, name)
    if rest and rest[-1] in VARIANTS:
        rows = of_a_variant(c, rest[-1], connect(args, name.removesuffix(f"-{rest[-1]}"))[0])
    else:
        model = learners(args, size)
        model.set_recipe("bf16" if kind == "bf16" else "nvfp4_per_token")
        assert c.identity()["fingerprint"] == model.spec.fingerprint()
        if "bare" in rest:
            if kind == "packed":
                keep_packed(model)
            r = send(args, model, c, args.routes[0])
            parts = ", ".join(f"{part} {x:.2f}" for part, x in r.seconds.items())
            print(f"{name}: {r.bytes / 2**30:.1f} GiB by {r.route}; seconds {parts}; {r.verdict()}", flush=True)
            assert r.equal
        rows = of_an_engine(c, model, args.experts)
    differing = 0
    for what, law in rows.items():
        began = time.monotonic()
        found = law()
        differing += found.differing
        print(f"{name}: {what:<42} {found}  {time.monotonic() - began:.1f} s", flush=True)
    steps = connect(args, name)[1]
    live = next(line for line in steps.splitlines() if "is live" in line)
    print(f"{name}: decode steps from graphs {steps.count('cuda graph: True')}; {live}", flush=True)
    return differing


@torch.no_grad()
def keep_packed(model: Qwen3MoeForCausalLM) -> None:
    """Of its experts what a packed engine holds, layer by layer: 48 layers leave no room for the BF16 weights."""
    for i, mlp in ((i, layer.mlp) for i, layer in enumerate(model.layers)):
        gate_up, down = (mlp.experts.quantised(name, getattr(mlp, name).weight) for name in ("gate_up", "down"))
        outer = gate_up.outer.view(-1, 1).expand(-1, 2).contiguous()
        mlp.set_quantised(model.recipe.for_layer(i), Nvfp4(gate_up.codes, gate_up.scales, outer), down)


def send(args: argparse.Namespace, model: Qwen3MoeForCausalLM, c: Client, route: str) -> SyncReport:
    return sync(Learner(model), c, route, backend=args.backend if route == "distributed" else None)


def transfers(args: argparse.Namespace) -> int:
    """Syncs by each route: the weights that are there, which must change no output, then others. -> how many failed."""
    wrong = 0
    columns = ("engine", "route", "weights", "MiB", "quantise", "send", "load", "prove", "verdict")
    print(" ".join(f"{c:>12}" for c in columns), flush=True)
    for name in args.names:
        c, _ = connect(args, name)
        size, kind, *_ = name.split("-")
        model = learners(args, size)
        model.set_recipe("bf16" if kind == "bf16" else "nvfp4_per_token")
        ids = laws.prompts((5, 37, 64, 200), 1024)
        before = laws.run(c, ids)
        for weights in args.weights:
            for route in args.routes:
                if weights == "other":
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.neg_()
                try:
                    report = send(args, model, c, route)
                except InputError as error:  # one route that fails must not take the others along
                    wrong += 1
                    print(f"{name} {route} {weights}: {error}", flush=True)
                    continue
                moved = laws.same(before, laws.run(c, ids)).differing if weights == "equal" else 0
                wrong += not report.equal or moved > 0
                parts = [f"{report.bytes / 2**20:.1f}", *(f"{x:.3f}" for x in report.seconds.values())]
                verdict = f"{moved} outputs differ" if moved else report.verdict()
                print(" ".join(f"{c:>12}" for c in (name, route, weights, *parts, verdict)), flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "keep", "laws", "sync"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--layers", type=int, default=4, help="of the wide checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="captured, warmed up")
    parser.add_argument("--tokens", type=int, default=360000, help="of an engine's pool of keys and values")
    parser.add_argument("--experts", action="store_true", help="engines return the experts' ids")
    parser.add_argument("--warm", action="store_true", help="an engine is up when the batches have run on it")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt that warms up")
    parser.add_argument("--weights", nargs="+", default=["equal", "other", "other"], help="that syncs send")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--backend", default="gloo", help="of distributed; nccl takes no two processes on one GPU")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--lifetime", type=float, default=900, help="seconds until kept engines end by themselves")
    args = parser.parse_args()
    if args.what == "make":
        for name in args.names:
            if name.endswith(".bare"):
                write_bare(args.directory / name, sizes_of(args, name.split(".")[0]), ".packed" in name)
            elif name.endswith(".packed"):
                quantise(args.directory / name.split(".")[0], args.directory / name, get("nvfp4_per_token"))
            else:
                write(args.directory / name, sizes_of(args, name))
    elif args.what == "laws":
        return 1 if sum([table(args, name) for name in args.names]) else 0
    else:
        return {"keep": keep, "sync": transfers}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
