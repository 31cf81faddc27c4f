"""The two ways of tensors to a server: each is a context that gives (path, body) of the request that loads them.

Nothing of SGLang is imported: what its MultiprocessingSerializer writes is a pickle by torch.multiprocessing.
"""

import base64
import io
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler to write a tensor as a handle
from torch import Tensor

from minitransformer.checkpoint_files import replacing_directory, write_json, write_sharded
from minitransformer.errors import InputError

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 16  # bytes: a view of any type may begin there
SHARD_BYTES = 4 * 10**9
Named = Sequence[tuple[str, Tensor]]
Request = tuple[str, dict[str, Any]]


@contextmanager
def by_tensor(tensors: Named) -> Iterator[Request]:
    """Handles: of the learner's own memory on a GPU, of one copy in shared memory on the CPU. Same host only.

    InputError if the shared memory is too small. The copy lives until the context ends.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    # By file name: descriptors are passed only to processes that share a secret, which a server does not.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        shared, pickled = _shared(tensors), io.BytesIO()
        ForkingPickler(pickled).dump(shared)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    handles = base64.b64encode(pickled.getvalue()).decode()
    yield "/update_weights_from_tensor", {"serialized_named_tensors": [handles]}
    shared.clear()


def _shared(tensors: Named) -> list[tuple[str, Tensor]]:
    """Views of one buffer in shared memory. The tensors themselves stay where they are: sharing would move them."""
    sizes = [0 if t.is_cuda else -(-t.nbytes // ALIGNMENT) * ALIGNMENT for _, t in tensors]
    total = sum(sizes)
    if Path(SHARED_MEMORY).is_dir() and total > (free := shutil.disk_usage(SHARED_MEMORY).free):
        raise InputError(
            f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, the weights need {total / 2**20:,.0f}; make it larger, "
            "or use the route disk"
        )
    buffer = torch.empty(total, dtype=torch.uint8).share_memory_()
    shared = []
    for (name, tensor), end, size in zip(tensors, accumulate(sizes), sizes, strict=True):
        if not tensor.is_cuda:
            begin = end - size
            view = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor = view.copy_(tensor)
        shared.append((name, tensor))
    return shared


@contextmanager
def by_disk(tensors: Named, config: Any, directory: str | Path | None = None) -> Iterator[Request]:
    """A checkpoint under a new name in `directory` (default: the temporary directory), removed at the end."""
    directory = Path(directory or tempfile.gettempdir()).resolve()
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; name one that the server can read too")
    target = directory / f"minitransformer-sync-{secrets.token_hex(4)}"
    try:
        with replacing_directory(target, ()) as new:
            write_json(new / "config.json", config.to_hf())
            write_sharded(new, tensors, SHARD_BYTES)
        yield "/update_weights_from_disk", {"model_path": str(target)}
    finally:
        shutil.rmtree(target, ignore_errors=True)
