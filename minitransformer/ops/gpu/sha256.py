"""SHA-256 of the pieces of a tensor's bytes, on its GPU; the SGLang plugin's checksums.py says of what."""

import torch
from torch import Tensor

from minitransformer.ops.gpu import cuda
from minitransformer.ops.gpu.launch import cdiv, on

SOURCE, THREADS = "sha256.cu", 64


def defines(piece: int) -> tuple[tuple[str, int], ...]:
    """What sha256.cu is compiled with."""
    return ("PIECE", piece), ("THREADS", THREADS)


def digests(bits: Tensor, piece: int) -> Tensor:
    """bits uint8 [n], contiguous, on a GPU -> uint8 [n // piece, 32] there, of the whole pieces; it doesn't wait."""
    pieces = bits.numel() // piece
    out = torch.empty(pieces, 32, dtype=torch.uint8, device=bits.device)
    if pieces:
        if bits.data_ptr() % 16:
            bits = bits.clone()
        with on(bits.device):
            run = cuda.kernel(bits.device, SOURCE, "digests", defines(piece))
            cuda.launch(run, cdiv(pieces, THREADS), THREADS, 0, (bits, out, pieces))
    return out
