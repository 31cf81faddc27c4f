"""A trace as one safetensors file.

    stage/<name>   the stage's rows [rows, ...], in its own dtype
    rows/<name>    int64 [rows]: the row of `keys` that each of them belongs to
    keys           int64 [N, 2]: request id, position
    metadata       format, stages (in the model's order), spec (entry -> value), requests (prompt and generated ids)

Names are the stages' own; nothing in the file is code.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minitransformer.alignment.trace import Trace
from minitransformer.errors import InputError

FORMAT = "minitransformer-trace/1"


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: a damaged trace ({error}); write it again") from error


def _trace(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> Trace:
    trace = Trace(spec=json.loads(metadata["spec"]))
    trace.requests = {int(request): ids for request, ids in json.loads(metadata["requests"]).items()}
    pairs_N2 = tensors["keys"]
    trace.keys.number(map(tuple, pairs_N2.tolist()))
    if pairs_N2.dtype != torch.int64 or len(trace.keys) != len(pairs_N2):
        raise KeyError("keys must be distinct int64 pairs")
    for stage in json.loads(metadata["stages"]):
        rows, keys_R = tensors[f"stage/{stage}"], tensors[f"rows/{stage}"]
        inside = bool(((keys_R >= 0) & (keys_R < len(pairs_N2))).all())
        if keys_R.shape != rows.shape[:1] or not inside or len(keys_R.unique()) != len(keys_R):
            raise KeyError(f"stage {stage}: its rows do not fit its keys")
        trace.take(stage, keys_R, rows)
    return trace
