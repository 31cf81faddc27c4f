"""A trace as one safetensors file.

    stage/<name>   the stage's rows [rows, ...], in its own dtype
    rows/<name>    int64 [rows]: the row of `keys` that each of them belongs to
    keys           int64 [N, 2]: request id, position
    metadata       format, stages (in the model's order), spec (entry -> value), requests (prompt and generated ids);
                   unverified, if a GPU made it whose bits are not known to be the spec's: the reason

Names are the stages' own; nothing in the file is code.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from minitransformer.alignment.trace import Trace
from minitransformer.alignment.ulp import bits
from minitransformer.errors import InputError
from minitransformer.files import is_replaceable, parse_json, replacing_file, shown, write_bytes

FORMAT = "minitransformer-trace/1"
_FIELDS = (("spec", dict), ("requests", dict), ("stages", list))
_STAGE = re.compile(r"layers\.[0-9]{1,6}\.\w+|(?!layers\b)\w+", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)


def save_trace(trace: Trace, path: Path) -> None:
    """Writes under a temporary name in the same folder, then renames: a reader never sees half a file."""
    tensors = {"keys": trace.keys.pairs().clone()}
    for stage in trace.stages:
        tensors[f"stage/{stage}"] = trace.rows(stage).contiguous()
        tensors[f"rows/{stage}"] = trace.row_keys(stage)
    metadata = {
        "format": FORMAT,
        "stages": json.dumps(trace.stages),
        "spec": json.dumps(trace.spec, sort_keys=True),
        "requests": json.dumps({str(r): ids for r, ids in sorted(trace.requests.items())}),
    }
    if trace.unverified:
        metadata["unverified"] = trace.unverified
    if not is_replaceable(path):  # a pipe takes bytes in order, which a safetensors file is not written in
        write_bytes(path, save(tensors, metadata=metadata))
        return
    try:
        with replacing_file(path) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask wants it; save_file makes files that only the owner reads
            save_file(tensors, temporary, metadata=metadata)
            temporary.chmod(mode)
    except (SafetensorError, OSError) as error:  # the former where the disk is full
        raise InputError(f"{path}: cannot be written ({error}); nothing was changed") from None


def load_trace(path: Path) -> Trace:
    """InputError names the file and what is wrong with it."""
    if not path.is_file():
        raise InputError(f"{path}: no such trace file; write one with `minitransformer trace`")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path}: not a trace (format {metadata.get('format')!r}, expected {FORMAT!r})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return _trace(metadata, tensors)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); write the trace again") from error
    except _Damage as error:
        raise InputError(f"{path}: a damaged trace ({error}); write it again") from None


class _Damage(Exception):
    """What does not fit in a trace's metadata or tensors."""


def _trace(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Trace:
    spec, requests, stages = (_field(metadata, key, kind) for key, kind in _FIELDS)
    trace = Trace(spec=spec)
    trace.unverified = metadata.get("unverified")
    if not (trace.unverified or "").isprintable():
        raise _Damage(f"unverified is {shown(trace.unverified)}")
    trace.requests = dict(_request(key, ids) for key, ids in requests.items())
    pairs_N2 = _tensor(tensors, "keys")
    if pairs_N2.dtype != torch.int64 or pairs_N2.shape[1:] != (2,):
        raise _Damage("keys must be int64 pairs")
    trace.keys.number(map(tuple, pairs_N2.tolist()))
    if len(trace.keys) != len(pairs_N2):
        raise _Damage("keys must be distinct")
    seen: set[str] = set()
    for stage in stages:
        if not isinstance(stage, str) or not _STAGE.fullmatch(stage) or stage in seen:
            raise _Damage(f"{shown(stage)} is no name of a stage, or stands twice")
        seen.add(stage)
        trace.take(stage, *_rows(stage, tensors, len(pairs_N2)))
    return trace


def _field(metadata: dict[str, str], key: str, kind: type) -> Any:
    if key not in metadata:
        raise _Damage(f"{key} is missing")
    try:
        value = parse_json(key, metadata[key])
    except InputError as error:
        raise _Damage(str(error)) from None
    if not isinstance(value, kind):
        raise _Damage(f"{key} is {shown(value)}")
    return value


def _request(key: str, ids: Any) -> tuple[int, dict[str, list[int]]]:
    if not _NUMBER.fullmatch(key):
        raise _Damage(f"request {shown(key)} is no number")
    if not isinstance(ids, dict) or ids.keys() != {"prompt_ids", "token_ids"}:
        raise _Damage(f"request {key} lacks prompt_ids and token_ids, or has more")
    for name, values in ids.items():
        if not isinstance(values, list) or any(type(i) is not int for i in values):
            raise _Damage(f"request {key}: {name} is no list of ids")
    return int(key), ids


def _rows(stage: str, tensors: dict[str, Tensor], keys: int) -> tuple[Tensor, Tensor]:
    """(the keys of a stage's rows, the rows), proven to fit each other."""
    rows, keys_R = _tensor(tensors, f"stage/{stage}"), _tensor(tensors, f"rows/{stage}")
    try:
        bits(rows)
    except TypeError as error:
        raise _Damage(f"stage {stage}: {error}") from None
    if keys_R.dtype != torch.int64 or keys_R.dim() != 1 or keys_R.shape != rows.shape[:1]:
        raise _Damage(f"stage {stage}: its rows do not fit its keys")
    if not bool(((keys_R >= 0) & (keys_R < keys)).all()) or len(keys_R.unique()) != len(keys_R):
        raise _Damage(f"stage {stage}: its rows do not fit its keys")
    return keys_R, rows


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise _Damage(f"{name} is missing")
    return tensors[name]
