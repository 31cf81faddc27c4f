"""On an H200: the laws with our Triton kernels inside SGLang, and syncs (benchmarks/sglang_speed.py: its speed).

  python3 -m alignment_tests.plugin.h200 make DIR tiny demo wide    checkpoints of random weights (wide: --layers)
  python3 -m alignment_tests.plugin.h200 keep DIR ENGINE ... &      starts engines all at once; ends them at DIR/stop
  python3 -m alignment_tests.plugin.h200 laws DIR ENGINE ...        the law table, the learner in this process
  python3 -m alignment_tests.plugin.h200 sync DIR ENGINE ...        new weights by each route, and the old ones again
  python3 -m alignment_tests.plugin.h200 engine DIR ENGINE ...      updates and syncs, an sglang.Engine in process

ENGINE is CHECKPOINT-KIND[-graphs|-default][-bare][-VARIANT...], such as wide-nvfp4-graphs or tiny-bf16-graphs-chunk64.
CHECKPOINT may be any other directory in DIR too: a real checkpoint, such as that of `make demo`.
bare: no weights but those that `laws` sends first (make wide.bare, wide.packed.bare). KIND is bf16, nvfp4 (from the
BF16 checkpoint), packed (from NVFP4 made of it: make tiny.packed), or SGLang's own model: stock and deterministic with
its Triton kernels, own and owndeterministic with what it chooses by itself.
graphs: of --batches; default: SGLang's own choice of graphs. VARIANTs (h200_engines.py) are compared with the engine of
the name without them, which must be kept too. The long laws need engines of --context 4096.
docs/sglang.md says how SGLang gets onto such a machine. --cpu runs all of it on the CPU, to try the script.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from alignment_tests.plugin import laws
from alignment_tests.plugin.h200_engines import add_row, connect, keep, learners, sizes_of, write, write_bare
from alignment_tests.plugin.h200_laws import LONG, same_gpu, send, tables
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import environment
from minitransformer.plugins.sglang.send import ROUTES
from minitransformer.plugins.sglang.sync import SyncReport
from minitransformer.recipe import get


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
        for weights in args.weights:
            for route in args.routes:
                try:
                    report, found, verdict = transfer(args, model, c, route, weights)
                except InputError as error:  # one route that fails must not take the others along
                    wrong += 1
                    print(f"{name} {route} {weights}: {error}", flush=True)
                    continue
                wrong += not verdict.startswith("EQUAL")
                parts = [f"{report.bytes / 2**20:.1f}", *(f"{x:.3f}" for x in report.seconds.values())]
                print(" ".join(f"{c:>12}" for c in (name, report.route, weights, *parts, verdict)), flush=True)
                add_row(
                    args, engine=name, route=report.route, asked=route, weights=weights, bytes=report.bytes,
                    seconds=report.seconds, verdict=verdict, same_gpu=same_gpu(model, c),
                    learner_differing=found.differing, learner_of=found.of,
                )  # fmt: skip
    return wrong


def transfer(
    args: argparse.Namespace, model: Qwen3MoeForCausalLM, c: Client, route: str, weights: str
) -> tuple[SyncReport, laws.Count, str]:
    """One sync -> its report, learner against engine after it, and the verdict of both and the outputs."""
    ids = laws.prompts((5, 37, 64, 200), 1024)
    before = laws.run(c, ids)
    if weights == "other":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.roll(1, 0))
        model.weights_version += 1
    report = send(args, model, c, None if route == "default" else route)
    moved = laws.same(before, laws.run(c, ids)).differing
    found = laws.learner_equals_engine(model, c, ids, 0.6)
    wrong = [f"{moved} outputs moved"] if (moved > 0) == (weights == "equal") else []
    wrong += [f"learner against engine {found}"] if found.differing else []
    return report, found, "; ".join([*wrong, report.verdict(), f"learner against engine {found}"])


def in_processes(args: argparse.Namespace) -> int:
    """h200_in_process.py for each engine: it gets what this command got. -> how many failed."""
    command, failed = [sys.executable, "-m", "alignment_tests.plugin.h200_in_process", "engine", args.directory], 0
    rest = [word for word in sys.argv[3:] if word not in args.names]
    for name in args.names:
        done = subprocess.run(
            [*command, name, *rest], env=environment(args.cpu), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        log = done.stdout.decode("utf-8", "replace")
        graphs = log.count("cuda graph: True")
        print(f"{log}\n{name}: decode steps from graphs {graphs}", flush=True)
        add_row(args, engine=name, in_process=True, decode_steps_from_graphs=graphs)
        failed += done.returncode != 0
    return failed


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "keep", "laws", "sync", "engine"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--layers", type=int, default=4, help="of the wide checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="captured, warmed up")
    parser.add_argument("--tokens", type=int, default=360000, help="of an engine's pool of keys and values")
    parser.add_argument("--context", type=int, default=2048, help="an engine's longest sequence")
    parser.add_argument("--long", type=int, nargs="*", default=list(LONG), help="prompts of the long laws")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="laws of these names")
    parser.add_argument("--json", type=Path, help="laws, sync and engine: add their rows to this file, JSON lines")
    parser.add_argument("--experts", action="store_true", help="engines return the experts' ids, and log each step")
    parser.add_argument("--warm", action="store_true", help="an engine is up when the batches have run on it")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt that warms up")
    parser.add_argument("--weights", nargs="+", default=["equal", "other", "other"], help="that syncs send")
    parser.add_argument("--routes", nargs="+", choices=["default", *ROUTES], default=ROUTES)
    parser.add_argument("--backend", default="gloo", help="of distributed; nccl takes no two processes on one GPU")
    parser.add_argument("--gpu", type=int, default=0, help="of an engine in process; the learner is on the first one")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--lifetime", type=float, default=900, help="seconds until kept engines end by themselves")
    return parser.parse_args()


def main() -> int:
    args = parsed()
    if args.what == "make":
        for name in args.names:
            if name.endswith(".bare"):
                write_bare(args.directory / name, sizes_of(args, name.split(".")[0]), ".packed" in name)
            elif name.endswith(".packed"):
                quantise(args.directory / name.split(".")[0], args.directory / name, get("nvfp4_per_token"))
            else:
                write(args.directory / name, sizes_of(args, name))
    elif args.what == "laws":
        return 1 if tables(args) else 0
    else:
        return {"keep": keep, "sync": transfers, "engine": in_processes}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
