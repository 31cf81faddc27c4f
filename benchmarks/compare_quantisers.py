"""Our NVFP4 quantiser beside those of compressed-tensors, torchao and ModelOpt, on the same tensors.

    pip install compressed-tensors torchao nvidia-modelopt        whichever are missing are left out
    python benchmarks/compare_quantisers.py [--model demo/checkpoint] [--markdown]

Counts in how many elements outer scales, block scales and codes differ, and what each loses against the input. A code
differs "alone" where its block's scales are equal, so that only the division of the element is left as the cause; codes
0 and -0 count as equal. No bit test: other people's rounding is theirs to choose.
"""

import argparse
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitransformer.ops import nvfp4
from minitransformer.ops.nvfp4 import Nvfp4

Quantiser = Callable[[Tensor], Nvfp4]
COLUMNS = ("input", "quantiser", "outer", "block scales", "codes", "codes alone", "zero scales", "SNR dB")


def ours(x: Tensor) -> Nvfp4:
    return nvfp4.quantize(x, "tensor")


def compressed_tensors(x: Tensor) -> Nvfp4:
    """As llm-compressor calls it: minima and maxima in the weight's own type, BF16."""
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, 16))
    encode = generate_gparam(x.min(), x.max())
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=encode)
    packed = quantize_and_pack_fp4(x, scales, encode)
    decode = np.float32(1) / encode.numpy()[0]
    return Nvfp4(packed, scales.to(torch.float8_e4m3fn).view(torch.uint8), torch.tensor(decode))


def compressed_tensors_fp32(x: Tensor) -> Nvfp4:
    return compressed_tensors(x.float())


def torchao(x: Tensor) -> Nvfp4:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    decode = per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_quantize(x, 16, decode)
    return Nvfp4(codes.view(torch.uint8).reshape(x.shape[0], -1), _bits(scales, x), decode)


def modelopt(x: Tensor) -> Nvfp4:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scales, decode = NVFP4QTensor.quantize(x.clone(), 16)
    return Nvfp4(q._quantized_data, _bits(scales, x), decode.reshape(()))


def _bits(scales: Tensor, x: Tensor) -> Tensor:
    return scales.reshape(x.shape[0], -1).contiguous().view(torch.uint8)


QUANTISERS: dict[str, tuple[str, Quantiser]] = {
    "ours": ("minitransformer", ours),
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
    "compressed-tensors, FP32 input": ("compressed-tensors", compressed_tensors_fp32),
    "torchao": ("torchao", torchao),
    "ModelOpt": ("nvidia-modelopt", modelopt),
}


def inputs(model: Path | None) -> dict[str, Tensor]:
    """BF16 [N, K] each."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(512, 1024, generator=generator)
    outlier = normal.clone()
    outlier[0, 0] = 1e4
    zeros = normal.clone()
    zeros.unflatten(-1, (-1, 16))[:, ::7] = 0
    columns = normal * torch.randn(1024, generator=generator).mul(2).exp()
    found = {
        "normal": normal,
        "normal, one outlier of 1e4": outlier,
        "normal, every 7th block 0": zeros,
        "normal times 3e-6": normal * 3e-6,
        "lognormal columns": columns,
    }
    if model is not None:
        from minitransformer.models.qwen3_moe.weights import read

        wanted = {
            "layers.0.mlp.gate_up.weight": "layer 0, expert 0, gate_up",
            "layers.15.mlp.down.weight": "layer 15, expert 0, down",
        }
        for name, tensor in read(model)[1]:
            if name in wanted:
                found[wanted[name]] = tensor[0]
            if "layers.16." in name:
                break
    return {name: x.bfloat16().contiguous() for name, x in found.items()}


def compare(x: Tensor, theirs: Nvfp4, mine: Nvfp4) -> tuple[str, ...]:
    codes, want = (nvfp4.unpack(q.codes) for q in (theirs, mine))
    differ = (codes != want) & ((codes | want) & 7 != 0)  # 0 and -0 have one value
    scales = theirs.scales != mine.scales
    same = (~scales & torch.equal(theirs.outer, mine.outer)).repeat_interleave(16, -1)
    lost = nvfp4.dequantize(theirs).double() - x.double()
    snr = 10 * torch.log10(x.double().square().sum() / lost.square().sum())
    ulp = int(theirs.outer.view(torch.int32)) - int(mine.outer.view(torch.int32))
    alone = f"{float(differ[same].double().mean()):.4%}" if same.any() else "-"
    return (
        "equal" if ulp == 0 else f"{ulp:+,} ulp",
        f"{float(scales.double().mean()):.3%}",
        f"{float(differ.double().mean()):.3%}",
        alone,
        f"{float((theirs.scales & 0x7F == 0).double().mean()):.2%}",
        f"{float(snr):.3f}",
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, help="take weights of this BF16 checkpoint too")
    arguments.add_argument("--markdown", action="store_true", help="a table for docs/nvfp4.md")
    args = arguments.parse_args()
    warnings.filterwarnings("ignore")
    rows, absent = [], {}
    for name, x in inputs(args.model).items():
        mine = ours(x)
        for label, (_, quantise) in QUANTISERS.items():
            try:
                rows.append((name, label, *compare(x, quantise(x), mine)))
            except ImportError as error:
                absent[label] = str(error)
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    edge, middle = ("| ", " | ") if args.markdown else ("", "  ")
    lines = [COLUMNS, *([tuple("-" * w for w in widths)] if args.markdown else []), *rows]
    for line in lines:
        print(edge + middle.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + edge[::-1])
    for package in sorted({package for package, _ in QUANTISERS.values()}):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    for label, why in absent.items():
        print(f"left out: {label} ({why})")


if __name__ == "__main__":
    main()
