"""What each recipe costs in quality: perplexity of a checkpoint on real text, one row a recipe.

    python benchmarks/perplexity.py --model demo/checkpoint --text FILE [--tokens 4096] [--length 256]

FILE is plain text, or JSON lines with "question" and "answer" (GSM8K). The text is cut into sequences of --length
tokens; each token but a sequence's first is scored. Everything runs through the strict operators, so a second run of
the same file gives the same digits on any machine.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from minitransformer import Batch, InputError, Qwen3MoeForCausalLM
from minitransformer.ops.logprob import logprob
from minitransformer.recipe import RECIPES


def read_text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    rows = [json.loads(line) for line in text.splitlines()[:400]]
    return "\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows)


@torch.no_grad()
def nats(model, sequences: list[list[int]]) -> torch.Tensor:
    """Log-probs of every token but the first of each sequence, FP64 [tokens]."""
    scores = []
    for ids in sequences:
        logits = model(Batch.packed([ids]))
        scores.append(logprob(logits[:-1].contiguous(), torch.tensor(ids[1:])))
    return torch.cat(scores).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    model = Qwen3MoeForCausalLM.from_pretrained(args.model)
    if model.tokenizer is None:
        raise InputError(f"{args.model} has no tokenizer.json; text needs one")
    ids = model.tokenizer.encode(read_text(args.text))[: args.tokens]
    sequences = [ids[i : i + args.length] for i in range(0, len(ids), args.length) if len(ids) - i > 1]
    print(f"{args.model} on {args.text.name}: {len(ids)} tokens in sequences of {args.length}")
    print(f"{'recipe':<18} {'perplexity':>10} {'nats/token':>10} {'vs bf16':>8} {'seconds':>8}")
    base = None
    for name in args.recipes:
        model.set_recipe(name)
        start = time.perf_counter()
        mean = -nats(model, sequences).mean().item()
        base = mean if base is None else base
        took = time.perf_counter() - start
        print(f"{name:<18} {math.exp(mean):10.3f} {mean:10.4f} {mean - base:+8.4f} {took:8.1f}", flush=True)


if __name__ == "__main__":
    main()
