"""Measures the tensor core where results are subnormal: python -m alignment_tests.gpu.measure_tiny OUT.npz (H200).

Products of operands near 2^-63 to 2^-133, for one and two steps of K = 16, by mma.sync and wgmma, so that the rule
for the smallest exponents can be read off the bits.
"""

import sys

import numpy as np
import torch

from minitransformer.ops import gpu
from minitransformer.ops.gpu.tiles import Tile


def operand(rng, shape, low, high):
    fields = rng.integers(low, high + 1, shape)
    return ((rng.integers(0, 2, shape) << 15) | (fields << 7) | rng.integers(0, 128, shape)).astype(np.uint16)


def main() -> None:
    rng, out = np.random.default_rng(0), {}
    for name, low, high, depth in (
        ("a", 0, 63, 16), ("b", 40, 63, 16), ("c", 50, 60, 16), ("d", 58, 63, 16), ("e", 40, 63, 32), ("f", 0, 63, 64),
    ):  # fmt: skip
        a, b = operand(rng, (64, depth), low, high), operand(rng, (256, depth), low, high)
        x, w = (torch.from_numpy(t.view(np.int16)).view(torch.bfloat16).cuda() for t in (a, b))
        for kind, tile in (("sync", Tile(16, 32, 16, 4, 1)), ("wgmma", Tile(64, 128, 64, 4, 2))):
            y = gpu.linear.forward(x, w, torch.float32, tile)
            out[f"{name}_{kind}"] = y.cpu().view(torch.int32).numpy()
        out[f"{name}_torch"] = torch.mm(x, w.t(), out_dtype=torch.float32).cpu().view(torch.int32).numpy()
        out[f"{name}_x"], out[f"{name}_w"] = a.view(np.int16), b.view(np.int16)
    np.savez_compressed(sys.argv[1], **out)
    print({k: v.shape for k, v in out.items()})


if __name__ == "__main__":
    main()
