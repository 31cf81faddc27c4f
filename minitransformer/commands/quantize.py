"""Write an NVFP4 checkpoint of a BF16 checkpoint, and print what each layer lost.

Only the experts are quantised: 4-bit codes, an E4M3 scale for every 16 of them, an FP32 scale an expert. Router, norms,
embedding, attention, dense layers and lm_head stay BF16. docs/nvfp4.md explains the format and both file layouts.
The directory appears under its name when it is complete; nothing is written if anything is wrong.

Example:
  minitransformer quantize --model demo/checkpoint --out demo/nvfp4
  minitransformer quantize --model demo/checkpoint --out demo/ct --format compressed-tensors --layers 0=bf16 29=bf16
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from minitransformer.commands import common
from minitransformer.errors import InputError
from minitransformer.recipe import DEFAULT_QUANTISED, get, read_overrides

if TYPE_CHECKING:
    from minitransformer.models.qwen3_moe.quantise import QuantisationError

COLUMNS = ("layer", "weight", "relative L2", "SNR dB", "MAE", "zero codes", "zero scales", "zero values")


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = "BF16 checkpoint in the Hugging Face layout"
    command.add_argument("--model", required=True, type=common.path, metavar="DIR", help=what)
    what = "the directory to write; must be empty or new"
    command.add_argument("--out", required=True, type=common.path, metavar="DIR", help=what)
    command.add_argument(
        "--recipe",
        default=DEFAULT_QUANTISED,
        metavar="NAME",
        help=f"nvfp4_per_token (4-bit activations) or w4a16 (BF16 activations; not read by SGLang 0.5.17); "
        f"default {DEFAULT_QUANTISED}",
    )
    command.add_argument(
        "--format",
        default="modelopt",
        choices=("modelopt", "compressed-tensors"),
        help="file layout: modelopt (default; SGLang, TensorRT-LLM, vLLM) or compressed-tensors (SGLang, vLLM)",
    )
    common.add_layers(command)
    common.add_json(command, "the error of every layer as JSON")


def run(args: argparse.Namespace) -> int:
    common.check_output(args.json, [args.model])
    if args.json is not None:
        json, out = args.json.resolve(), Path(args.out).resolve()
        if out == json or out in json.parents:
            raise InputError(f"--json {args.json}: lies in --out {args.out}; write it beside the checkpoint")
    recipe, overrides = get(args.recipe), read_overrides(args.layers)  # a wrong name is told before torch is loaded
    from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
    from minitransformer.models.qwen3_moe.quantise import quantise
    from minitransformer.models.qwen3_moe.weights import read_config

    config, _ = read_config(args.model, quantised=True)
    with common.progress() as show:
        show("quantising " + args.model, config.num_layers)
        errors = quantise(
            args.model,
            args.out,
            recipe.with_overrides(overrides, config.num_layers),
            FORMATS[args.format],
            lambda layer: show.advance(),
        )
    layers = len({e.layer for e in errors})
    left_out = f"; the experts of {sum(config.sparse_layers) - layers} layers stay BF16" if overrides else ""
    done = f"{args.out}: {args.format}, {recipe.name}, experts of {layers} layers quantised{left_out}"
    content = {"recipe": recipe.name, "format": args.format, "errors": [asdict(e) for e in errors]}
    common.report(args.json, common.as_json(content), lambda: _print(errors, done))
    return 0


def _print(errors: "list[QuantisationError]", done: str) -> None:
    from minitransformer.alignment.report import print_table

    rows = [
        (
            str(e.layer),
            e.projection,
            f"{e.relative_l2:.5f}",
            f"{e.snr_db:.2f}",
            f"{e.mae:.3e}",
            f"{e.zero_codes:.2%}",
            f"{e.zero_scales:.2%}",
            f"{e.zero_values:.2%}",
        )
        for e in errors
    ]
    print_table(common.console(), COLUMNS, rows)
    print(done)
