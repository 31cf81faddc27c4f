"""A GPU under versions that were not verified: every operator is compared with the CPU before its first result is used.

Verified is what the package's table was made on: GPU, CUDA, torch, Triton, cuBLAS. There nothing is run. On any
other Hopper GPU the first operator waits for the self-checks; what they found is kept for the process, and, if every
bit agrees, in a stamp in the user's cache, named by versions and sources. Where a bit differs the GPU is refused as one
that is no Hopper is (devices.py): --allow-unverified goes on, and every report then says so.
"""

import hashlib
import json
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from minitransformer.devices import OPERATORS, naming_memory, refuse, unverified, unverified_allowed
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.files import holding, replacing_file
from minitransformer.tuning import machine, proof, table

# Of libraries, whose products are proven again under others (choice.py). The driver gets our kernels as machine code.
OF_LIBRARIES = ("environment", "blas", "driver")
PATIENCE = 600  # seconds that a process waits for what another one is comparing
_settled: set[torch.device] = set()
_settling = threading.Lock()
_checking: set[int] = set()  # threads whose operators are the self-checks' own


@dataclass(frozen=True)
class Result:
    """outputs: how many numbers were compared. wrong: case and first element that differs, or why it does not run."""

    name: str
    outputs: int
    wrong: str | None = None


def facts(home: torch.device) -> dict[str, str]:
    """What decides whether a GPU's bits are known."""
    return {name: value for name, value in machine.gpu(home).items() if name not in OF_LIBRARIES}


@lru_cache
def unlike(home: torch.device) -> str | None:
    """'torch 2.12.0, the table has 2.11.0; ...', or None on the versions that were verified."""
    try:
        there = table.read(table.SHIPPED).machine
    except InputError as error:
        return str(error)
    there = {name: value for name, value in there.items() if name not in OF_LIBRARIES}
    return "; ".join(machine.differences(facts(home), there)) or None


@lru_cache
def sources() -> str:
    """sha256 of the operators, kernels and self-checks."""
    found = hashlib.sha256()
    for folder in (OPERATORS, Path(__file__).with_name("selfcheck")):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cu", ".cuh")):
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _key(home: torch.device) -> dict:
    return {"machine": facts(home), "sources": sources()}


def stamp_path(home: torch.device) -> Path | None:
    """Where it is kept that this GPU has the bits; None for a user without a home."""
    name = hashlib.sha256(json.dumps(_key(home), sort_keys=True).encode()).hexdigest()[:20]
    try:
        return table.user_path().with_name("verified") / f"{name}.json"
    except InputError:
        return None


def stamped(home: torch.device) -> bool:
    """Whether a process before this one has found every bit equal here. What can't be read is no stamp."""
    try:
        content = json.loads(stamp_path(home).read_text(encoding="utf-8"))
        return {name: content[name] for name in _key(home)} == _key(home)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return False


def keep(home: torch.device, found: list[Result]) -> None:
    """Writes the stamp, or takes an old one away if an operator is wrong. A cache that can't be written is no error."""
    path = stamp_path(home)
    try:
        if path is None:
            return
        if any(result.wrong for result in found):
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            compared = {result.name: result.outputs for result in found}
            temporary.write_text(json.dumps(_key(home) | {"compared": compared}, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return


@contextmanager
def unasked() -> Iterator[None]:
    """In here the operators of this thread run without being verified first."""
    me = threading.get_ident()
    inner = me in _checking
    _checking.add(me)
    try:
        yield
    finally:
        if not inner:
            _checking.discard(me)


def results(home: torch.device) -> Iterator[Result]:
    """Every self-check on this GPU, without asking for one before. InputError where its memory does not do."""
    from minitransformer.tuning import selfcheck

    for name, check in selfcheck.CHECKS.items():
        with unasked(), naming_memory(f"the self-check of {name}", "stop what else runs on this GPU"):
            found = _compared(name, check, home)
        yield found


def _compared(name: str, check, home: torch.device) -> Result:
    from minitransformer.ops import gpu

    count, what = 0, None
    try:
        for what, got, want in check(home):
            for a, b in zip(got, want, strict=True):
                count += b.numel()
                unequal = proof.first_difference(a, b)
                if unequal is not None:
                    return Result(name, count, f"{what}: {unequal}")
        if home.type == "cuda":
            gpu.device.check(home)  # a kernel that refuses a good row, and so that the row is nobody else's
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # does not compile or run under these versions, whatever kind that is
        why = str(error.__cause__ or error).strip().partition("\n")[0][:200]
        return Result(name, count, f"{f'after {what!r}: ' if what else ''}{type(error).__name__}: {why}")
    return Result(name, count)


def first_use(home: torch.device) -> bool:
    """Before an operator's first result on a GPU. False where it is to be asked again: inside of the self-checks.

    Raises UnsupportedDevice in a CUDA graph's capture, where nothing can be compared.
    """
    if threading.get_ident() in _checking:
        return False
    if home.type != "cuda" or unverified(home) is not None or unlike(home) is None:
        return True
    with _settling:  # other threads wait for the answer
        if home not in _settled and not stamped(home):
            _settle(home)
        _settled.add(home)
    return True


def _settle(home: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedDevice(
            f"{home}: no bits were verified here ({unlike(home)}), and they can't be while a CUDA graph is captured; "
            "run an operator once before, or `minitransformer doctor`"
        )
    told = f"{home}: no bits were verified here ({unlike(home)}): every operator is compared with the CPU now, once"
    try:
        warnings.warn(told, RuntimeWarning, stacklevel=5)
    finally:  # a warning that is an error here is raised when all is known, and once
        _compare(home)
        _settled.add(home)


def _compare(home: torch.device) -> None:
    with _turn(home):
        if stamped(home):  # by the process that was waited for
            return
        # A thread of its own has no watcher of launches, no default device and no mode of PyTorch's that is on here.
        with ThreadPoolExecutor(1, thread_name_prefix="minitransformer-selfcheck") as alone:
            found = alone.submit(_all, home).result()
        keep(home, found)
    wrong = [result for result in found if result.wrong]
    if wrong:
        others = f" (and {len(wrong) - 1} more: {', '.join(r.name for r in wrong[1:])})" if wrong[1:] else ""
        refuse(home, f"{facts(home)['gpu']} has not the spec's bits under these versions ({unlike(home)}): "
                     f"{wrong[0].name}, {wrong[0].wrong}{others}")  # fmt: skip
        if unverified_allowed():
            warnings.warn(f"unverified: {unverified(home)}", RuntimeWarning, stacklevel=6)


@contextmanager
def _turn(home: torch.device) -> Iterator[None]:
    """Of many processes one compares and the others wait for its stamp, not for ever: after PATIENCE they compare too,
    as they do where there is no cache for a stamp or a lock."""
    path = stamp_path(home)
    with ExitStack() as held:
        with suppress(OSError):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(holding(path.with_suffix(".lock"), PATIENCE))
        yield


def _all(home: torch.device) -> list[Result]:
    with torch.cuda.device(home):
        return list(results(home))
