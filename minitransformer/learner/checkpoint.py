"""A learner on disk: one safetensors file with all that an exact resume needs, and nothing that can run code.

    masters.NAME, exp_avg.NAME, exp_avg_sq.NAME    FP32, the parameter's shape, one of each a trained parameter
    __metadata__["learner"]    JSON: format, step, lr, settings, config, spec, frozen, tensors

settings are those that decide the bits of an update; config is the model's, and spec too, with what only an update runs
(spec.UPDATE_OPS); frozen holds a sha256 of each frozen parameter, whose values stay in the model's own checkpoint;
tensors lists what the file must hold. Nothing names a device or a version of torch: no bit follows them. The file is
written under a temporary name, flushed, and renamed. No random state: neither learner nor losses draw numbers. Values
have no checksum: a file that is cut or does not hold what it lists is refused, a flipped bit of a finite value is not.

A file of format 2 has the same tensors, which torch's AdamW made. It is taken up, with a warning.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitransformer.devices import naming_memory
from minitransformer.errors import InputError
from minitransformer.files import named, replacing_file
from minitransformer.ops import adamw
from minitransformer.spec import update_entries

if TYPE_CHECKING:
    from minitransformer.learner.learner import Learner

KINDS = "masters", "exp_avg", "exp_avg_sq"
FORMAT, OF_TORCH = "minitransformer-learner/3", "minitransformer-learner/2"
RECIPE = "options.recipe"  # of the spec
MAX_STEP = 1 << 53  # far above any run's
# Entries that must be the same here and in the file, and what to do when they are not.
_MUST_MATCH = {
    "config": "load the model that this run trained",
    "spec": "run the version of minitransformer that wrote the file",
    "settings": "make the Learner with the saved settings",
    "frozen": "load the model whose frozen weights this run used, and freeze the same parameters",
}


def save(learner: "Learner", path: str | os.PathLike) -> None:
    """Writes the file; an error leaves what stood at the path. InputError if it can't be written or is not finite."""
    path = named(path)
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    _make_state(learner)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _state(learner)}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():  # load would refuse it, and the good file would be gone
            raise InputError(f"{path}: not written, {name} holds a value that is not finite; load a saved run")
    facts = _facts(learner) | {"step": learner.step, "lr": learner.lr, "tensors": sorted(tensors)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            save_file(tensors, temporary, metadata={"learner": json.dumps(facts, sort_keys=True)})
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # or a crash after the rename could leave an empty file under the good name
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written ({error}); nothing was changed") from None


def load(learner: "Learner", path: str | os.PathLike) -> None:
    """Fills masters, optimizer state, step and lr. Everything is read and checked before the first value is taken."""
    try:
        with safe_open(named(path), framework="pt", device="cpu") as file:
            facts = _read_facts(path, file.metadata())
            _refuse_differences(path, facts, _facts(learner))
            _make_state(learner)
            _refuse_incomplete(path, facts, file, learner)
            _fill(learner, file, facts)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a complete safetensors file ({error}); save it again") from None
    if facts["format"] == OF_TORCH:
        warnings.warn(f"{path}: torch's AdamW computed its updates; the next ones are {adamw.SPEC}'s", stacklevel=3)


def _make_state(learner: "Learner") -> None:
    with naming_memory("making masters and moments in FP32", "nothing was changed; freeze parameters or free memory"):
        learner.optimizer.make_state()


def _state(learner: "Learner") -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor) in the model's order."""
    optimizer = learner.optimizer
    for name, master in optimizer.masters.items():
        for kind, tensor in zip(KINDS, (master, *optimizer.moments[name]), strict=True):
            yield f"{kind}.{name}", tensor


