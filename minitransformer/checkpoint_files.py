"""Named tensors on disk: safetensors files read one tensor at a time, and directories that appear whole or not at all.

Nothing here knows a model. Pickle is never opened: it runs code. Every error of a file is an InputError of one line.
"""

import copy
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.files import holding, named, parse_json, read_text, short

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}


def read_json(path: Path) -> Any:
    """The content of a JSON file; a key that stands twice in one object is refused, not overwritten."""
    help = "write or download it again"
    return parse_json(str(path), read_text(path, help), f"; {help}")


def read_json_if_there(path: Path, absent: Any = None) -> Any:
    """As read_json, or `absent` where nothing stands; a directory or a broken link is not nothing."""
    if not os.path.lexists(path):
        return absent
    if not path.is_file():
        raise InputError(f"{path}: is not a file; write or download it again, or remove it")
    return read_json(path)


def first_few(names: Iterable[str]) -> str:
    """'a, b, c and 4 more', for messages."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def once(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, or an InputError: of two of one name, which is meant?"""
    seen = set()
    for name, tensor in tensors:
        if name in seen:
            raise InputError(f"{name} comes twice; send every tensor once")
        seen.add(name)
        yield name, tensor


class TensorFiles:
    """The tensors of a checkpoint directory (model.safetensors, or the shards of an index), read when asked for.

    files[name] is the file that holds it; shapes[name] a tuple; dtypes[name] safetensors' word for it ("BF16", "F32").
    Raises InputError when a file is missing or damaged, or when index and shards do not name the same tensors.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        self.files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        index = self._index()
        self._open = {name: self._open_file(name) for name in sorted(set(index.values()) if index else {SINGLE})}
        for file, handle in self._open.items():
            for name in handle.keys():
                if name in self.files:
                    raise InputError(f"{self.directory}: {name} is stored twice, in {self.files[name]} and {file}")
                view = handle.get_slice(name)
                self.files[name], self.dtypes[name] = file, view.get_dtype()
                self.shapes[name] = tuple(view.get_shape())
        if index is not None and index != self.files:
            wrong = {n for n in index.keys() | self.files.keys() if index.get(n) != self.files.get(n)}
            raise InputError(f"{self.directory}/{INDEX}: does not say where {first_few(wrong)} is; write it again")

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._open[self.files[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.directory}/{self.files[name]}: {name} cannot be read ({error})") from None

    def without(self, names: Collection[str]) -> "TensorFiles":
        """The same open files, seen without these tensors."""
        rest = copy.copy(self)
        rest.files, rest.shapes, rest.dtypes = (
            {name: value for name, value in seen.items() if name not in names}
            for seen in (self.files, self.shapes, self.dtypes)
        )
        return rest

    def _index(self) -> dict[str, str] | None:
        """weight_map of the index, or None for a single file."""
        here = {path.name for path in self.directory.iterdir()}
        if INDEX in here and SINGLE in here:
            raise InputError(f"{self.directory}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
        if SINGLE in here:
            return None
        if INDEX not in here:
            pickles = [name for name in here if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
            if pickles:
                raise InputError(
                    f"{self.directory}: only pickled weights ({first_few(pickles)}), which are never opened because "
                    "they run code; convert them to safetensors"
                )
            raise InputError(f"{self.directory}: no {SINGLE} and no {INDEX}; is this a checkpoint?")
        content = read_json(self.directory / INDEX)
        index = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(index, dict) or not index:
            raise InputError(f"{self.directory}/{INDEX}: has no weight_map; write it again")
        for name, file in index.items():
            # A shard is a file of this directory; an index must not be able to point elsewhere.
            if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
                raise InputError(f"{self.directory}/{INDEX}: {name} is said to be in {file!r}, which is no file name")
        if absent := set(index.values()) - here:
            raise InputError(
                f"{self.directory}: {first_few(absent)} is missing but named in {INDEX}; download it again"
            )
        return index

    def _open_file(self, name: str) -> Any:
        try:
            return safe_open(self.directory / name, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.directory}/{name}: not a complete safetensors file ({error}); download or save it again"
            ) from None


def write_safetensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write BF16, FP32, uint8 or E4M3 tensors in the safetensors format, without a second copy of the file in memory.

    The format: a little-endian uint64 length, that many bytes of JSON ({name: dtype, shape, data_offsets}), the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_sharded(directory: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> None:
    """Write model.safetensors, or shards of at most `limit` bytes (one tensor at least) and their index.

    tensors may be a generator: one shard of it is held at a time.
    """
    shards: list[list[str]] = []
    held: list[tuple[str, Tensor]] = []
    size = total = 0

    def flush() -> None:
        shards.append([name for name, _ in held])
        write_safetensors(directory / f"{len(shards)}.part", held)
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            flush()
            size = 0
        held.append((name, tensor))
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    # A shard's name says how many there are, which only the end of the stream shows.
    if len(shards) == 1:
        (directory / "1.part").rename(directory / SINGLE)
        return
    places = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        (directory / f"{i}.part").rename(directory / file)
        places |= {name: file for name in names}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, content: Any) -> None:
    """Indented UTF-8 with sorted keys, so that the same content is the same bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replacing_directory(directory: str | os.PathLike, own: Iterable[str]) -> Iterator[Path]:
    """A new directory to write into, renamed to `directory` at the end; on an error it is removed.

    own: patterns of file names that an existing `directory` may hold and lose. InputError when it holds anything else,
    at the beginning or at the end; when another run is writing it; or when it can't be written.
    """
    target = named(directory).resolve()
    _refuse_foreign(directory, target, own)
    made = [folder for folder in target.parents if not folder.exists()]  # the innermost first
    name = short(target.name)
    temporary, old = (target.with_name(f".{name}.{kind}-{secrets.token_hex(4)}") for kind in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with holding(target.with_name(f".{name}.lock")) as alone:
            if not alone:
                raise InputError(f"{directory}: another run is writing it; wait for its end, or choose another place")
            temporary.mkdir()
            yield temporary
            _refuse_foreign(directory, target, own)  # once more: what has come meanwhile is not lost
            _rename(temporary, target, old)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror}); nothing was changed") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():
            _remove_empty(made)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_foreign(directory: str | os.PathLike, target: Path, own: Iterable[str]) -> None:
    if not target.exists():
        return
    foreign = [p.name for p in target.iterdir() if not any(p.match(o) for o in own)] if target.is_dir() else ["a file"]
    if foreign:
        raise InputError(
            f"{directory}: exists and is not just a checkpoint ({first_few(foreign)}); choose another place"
        )


def _rename(temporary: Path, target: Path, old: Path) -> None:
    """Two renames, because a directory with files can't be renamed over; a complete copy exists at every moment."""
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


def _remove_empty(folders: Iterable[Path]) -> None:
    """Folders that were made for what then failed; one that somebody else has used meanwhile stays."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
