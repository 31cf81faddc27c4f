"""The two ways of tensors to a server: each is a context that gives (path, body) of the request that loads them.

Nothing of SGLang is imported: what its MultiprocessingSerializer writes is a pickle by torch.multiprocessing.
"""

import base64
import io
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler to write a tensor of a GPU as a handle
from torch import Tensor

from minitransformer.checkpoint_files import replacing_directory, write_json, write_sharded
from minitransformer.errors import InputError

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 16  # bytes: a view of any type may begin there
SHARD_BYTES = 4 * 10**9
Named = Sequence[tuple[str, Tensor]]
Request = tuple[str, dict[str, Any]]


class _Call:
    """Pickled as function(*arguments), which whoever reads it calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@contextmanager
def by_tensor(tensors: Named) -> Iterator[Request]:
    """Handles: of the learner's own memory on a GPU, of a copy in a file of shared memory on the CPU. Same host only.

    Not torch's handles on the CPU: they move the learner's parameters, and keep a copy that no receiver has fetched.
    The file goes when the context ends; a server that has read it keeps its mapping, one that comes later is refused.
    InputError if there is no room.
    """
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY if Path(SHARED_MEMORY).is_dir() else None) as file:
        begins = _write(file, [t for _, t in tensors if not t.is_cuda])
        copy = _Call(partial(torch.from_file, dtype=torch.uint8), file.name, False, file.tell())
        shared: list[tuple[str, Any]] = []
        for name, t in tensors:
            if not t.is_cuda:
                bits = _Call(Tensor.narrow, copy, 0, next(begins), t.nbytes)
                t = _Call(Tensor.view, _Call(Tensor.view, bits, t.dtype), tuple(t.shape))
            shared.append((name, t))
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump(shared)
        handles = base64.b64encode(pickled.getvalue()).decode()
        yield "/update_weights_from_tensor", {"serialized_named_tensors": [handles]}


def _write(file: Any, tensors: Sequence[Tensor]) -> Iterator[int]:
    """Writes the tensors one after another -> the byte at which each begins."""
    begins = []
    try:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            begins.append(file.tell())
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors) / 2**20
        raise InputError(
            f"{Path(file.name).parent}: no room for {size:,.1f} MiB ({error.strerror}); make it larger, or use the "
            "route disk"
        ) from None
    return iter(begins)


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
