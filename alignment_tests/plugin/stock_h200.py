"""On a GPU: the learner on SGLang's kernels against an unmodified SGLang, stage by stage, and operator by operator.

  python3 -m alignment_tests.plugin.stock_h200 stages MODEL URL DUMPS    where the first stage differs, if one does
  python3 -m alignment_tests.plugin.stock_h200 operators [--tokens 512]  our spec's operators beside SGLang's
  python3 -m alignment_tests.plugin.stock_h200 packing [--layers 2]      SGLang's kernels in several packings

--json FILE before the word adds the rows to a file, JSON lines.
stages: the server has SGLANG_EXTERNAL_MODEL_PACKAGE=alignment_tests.plugin.dumping and STOCK_DUMP=DUMPS, no CUDA graphs
and no radix cache. operators: the same random inputs at the widths of Qwen3-30B-A3B (table in docs/sglang.md).
packing: those widths too; 0 differing is what lets the learner pack as it likes.
"""

import argparse
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

from alignment_tests.plugin import laws, stock_operators
from alignment_tests.plugin.h200_engines import TINY, WIDE, add_row, made
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.alignment.ulp import differing, ulp_distance
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.plugins.sglang import stock
from minitransformer.plugins.sglang.client import Client

LENGTHS = (5, 64, 65, 200, 700)


def dumped(folder: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """The newest forward pass of exactly these tokens."""
    for path in sorted(folder.glob("*.pt"), reverse=True):
        found = torch.load(path)
        if found["ids"].tolist() == ids:
            return found["stages"]
    raise SystemExit(f"{folder}: no forward pass of these {len(ids)} tokens")


@torch.no_grad()
def noted(model, ids: list[int], kernels) -> dict[str, torch.Tensor]:
    """The learner's stages on SGLang's kernels."""
    found = {}

    def note(stage: str, tensor: torch.Tensor) -> None:
        found[stage] = tensor.cpu().clone()

    stock.hidden(model, Batch.packed([ids]).to("cuda"), kernels, note)
    return found


def stages(args: argparse.Namespace) -> int:
    model, client, kernels = Qwen3MoeForCausalLM.from_pretrained(args.model), Client(args.url), stock.SglangKernels()
    model = model.to("cuda")
    print("unable:", stock.unable(model, client.about()))
    wrong = 0
    for ids in laws.prompts(LENGTHS, model.config.vocab_size, 11):
        (out,) = client.generate([ids], {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
        theirs, ours = dumped(args.dumps, ids), noted(model, ids, kernels)
        rows = []
        for name, x in ours.items():
            if name not in theirs:
                rows.append(f"  {name}: not dumped")
                continue
            y = theirs[name].to(x.dtype).reshape(x.shape)
            count = int(differing(x, y).sum())
            if count:
                rows.append(f"  {name}: {count} of {x.numel()} differ, {int(ulp_distance(x, y).max())} ulp")
        scores = stock.log_probs(model, [ids], kernels)[0]
        unlike = int(differing(scores, torch.tensor(out.prompt_log_probs)).sum())
        wrong += len(rows) + unlike
        add_row(args, law="stages", prompt=len(ids), stages=len(ours), unlike_stages=len(rows), differing=unlike,
                of=len(scores))  # fmt: skip
        print(
            f"{len(ids)} tokens: {len(rows)} of {len(ours)} stages differ; {unlike} of {len(scores)} log-probs",
            flush=True,
        )
        print("\n".join(rows[:12]), flush=True)
    return wrong


def packing(args: argparse.Namespace) -> int:
    """The same sequences in one pass, a few a pass and alone. -> how many log-probs differ."""
    began = time.monotonic()

    def said(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)

    kernels = OwnKernels() if args.own else stock.SglangKernels()
    said("kernels imported")
    model = made((TINY if args.own else WIDE) | {"num_layers": args.layers})
    said("model made")
    stock.warm(model, kernels)
    said("kernels compiled")
    sequences = laws.prompts((700, 5, 64, 65, 1, 200, 2, 1500, 90, 32), model.config.vocab_size, 11)
    sequences = [ids[:64] for ids in sequences] if args.own else sequences
    expected, wrong = torch.cat(stock.log_probs(model, sequences, kernels)), 0
    for tokens in (16384, 800, 1):
        if not args.own:
            torch.cuda.reset_peak_memory_stats()
        with patch.object(stock, "PASS_TOKENS", tokens):
            found = torch.cat(stock.log_probs(model, sequences, kernels))
        count = int(differing(expected, found).sum())
        peak = "" if args.own else f", {(torch.cuda.max_memory_allocated() - model_bytes(model)) / 2**20:,.0f} MiB"
        said(f"passes of {tokens} tokens: {count} of {len(found)} log-probs differ{peak}")
        add_row(args, law="packing", layers=args.layers, tokens_a_pass=tokens, differing=count, of=len(found))
        wrong += count
    return wrong


def model_bytes(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="add the rows to this file, JSON lines")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("stages")
    command.add_argument("model", type=Path)
    command.add_argument("url")
    command.add_argument("dumps", type=Path)
    command.set_defaults(run=stages)
    command = commands.add_parser("operators")
    command.add_argument("--tokens", type=int, default=512)
    command.add_argument("--own", action="store_true", help="the learner's operators on both sides, on the CPU")
    command.set_defaults(run=stock_operators.table)
    command = commands.add_parser("packing")
    command.add_argument("--layers", type=int, default=2)
    command.add_argument("--own", action="store_true", help="the learner's operators, tiny, on the CPU")
    command.set_defaults(run=packing)
    args = parser.parse_args()
    return 1 if args.run(args) else 0


if __name__ == "__main__":
    sys.exit(main())
