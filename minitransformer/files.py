"""Text and JSON from files, and output files that appear whole or not at all. Standard library only.

Whatever is wrong with a file is an InputError of one line that names it.
"""

import fcntl
import json
import os
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from minitransformer.errors import InputError

SHOWN = 60
POLL = 0.1  # seconds between looks at a lock that another process has


def named(path: str | os.PathLike) -> Path:
    """InputError for an empty path, which Path would take for the current directory."""
    if not os.fspath(path):
        raise InputError("an empty path; name a file or a folder ('.' is the current one)")
    return Path(path)


def read_text(path: str | os.PathLike, help: str) -> str:
    """UTF-8 text without a byte-order mark, which editors on Windows put first; help: what the file should hold."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; {help}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(where: str, text: str, help: str = "") -> Any:
    """The value of a JSON text; a key that stands twice in one object is refused, not overwritten."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{where}: the key {twice!r} stands twice; remove one")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{where}: not valid JSON (nested too deeply){help}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error}){help}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError(f"{where}: not valid JSON (an integer of thousands of digits){help}") from None


def shown(value: Any) -> str:
    """A value for a message, cut to a length that a line can hold."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def check_output(path: Path | None, inputs: Iterable[str | os.PathLike | None] = ()) -> None:
    """InputError before any work is done if a file could not be written there, or if it is one of the inputs.

    inputs: files, or directories, whose files are then the inputs; None is skipped.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"{path}: can't be written")
        return
    for given in filter(None, inputs):
        files = Path(given).iterdir() if Path(given).is_dir() else [Path(given)]
        if path.exists() and any(file.exists() and path.samefile(file) for file in files):
            raise InputError(f"{path}: is also an input ({given}); name another file to write")
    parent = _target(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{path}: {parent} is not a directory that can be written; create it first")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """A regular file appears whole; a pipe, a device or the standard output is written straight to."""
    try:
        _write(path, content)
    except BrokenPipeError:
        raise  # the reader has gone; the command line ends quietly
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def _write(path: Path, content: bytes) -> None:
    stream = standard_stream(path)
    if stream is not None:
        stream.flush()
        stream.buffer.write(content)
        stream.flush()
    elif _is_special(path):
        with open(path, "wb") as file:
            file.write(content)
    else:
        with replacing_file(path) as temporary:
            temporary.write_bytes(content)


def is_replaceable(path: Path) -> bool:
    """Whether `replacing_file` may be used: there is nothing yet, or a regular file."""
    return standard_stream(path) is None and not _is_special(path)


def short(name: str) -> str:
    """A file's name with room for a suffix: file systems end it at 255 bytes. Two names stay two."""
    return name if len(os.fsencode(name)) <= 200 else f"{name[:40]}.{zlib.crc32(os.fsencode(name)):08x}"


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A temporary name beside the file (or beside what a symbolic link points to), renamed to it at the end.

    Of two at once each writes its own, and the file is that of the one that ends last, as if it had begun last.
    """
    target = _target(path)
    # No other process or thread has it.
    temporary = target.with_name(f".{short(target.name)}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def holding(lock: Path, seconds: float = 0) -> Iterator[bool]:
    """Whether in here this holder, and no other of any process, has the file `lock`; false after `seconds` of waiting.

    The kernel's lock goes with its process, however that ends: none is stale. The file goes at the end. Where the file
    system knows no locks everybody holds them. OSError if the file can't be made.
    """
    end = time.monotonic() + seconds
    while (held := _lock(lock)) is None and time.monotonic() < end:
        time.sleep(POLL)
    try:
        yield held is not None
    finally:
        if held is not None:
            with suppress(OSError):
                lock.unlink()  # before it is free: nobody else's
            os.close(held)


def _lock(path: Path) -> int | None:
    """An open file that holds the lock, or None if somebody else has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        file = os.open(path, os.O_RDONLY)  # what a killed process of another user left; a lock asks for no more
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or its last holder has just taken the file away
    except OSError:
        return file
    os.close(file)
    return None


def tell(line: str) -> None:
    """On stderr. That it is full or that nobody reads it ends no work and changes no exit status."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def standard_stream(path: Path) -> IO[str] | None:
    """sys.stdout or sys.stderr if the path is what it goes to: opening it once more would cut off what it holds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                return stream
        except (OSError, ValueError, AttributeError):
            continue  # nothing at the path, or a stream that is closed or no file
    return None


def _is_special(path: Path) -> bool:
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))
