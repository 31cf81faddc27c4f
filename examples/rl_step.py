"""A small run of reinforcement learning: single-digit sums, 8 samples a prompt, reward 1 for the right number.

The sampler writes the answers, the learner scores the same tokens: the column `gap` is the largest difference of their
log-probs in nats, and it is 0 at every step, before and after every update.

What is trained: the upper layers (--train-layers), which also keeps the backward pass short on a CPU. Frozen besides:
attn.qkv and the q and k norms. In this checkpoint q and k are near 1e-7 and their gradients near 2^20 (see
make_demo_checkpoint.py); qkv is one fused matrix, so the rows of v are frozen with them. The problems are the same at
every step, so that a few steps can show something.

Example: python examples/rl_step.py --model demo/checkpoint --steps 6
"""

import argparse
import random
import sys
import time

from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import PolicyGradient, group_advantages
from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, SamplingParams

SHOTS = "2 + 5 = 7\n8 + 1 = 9\n"  # two solved examples; the tokenizer makes every digit a token
SAMPLES = 8


def problems(count: int, seed: int) -> list[tuple[str, str]]:
    """(prompt, right answer)"""
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], count)
    return [(f"{SHOTS}{a} + {b} = ", str(a + b)) for a, b in pairs]


def make_learner(model: Qwen3MoeForCausalLM, train_layers: int, lr: float) -> Learner:
    lower = [f"layers.{i}.*" for i in range(model.config.num_layers - train_layers)]
    touchy = ["layers.*.attn.qkv.weight", "layers.*.attn.[qk]_norm.weight"]
    return Learner(model, lr=lr, frozen=["embed_tokens.weight", *touchy, *lower], max_tokens_per_pack=512)


def sample(sampler: Sampler, prompts: list[str], step: int) -> list[Completion]:
    """SAMPLES completions a prompt; a newline ends an answer. The seeds differ between requests and steps."""
    encode = sampler.model.tokenizer.encode
    newline = encode("\n")[-1]
    requests = [encode(prompt) for prompt in prompts for _ in range(SAMPLES)]
    params = [
        SamplingParams(max_new_tokens=3, stop_token_ids=(newline,), seed=step * len(requests) + i)
        for i in range(len(requests))
    ]
    return sampler.generate(requests, params)


def rl_step(sampler: Sampler, learner: Learner, tasks: list[tuple[str, str]], step: int) -> str:
    """Sample, reward, update; returns one line of the table."""
    started = time.perf_counter()
    completions = sample(sampler, [prompt for prompt, _ in tasks], step)
    sampled = time.perf_counter()
    answers = [answer for _, answer in tasks for _ in range(SAMPLES)]
    rewards = [float(c.text.strip() == answer) for c, answer in zip(completions, answers, strict=True)]
    advantages = [a for i in range(0, len(rewards), SAMPLES) for a in group_advantages(rewards[i : i + SAMPLES])]
    # A group that is all right or all wrong has no advantage and so no gradient: it is left out.
    samples = [
        Sample(c.prompt_ids + c.token_ids, len(c.prompt_ids), advantage, c.log_probs)
        for c, advantage in zip(completions, advantages, strict=True)
        if advantage != 0.0
    ]
    reward = sum(rewards) / len(rewards)
    if not samples:
        return f"{step:4d}  {reward:6.3f}  every group is all right or all wrong: nothing to learn"
    metrics = learner.update(samples, PolicyGradient())
    gap, clipped = f"{metrics.max_log_prob_gap:8g}", f"{metrics.clip_share:10.3f}"
    seconds = f"{sampled - started:6.1f} + {time.perf_counter() - sampled:5.1f}"
    return f"{step:4d}  {reward:6.3f}  {gap}  {clipped}  {metrics.grad_norm:9.3f}  {metrics.tokens:6d}  {seconds}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint of make_demo_checkpoint.py")
    parser.add_argument("--steps", type=int, default=6, help="updates (default 6)")
    parser.add_argument(
        "--problems", type=int, default=4, choices=range(1, 82), metavar="N", help="prompts, 1 to 81 (default 4)"
    )
    parser.add_argument("--train-layers", type=int, default=6, help="layers from the top that are trained (default 6)")
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate (default 5e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of problems (default 0)")
    args = parser.parse_args()
    try:
        model = Qwen3MoeForCausalLM.from_pretrained(args.model)
        if model.tokenizer is None:
            raise InputError(f"{args.model}: has no tokenizer; make it with make_demo_checkpoint.py")
        sampler, learner = Sampler(model), make_learner(model, args.train_layers, args.lr)
        tasks = problems(args.problems, args.seed)
        print("step  reward  gap/nats  clip share  grad norm  tokens  seconds (sample + update)", flush=True)
        for step in range(args.steps):
            print(rl_step(sampler, learner, tasks, step), flush=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
