"""On a GPU: the learner on SGLang's kernels against an unmodified SGLang, stage by stage, and operator by operator.

  python3 -m alignment_tests.plugin.stock_h200 stages MODEL URL DUMPS    where the first stage differs, if one does
  python3 -m alignment_tests.plugin.stock_h200 operators [--tokens 512]  our spec's operators beside SGLang's

stages: the server has SGLANG_EXTERNAL_MODEL_PACKAGE=alignment_tests.plugin.dumping and STOCK_DUMP=DUMPS, no CUDA graphs
and no radix cache. operators: the same random inputs at the widths of Qwen3-30B-A3B (table in docs/sglang.md).
"""

import argparse
import sys
from pathlib import Path

import torch

from alignment_tests.plugin import laws, stock_operators
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
        print(
            f"{len(ids)} tokens: {len(rows)} of {len(ours)} stages differ; {unlike} of {len(scores)} log-probs",
            flush=True,
        )
        print("\n".join(rows[:12]), flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    args = parser.parse_args()
    return 1 if args.run(args) else 0


if __name__ == "__main__":
    sys.exit(main())
