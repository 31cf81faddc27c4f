"""On a GPU: the learner on SGLang's kernels against an unmodified SGLang, stage by stage, and operator by operator.

  python3 -m alignment_tests.plugin.stock_h200 align MODEL               `align --stock`, few and many prompts
  python3 -m alignment_tests.plugin.stock_h200 stages MODEL              where the first stage differs, if one does
  python3 -m alignment_tests.plugin.stock_h200 operators [--tokens 512]  our spec's operators beside SGLang's
  python3 -m alignment_tests.plugin.stock_h200 packing [--layers 2]      SGLang's kernels in several packings

--json FILE before the word adds the rows to a file, JSON lines.
align, stages: MODEL is a checkpoint with ids up to 1,000, such as of `h200 make DIR wide`; each starts its server, that
of stages has hooks in SGLang's own model (alignment_tests/plugin/dumping). operators: the same random inputs at the
widths of Qwen3-30B-A3B (table in docs/sglang_results.md). packing: those widths too; 0 differing is what lets the
learner pack as it likes.
"""

import argparse
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from alignment_tests.plugin import laws, stock_operators
from alignment_tests.plugin.h200_engines import TINY, WIDE, add_row, made
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.alignment.ulp import differing, ulp_distance
from minitransformer.batch import Batch
from minitransformer.cli import main as minitransformer
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.plugins.sglang import MODEL_PACKAGE_VARIABLE, stock
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import Server
from minitransformer.plugins.sglang.stock_kernels import ARGUMENTS, ENVIRONMENT

LENGTHS = (5, 64, 65, 200, 700)
ALIGNED = {32: (5, 1, 37, 64, 65, 90, 200, 300), 16: range(300, 885, 13)}  # new tokens -> prompts' lengths; two passes
SMALL = ["--cuda-graph-backend-prefill", "disabled", "--max-total-tokens", "65536"]
WHOLE = ["--cuda-graph-backend-decode", "disabled", "--disable-radix-cache"]  # what hooks in the model need


@contextmanager
def server(args: argparse.Namespace, arguments: list[str], **environment: str):
    """An unmodified, deterministic one (on the CPU not deterministic: to try the script)."""
    own = ["--attention-backend", "torch_native"] if args.cpu else [*ARGUMENTS, *arguments]
    with Server(args.model, own, cpu=args.cpu, stock=True, extra_environment=ENVIRONMENT | environment) as running:
        yield running


def align(args: argparse.Namespace) -> int:
    """The command on a few prompts and on so many that the learner needs several passes."""
    wrong, layers = 0, json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
    with server(args, [*SMALL, "--cuda-graph-max-bs-decode", "64"]) as running, TemporaryDirectory() as folder:
        for new, lengths in ALIGNED.items():
            prompts, found = Path(folder, "prompts"), Path(folder, "found.json")
            ids = laws.prompts(lengths[: args.most], 1000, 11)
            prompts.write_text("".join(json.dumps({"ids": one}) + "\n" for one in ids))
            line = f"align --stock --sampler {running.url} --model {args.model} --prompts {prompts} --json {found}"
            line += f" --no-contrast --seed 5 --max-new-tokens {new} --device {'cpu' if args.cpu else 'cuda'}"
            wrong += minitransformer(line.split())
            told = json.loads(found.read_text())
            (stage,), gap = (s for s in told["stages"] if "prompt" not in s["stage"]), told["log_prob_gap"]["learner"]
            add_row(
                args, law="align --stock", kernels=told["kernels"], layers=layers, prompts=len(ids),
                differing=stage["differing"], of=stage["rows"], decode_differing=gap["differing"],
                decode_of=gap["tokens"], decode_max_nats=gap["max"],
            )  # fmt: skip
    return wrong


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
    with TemporaryDirectory() as dumps:
        hooks = {MODEL_PACKAGE_VARIABLE: "alignment_tests.plugin.dumping", "STOCK_DUMP": dumps}
        with server(args, [*SMALL, *WHOLE], **hooks) as running:
            return compared(args, Client(running.url), Path(dumps))


def compared(args: argparse.Namespace, client: Client, dumps: Path) -> int:
    model, kernels = Qwen3MoeForCausalLM.from_pretrained(args.model, device="cuda"), stock.SglangKernels()
    print("unable:", stock.unable(model, client.about()))
    wrong = 0
    for ids in laws.prompts(LENGTHS, model.config.vocab_size, 11):
        (out,) = client.generate([ids], {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
        theirs, ours = dumped(dumps, ids), noted(model, ids, kernels)
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
        add_row(args, law="stages", layers=model.config.num_layers, prompt=len(ids), stages=len(ours),
                unlike_stages=len(rows), differing=unlike, of=len(scores))  # fmt: skip
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
    command = commands.add_parser("align")
    command.add_argument("model", type=Path)
    command.add_argument("--most", type=int, help="prompts")
    command.add_argument("--cpu", action="store_true", help="the learner's own operators, to try the script")
    command.set_defaults(run=align)
    command = commands.add_parser("stages")
    command.add_argument("model", type=Path)
    command.set_defaults(run=stages, cpu=False)
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
