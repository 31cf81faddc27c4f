"""Where a model lives: 'cpu', 'cuda' or 'cuda:1'. What can't run is refused before anything is loaded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from minitransformer.errors import InputError

HOPPER = (9, 0)
OPERATORS = Path(__file__).resolve().parent / "ops"
_FOREVER = 1 << 62
_allowed = False
_refused: dict[torch.device, str] = {}


def resolve(name: str | torch.device) -> torch.device:
    """The device of this name, with its index. InputError, with what to do, where it can't run the operators."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {str(name)!r} is not known; choose cpu, cuda or cuda:N") from None
    index = int(str(name).partition(":")[2] or 0)  # torch keeps 8 bits of it: 'cuda:256' would be the first GPU
    if device.type == "cpu":
        if index:
            raise InputError(f"device {str(name)!r}: there is one, cpu, which is all cores; use --device cpu")
        return torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f"device {str(name)!r}: the operators run on cpu and cuda only")
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        raise InputError(f"device {str(name)!r}: {why} (torch {torch.__version__}); use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise InputError(f"device {str(name)!r}: there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    if find_spec("triton") is None:
        raise InputError(f"device {str(name)!r}: the GPU kernels need Triton; pip install triton")
    found = torch.device("cuda", index)
    if unverified(found) and not unverified_allowed():
        raise InputError(
            f"device {str(name)!r}: {unverified(found)}; use --device cpu, or --allow-unverified to run it all the same"
        )
    return found


@lru_cache
def unverified(device: torch.device) -> str | None:
    """The sentence that says why a GPU's bits are not known to be the spec's, or are not; None elsewhere.

    A Hopper GPU has them unless its self-checks found otherwise (tuning/reverify.py).
    """
    if device in _refused:
        return _refused[device]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the spec's accumulator, "
        "hopper-k16-f25, is that of 9.0 (H100, H200), and no bits were compared on another GPU"
    )


def refuse(device: torch.device, why: str) -> None:
    """From now on this GPU is one whose bits are not the spec's, for this process."""
    _refused[device] = why
    unverified.cache_clear()


def allow_unverified(allow: bool = True) -> None:
    """Whether the operators may run on GPUs that `unverified` has a sentence for. Reports then carry it."""
    global _allowed
    _allowed = allow


def unverified_allowed() -> bool:
    return _allowed


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that can still be allocated, torch's own cache included; 2^62 elsewhere."""
    if device.type != "cuda":
        return _FOREVER
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def require_room(device: torch.device, needed: int, what: str) -> None:
    """InputError, with the numbers, if a GPU lacks the room."""
    free = free_bytes(device)
    if needed > free:
        raise InputError(f"{what}: {needed / 2**30:,.1f} GiB are needed on {device}, {free / 2**30:,.1f} GiB are free")


@contextmanager
def room_on(device: torch.device, needed: int, what: str) -> Iterator[None]:
    """Tensors are made on the device in here; InputError beforehand, with the numbers, if a GPU lacks the room."""
    require_room(device, needed, what)
    with device:
        yield


def memory_needed(error: BaseException) -> str:
    """Of an out-of-memory error: how much was asked for, and by which operator, as far as it tells."""
    asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))  # torch's words on a GPU and on a CPU
    operator, trace = None, error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        operator = path.stem if OPERATORS in path.parents and path.stem not in ("cpu", "device") else operator
        trace = trace.tb_next
    amount = f"{asked[1]} more were needed" if asked else "more was needed than there is"
    return (f"{amount} in {operator}" if operator else amount) + _held_by_others(str(error))


def _held_by_others(text: str) -> str:
    """Of torch's words on a GPU: what other processes have of it, such as an engine."""
    sizes = r"capacity of ([\d.]+) GiB of which ([\d.]+ \w+) is free.*this process has ([\d.]+ \w+) memory in use"
    found = re.search(sizes, text, re.DOTALL)
    if found is None:
        return ""
    units = {"GiB": 1, "MiB": 2**-10, "KiB": 2**-20}
    free, ours = (float(n) * units.get(unit, 0) for n, unit in (size.split() for size in found.groups()[1:]))
    others = float(found[1]) - free - ours
    if others < 1:
        return ""
    hold = f"{others:.1f} of the GPU's {found[1]} GiB"
    return f", while other processes hold {hold} (an SGLang engine: --mem-fraction-static says how much)"


@contextmanager
def naming_memory(what: str, advice: str) -> Iterator[None]:
    """Turns a GPU's out-of-memory error into an InputError that says what the memory was for and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(f"out of GPU memory in {what}: {memory_needed(error)}; {advice}") from None
