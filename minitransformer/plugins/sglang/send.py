"""The two ways of tensors to a server: each is a context that gives (path, body) of the request that loads them.

Nothing of SGLang is imported: what its MultiprocessingSerializer writes is a pickle by torch.multiprocessing.
"""

import base64
import io
import secrets
import shutil
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from minitransformer.checkpoint_files import replacing_directory, write_json, write_sharded
from minitransformer.errors import InputError
from minitransformer.files import named
from minitransformer.plugins.sglang.identity import gpu

ROUTES = ("tensor", "disk", "distributed")
SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 16  # bytes: a view of any type may begin there
SHARD_BYTES = 4 * 10**9
Named = Sequence[tuple[str, Tensor]]
Request = tuple[str, dict[str, Any]]
# Of the arguments of torch's rebuild_cuda_tensor: the GPU, and ref_counter_handle with its offset.
DEVICE, COUNTER = 6, slice(11, 13)
NO_COUNTER = b"/minitransformer-counts-nothing"


class _Call:
    """Pickled as function(*arguments), which whoever reads it calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


_handles: dict[int, tuple[StorageWeakRef, _Call]] = {}  # by address
_handing = threading.Lock()


def require_route(route: str | None, backend: str | None, directory: str | Path | None = None) -> None:
    """InputError for a route that is none, and for a backend or a directory without its route."""
    if route not in (None, *ROUTES):
        raise InputError(f"route {route!r} is not supported; choose {', '.join(ROUTES[:-1])} or {ROUTES[-1]}")
    if backend is not None and route != "distributed":
        raise InputError(f"backend {backend!r} is of the route distributed; choose that route, or leave it out")
    if directory is not None and route not in (None, "disk"):
        raise InputError(f"directory {str(directory)!r} is of the route disk; choose that route, or leave it out")


def default_route(url: str, directory: str | Path | None, here: str | None, there: str | None) -> str:
    """here, there: the GPUs of learner and server."""
    if directory is not None or not _is_here(url):
        return "disk"
    return "tensor" if here is None or there is None or here == there else "distributed"


def _is_here(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname  # in lower case
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname().lower())


@contextmanager
def by_tensor(tensors: Named, same_gpu: bool = True) -> Iterator[Request]:
    """Handles: of the learner's own memory on a GPU, of a copy in a file of shared memory on the CPU. Same host only.

    same_gpu: learner and server are on one GPU; if not, a GPU's tensors are copied to shared memory too.
    Not torch's handles on the CPU: they move the learner's parameters, and keep a copy that no receiver has fetched.
    The file goes when the context ends; a server that has read it keeps its mapping, one that comes later is refused.
    InputError if there is no room.
    """
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY if Path(SHARED_MEMORY).is_dir() else None) as file:
        begins = _write(file, [t for _, t in tensors if not (t.is_cuda and same_gpu)])
        copy = _Call(partial(torch.from_file, dtype=torch.uint8), file.name, False, file.tell())
        shared: list[tuple[str, Any]] = []
        kept: list[Tensor] = []  # until the context ends
        with _handing:
            for address in [address for address, (life, _) in _handles.items() if life.expired()]:
                del _handles[address]
            for name, t in tensors:
                if t.is_cuda and same_gpu:
                    kept.append(t := t.contiguous())
                    whole, begin = _handle(t.untyped_storage()), t.storage_offset() * t.element_size()
                else:
                    whole, begin = copy, next(begins)
                bits = _Call(Tensor.narrow, whole, 0, begin, t.nbytes)
                shared.append((name, _Call(Tensor.view, _Call(Tensor.view, bits, t.dtype), tuple(t.shape))))
        for device in {t.device for t in kept}:
            torch.cuda.synchronize(device)  # a handle's own event is of the time when it was made
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump(shared)
        handles = base64.b64encode(pickled.getvalue()).decode()
        yield "/update_weights_from_tensor", {"serialized_named_tensors": [handles]}


def _handle(storage: torch.UntypedStorage) -> _Call:
    """All bytes of a storage on a GPU, one handle for its whole life.

    Made by torch, which would wrap the memory once more for each new handle, and count who has yet to fetch it: memory
    of which nobody does is kept for ever, and so is what is fetched twice (the count has no sign). by_tensor keeps the
    tensors while a server reads, so the count is given back at once, and the server is told one that does not exist.
    The GPU goes by its uuid, as SGLang reads it: processes may number their GPUs differently.
    """
    address, life = storage.data_ptr(), StorageWeakRef(storage)
    if address not in _handles or _handles[address][0] != life:  # a resized storage may have left its address
        rebuild, arguments = reduce_tensor(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        torch.UntypedStorage._release_ipc_counter_cuda(*arguments[COUNTER])
        arguments = *arguments[: COUNTER.start], NO_COUNTER, 0, *arguments[COUNTER.stop :]
        arguments = *arguments[:DEVICE], gpu(storage.device), *arguments[DEVICE + 1 :]
        _handles[address] = life, _Call(rebuild, *arguments)
    return _handles[address][1]


def _write(file: Any, tensors: Sequence[Tensor]) -> Iterator[int]:
    """Writes the tensors one after another -> the byte at which each begins."""
    begins = []
    try:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            begins.append(file.tell())
            file.write(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
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
    directory = named(tempfile.gettempdir() if directory is None else directory).resolve()
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; name one that SGLang can read too")
    target = directory / f"minitransformer-sync-{secrets.token_hex(4)}"
    try:
        with replacing_directory(target, ()) as new:
            write_json(new / "config.json", config.to_hf())
            write_sharded(new, tensors, SHARD_BYTES)
        yield "/update_weights_from_disk", {"model_path": str(target)}
    finally:
        shutil.rmtree(target, ignore_errors=True)
