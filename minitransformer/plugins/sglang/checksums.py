"""Checksums of tensors, the same wherever they lie: what `sync` compares of learner and server.

A checksum is the sha256 of type, shape and the sha256 of each PIECE bytes (the last piece may be shorter). A GPU hashes
its pieces itself, a thread each (ops/gpu/sha256.cu), so that the weights need not come to the host.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PIECE = 8192  # bytes


def checksums(model: Any) -> dict[str, str]:
    """Our name -> the checksum of every parameter and of every stored code and scale."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for i, layer in enumerate(model.layers):
        for projection, q in getattr(getattr(layer.mlp, "experts", None), "fixed", {}).items():
            for part in ("codes", "scales", "outer"):
                tensors[f"layers.{i}.mlp.{projection}.{part}"] = getattr(q, part)
    return hashed(tensors)


def hashed(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """GPUs work on all of them before the host waits for the first; hashlib leaves Python's lock."""
    flat = {name: t.contiguous().view(-1).view(torch.uint8) for name, t in tensors.items()}
    there = {name: _on_gpu(bits) for name, bits in flat.items() if bits.is_cuda}
    for home in {bits.device for bits in there.values()}:
        torch.cuda.synchronize(home)  # the threads below have streams of their own

    def one(name: str) -> str:
        bits, tensor = flat[name], tensors[name]
        whole = bits.numel() // PIECE * PIECE
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        if name in there:
            digest.update(there[name].cpu().numpy().data)
            rest = bits[whole:].cpu().numpy().data
        else:
            rest = bits.numpy().data
        for begin in range(0, len(rest), PIECE):
            digest.update(hashlib.sha256(rest[begin : begin + PIECE]).digest())
        return digest.hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(one, tensors), strict=True))


def checksum(tensor: Tensor) -> str:
    return hashed({"": tensor})[""]


def unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the tensors whose checksums differ, or that one side lacks."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _on_gpu(bits: Tensor) -> Tensor:
    from minitransformer.ops.gpu import sha256

    return sha256.digests(bits, PIECE)