def _facts(learner: "Learner") -> dict[str, Any]:
    limits = {key: getattr(learner, key) for key in ("max_grad_norm", "max_tokens_per_pack")}
    facts = {
        "format": FORMAT,
        "config": asdict(learner.model.config),
        "spec": learner.model.spec.entries() | update_entries(),
        "settings": learner.optimizer.settings | limits,
        "frozen": {name: _digest(p) for name, p in learner.frozen.items()},
    }
    return json.loads(json.dumps(facts))  # as a file gives it back: lists for tuples


def _digest(parameter: Tensor) -> str:
    flat = parameter.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _read_facts(path: str | os.PathLike, metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        facts = json.loads((metadata or {}).get("learner", "null"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or facts.get("format") not in (FORMAT, OF_TORCH):
        raise InputError(f"{path}: not a learner's checkpoint of format {FORMAT}; Learner.save writes one")
    kinds = {"step": int, "lr": float, "tensors": list} | dict.fromkeys(_MUST_MATCH, dict)
    for key, kind in kinds.items():
        if type(facts.get(key)) is not kind:
            raise InputError(f"{path}: {key} is missing from its metadata or malformed; save it again")
    if not all(type(name) is str for name in facts["tensors"]):
        raise InputError(f"{path}: tensors in its metadata holds something else than names; save it again")
    if not 0 <= facts["step"] <= MAX_STEP:
        raise InputError(f"{path}: step is {facts['step']}, expected 0 to {MAX_STEP}; save it again")
    if not 0 <= facts["lr"] < math.inf:
        raise InputError(f"{path}: lr is {facts['lr']}, expected a finite number of at least 0; save it again")
    if facts["format"] == OF_TORCH:
        facts["spec"] |= update_entries()
    return facts


def _refuse_differences(path: str | os.PathLike, saved: dict[str, Any], here: dict[str, Any]) -> None:
    for group, advice in _MUST_MATCH.items():
        # The recipe first: which operators are in the spec follows from it.
        for key in sorted(saved[group].keys() | here[group].keys(), key=lambda key: (key != RECIPE, key)):
            a, b = (side[group].get(key, "absent") for side in (saved, here))
            if a != b:
                advice = "give the model the recipe of the file (set_recipe, or --recipe)" if key == RECIPE else advice
                raise InputError(f"{path}: {group} differs: {key} is {a} in the file and {b} here; {advice}")


def _refuse_incomplete(path: str | os.PathLike, facts: dict[str, Any], file: Any, learner: "Learner") -> None:
    """The file, its own list and this learner must name the same tensors; then their dtypes, shapes and values."""
    expected = dict(_state(learner))
    stored = set(file.keys())
    for name in sorted(stored | set(facts["tensors"]) | expected.keys()):
        if not (name in stored and name in facts["tensors"]):
            raise InputError(f"{path}: {name} is {'not listed' if name in stored else 'missing'}; save it again")
        if name not in expected:
            raise InputError(f"{path}: {name} belongs to no trained parameter of this learner; is it another model's?")
    for name, like in expected.items():
        view = file.get_slice(name)
        if view.get_dtype() != "F32" or tuple(view.get_shape()) != tuple(like.shape):
            found = f"{view.get_dtype()} {list(view.get_shape())}"
            raise InputError(f"{path}: {name} is {found}, expected F32 {list(like.shape)}; save it again")
        values = file.get_tensor(name)
        if not torch.isfinite(values).all():
            raise InputError(f"{path}: {name} holds a value that is not finite; go back to an earlier checkpoint")
        if name.startswith("exp_avg_sq.") and (values < 0).any():
            raise InputError(f"{path}: {name} holds a negative mean of squares; go back to an earlier checkpoint")


def _fill(learner: "Learner", file: Any, facts: dict[str, Any]) -> None:
    values = {name: file.get_tensor(name) for name, _ in _state(learner)}  # a read may fail: nothing is changed yet
    learner.lr = facts["lr"]
    learner._torn = True  # until all is written, the weights too
    learner.optimizer.step = facts["step"]
    for name, tensor in _state(learner):
        tensor.copy_(values[name])
