"""Seconds of a weight transfer into SGLang by part, for each route, BF16 and packed NVFP4; each one proven first.

  python benchmarks/sglang_sync.py prepare DIR --layers 2     makes DIR/bf16 and DIR/nvfp4 (widths of Qwen3-30B-A3B)
  python benchmarks/sglang_sync.py run DIR                    a server of each, three syncs of other weights by route

Needs SGLang (docs/sglang.md). Exit status 1 if a transfer was not proven equal. --layers 0: a tiny model, for a CPU.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from alignment_tests.plugin.h200_engines import TINY, WIDE, write
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang.launch import Server
from minitransformer.plugins.sglang.send import ROUTES
from minitransformer.plugins.sglang.sync import sync
from minitransformer.recipe import get

RECIPES = {"bf16": "bf16", "nvfp4": "nvfp4_per_token"}
COLUMNS = ("server", "route", "MiB", "quantise", "send", "load", "prove", "proven")


def prepare(directory: Path, layers: int) -> None:
    write(directory / "bf16", WIDE | {"num_layers": layers} if layers else TINY)
    quantise(directory / "bf16", directory / "nvfp4", get(RECIPES["nvfp4"]))


def run(directory: Path, kinds: list[str], repeats: int) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3MoeForCausalLM.from_pretrained(directory / "bf16", device=device)
    wrong = 0
    print("  ".join(f"{c:>8}" for c in COLUMNS), flush=True)
    for kind in kinds:
        model.set_recipe(RECIPES[kind])
        arguments = ["--random-seed", "1", "--mem-fraction-static", "0.5"]
        with Server(directory / kind, arguments, cpu=device == "cpu") as server:
            for route in [route for route in ROUTES for _ in range(repeats)]:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.neg_()  # other weights each time, and nothing of the size changes
                # NCCL takes no two processes on one GPU.
                report = sync(Learner(model), server, route, backend="gloo" if route == "distributed" else None)
                wrong += not report.equal
                seconds = [f"{s:8.3f}" for s in report.seconds.values()]
                verdict = "equal" if report.equal else report.verdict()
                row = [f"{kind:>8}", f"{route:>8}", f"{report.bytes / 2**20:8.1f}", *seconds, f"{verdict:>8}"]
                print("  ".join(row), flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("prepare", "run"))
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=2, help="of the model that is made (default 2; 0: a tiny model)")
    parser.add_argument("--servers", nargs="+", choices=RECIPES, default=list(RECIPES), help="default both")
    parser.add_argument("--repeats", type=int, default=3, help="syncs a route (default 3)")
    args = parser.parse_args()
    if args.job == "prepare":
        prepare(args.directory, args.layers)
        return 0
    return run(args.directory, args.servers, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
