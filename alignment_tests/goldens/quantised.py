"""Known answers of the 4-bit and 8-bit operators: sha256 of the output bits on hashed inputs (as row_ops.py).

    python -m alignment_tests.goldens.quantised          writes quantised.json (only after a change of spec)
    python -m alignment_tests.goldens.quantised --print  prints the hashes of this machine's CPU kernels as JSON

An H200 gave every one of them too (alignment_tests/gpu/test_quantised_agrees.py).
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from alignment_tests import inputs
from alignment_tests.goldens import main
from minitransformer.ops import dispatch, gpu, mxfp8, nvfp4, quantised_linear

FILE = Path(__file__).with_name("quantised.json")
E, K, R, N = 8, 576, 70, 160


def _x(seed: int, *shape: int) -> Tensor:
    """Blocks of many sizes, some 0, so that scales are normal, subnormal and 0."""
    x = inputs.bf16(seed, *shape).float().unflatten(-1, (-1, 16))
    return (x * torch.exp2(-inputs.integers(seed + 1, 24, *x.shape[:-1], 1).float())).flatten(-2).bfloat16()


def _nvfp4(device: str, outer: str) -> list[Tensor]:
    q = nvfp4.quantize(_x(1, E, R, K).to(device), outer)
    return [t.cpu() for t in (q.codes, q.scales, q.outer.reshape(-1), nvfp4.decode(q), nvfp4.dequantize(q))]


def _mxfp8(device: str) -> list[Tensor]:
    q = mxfp8.quantize(_x(3, R, K).to(device))
    return [t.cpu() for t in (q.codes, q.scales, mxfp8.decode(q))]


def _product(device: str, activations: str, out_dtype: torch.dtype) -> list[Tensor]:
    """The product of quantised rows with a quantised weight: packed on a GPU, decoded on the CPU."""
    plan = dispatch.plan(inputs.integers(5, E, R, 2), E)
    x, w = _x(6, 2 * R, K).to(device), nvfp4.quantize(_x(8, E, N, K).to(device), "expert")
    scale = None
    if activations == "nvfp4":
        q, x = nvfp4.quantize_decoded(x, nvfp4.row_amax(x))
        scale = q.outer
    elif activations == "mxfp8":
        _, x = mxfp8.quantize_decoded(x)
    weight = gpu.pack.pack(w) if device == "cuda" else nvfp4.decode(w)
    outer = nvfp4.expand_rows(w.outer, (E, N)).contiguous()
    return [quantised_linear.forward(x, scale, weight, outer, plan.to(device), out_dtype).cpu()]


CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "nvfp4_row": lambda d: _nvfp4(d, "row"),
    "nvfp4_tensor": lambda d: _nvfp4(d, "tensor"),
    "nvfp4_expert": lambda d: _nvfp4(d, "expert"),
    "mxfp8": _mxfp8,
    "product_nvfp4": lambda d: _product(d, "nvfp4", torch.float32),
    "product_nvfp4_bf16": lambda d: _product(d, "nvfp4", torch.bfloat16),
    "product_mxfp8": lambda d: _product(d, "mxfp8", torch.float32),
    "product_bf16": lambda d: _product(d, "bf16", torch.float32),
}


if __name__ == "__main__":
    main(CASES, FILE)
