"""Where a model lives: 'cpu', 'cuda' or 'cuda:1'. What can't run is refused before anything is loaded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from minitransformer.errors import InputError

_FOREVER = 1 << 62


def resolve(name: str | torch.device) -> torch.device:
    """The device of this name, with its index. InputError, with what to do, where it can't run the operators."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {str(name)!r} is not known; choose cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f"device {str(name)!r}: the operators run on cpu and cuda only")
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        raise InputError(f"device {str(name)!r}: {why} (torch {torch.__version__}); use --device cpu")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise InputError(f"device {str(name)!r}: there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    if find_spec("triton") is None:
        raise InputError(f"device {str(name)!r}: the GPU kernels need Triton; pip install triton")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        raise InputError(
            f"device {str(name)!r}: {torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; the "
            "spec's accumulator, hopper-k16-f25, is 9.0's (H100, H200); use --device cpu"
        )
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that can still be allocated, torch's own cache included; 2^62 elsewhere."""
    if device.type != "cuda":
        return _FOREVER
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def room_on(device: torch.device, needed: int, what: str) -> Iterator[None]:
    """Tensors are made on the device in here; InputError beforehand, with the numbers, if a GPU lacks the room."""
    free = free_bytes(device)
    if needed > free:
        raise InputError(f"{what}: {needed / 2**30:,.1f} GiB are needed on {device}, {free / 2**30:,.1f} GiB are free")
    with device:
        yield


@contextmanager
def naming_memory(what: str, advice: str) -> Iterator[None]:
    """Turns a GPU's out-of-memory error into an InputError that says what the memory was for and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        amount = f": {asked[1]} more were needed" if asked else ""
        raise InputError(f"out of GPU memory in {what}{amount}; {advice}") from None
