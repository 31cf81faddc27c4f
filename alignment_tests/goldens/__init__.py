"""Known answers: hashes of output bits, which every machine must give."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def digest(tensors: list[Tensor]) -> str:
    """sha256 over dtypes, shapes and little-endian bits."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        sha.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main(cases: Mapping[str, Callable[[str], list[Tensor]]], file: Path, device: str = "cpu") -> None:
    """Writes the hashes of a module's cases into its file, or prints them: --print."""
    text = json.dumps({name: digest(case(device)) for name, case in cases.items()}, indent=2) + "\n"
    if "--print" in sys.argv:
        print(text)
    else:
        file.write_text(text)
