"""rl_step.py with SGLang as the sampler: a server samples, the learner updates, `Learner.sync` sends the weights back.

The column `gap` is the largest difference between the log-probs that the server emitted and those that the learner has
for the same tokens, in nats: 0 at every step. After each step a line says how the weights went over, in seconds.

Example: python examples/rl_sglang.py --model demo/checkpoint --steps 2          (starts a server)
         python examples/rl_sglang.py --model demo/checkpoint --to http://127.0.0.1:30000
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from rl_step import make_learner, problems, rl_step

from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.plugins.sglang.align import sample
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import Server
from minitransformer.sampler.sequence import Completion, SamplingParams


class Engine:
    """As much of a Sampler as rl_step.py needs, with a server behind it."""

    def __init__(self, model: Qwen3MoeForCausalLM, url: str) -> None:
        self.model, self.client = model, Client(url)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        return sample(self.model, self.client, prompts, params)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint of make_demo_checkpoint.py")
    parser.add_argument("--to", metavar="URL", help="a running server with our model (default: start one)")
    parser.add_argument("--device", default="cpu", help="of the learner (default cpu)")
    parser.add_argument("--steps", type=int, default=2, help="updates (default 2)")
    args = parser.parse_args()
    try:
        model = Qwen3MoeForCausalLM.from_pretrained(args.model, device=args.device)
        if model.tokenizer is None:
            raise InputError(f"{args.model}: has no tokenizer; make it with make_demo_checkpoint.py")
        learner, tasks = make_learner(model, train_layers=6, lr=5e-5), problems(4, seed=0)
        running = nullcontext(SimpleNamespace(url=args.to)) if args.to else None
        with running or Server(args.model, cpu=not torch.cuda.is_available()) as server:
            learner.sync(server)  # a running server may hold anything
            print("step  reward  gap/nats  clip share  grad norm  tokens  seconds (sample + update)", flush=True)
            for step in range(args.steps):
                print(rl_step(Engine(model, server.url), learner, tasks, step), flush=True)
                report = learner.sync(server)
                seconds = ", ".join(f"{part} {s:.2f}" for part, s in report.seconds.items())
                print(f"      sync: {report.bytes / 2**20:.0f} MiB by {report.route}; {seconds}", flush=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
