"""Weights into our parameters, under the names of a Hugging Face checkpoint: SGLang reads or receives them.

The first load must bring every tensor once. An update may bring some, unless there are no weights yet; it is checked
whole (names, shapes, types, finite values) before the first write, so a bad one changes nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minitransformer.checkpoint_files import first_few, once
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.layout import EMBEDDING, HEAD, parameter_shapes, piece_shape, pieces
from minitransformer.models.qwen3_moe.nvfp4_layout import Format, Part, parts
from minitransformer.plugins.sglang.arguments import check_model
from minitransformer.plugins.sglang.checksums import checksums
from minitransformer.plugins.sglang.group import drop
from minitransformer.plugins.sglang.identity import identity

_FLOATS = (torch.bfloat16, torch.float32)
Named = list[tuple[str, Tensor]]


def _not_finite(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor.to(torch.bfloat16)).all()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _no_block_scale(tensor: Tensor) -> Tensor:
    bits = _bits(tensor)
    return (((bits & 0x7F) == 0x7F) | (bits > 0x7F)).any()  # a NaN, or a sign


# Whether a tensor of this type has a value that is refused, on its device, and what is said of it.
_BAD = dict.fromkeys(_FLOATS, (_not_finite, "a value that is no finite BF16 number; such weights are refused"))
_BAD[torch.float8_e4m3fn] = (_no_block_scale, "a value that is no block scale (finite, no sign)")


class Place(NamedTuple):
    """Where one checkpoint tensor goes: of one of these types, of this shape. read: of its values as they are kept."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    into: Tensor | None
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor


class Receiver:
    """Fills a model's parameters, and the quantised experts of the layers that have only those.

    form: the number format's names, for a model with such layers.
    """

    def __init__(self, model: Any, form: Format | None = None) -> None:
        self.model, self.form, self.begun = model, form, 0  # begun: loads
        self.places = dict(_parameter_places(model))
        for i, layer in enumerate(model.layers):
            if form is not None and getattr(layer.mlp, "gate_up", 0) is None:
                for part in parts(model.config, i):
                    self.places |= _quantised_places(layer.mlp.experts.fixed[part.projection], part, form)
        self.missing = {name for name, place in self.places.items() if place.into is not None}

    def load(self, tensors: Iterable[tuple[str, Tensor]], update: bool) -> None:
        """Writes the tensors. InputError: on the first load at once, in an update before anything is written."""
        self.begun += 1
        tensors = once(tensors)
        if update:
            tensors = self._read(_numbers_to(torch.device("cpu"), list(tensors)))
            tensors = _numbers_to(self.model.embed_tokens.weight.device, tensors)
            self._check_tied(dict(tensors))
            if absent := self.missing - dict(tensors).keys():
                raise InputError(f"SGLang has no weights yet, and {first_few(absent)} is not among these: send all")
        self.model.weights_version += 1  # before the first write: older keys and values are stale from here on
        head = {}
        for name, tensor in tensors:
            into = place.into if (place := self.places.get(name)) else None
            if not update:  # one after another, so that a GPU may look at its own
                ((_, tensor),) = self._read([(name, tensor if into is None else tensor.to(into.device))])
            if into is not None:
                into.copy_(tensor)
            head |= {name: tensor} if name == HEAD else {}
            self.missing.discard(name)
        if self.missing:
            raise InputError(f"{len(self.missing)} tensors are missing ({first_few(self.missing)})")
        self._check_tied(head)
        self.refresh()

    def refresh(self) -> None:
        """What is made of the weights, in place, where CUDA graphs read; the first time before SGLang asks how much
        memory is left for keys and values."""
        home = self.model.embed_tokens.weight.device
        for mlp in (layer.mlp for layer in self.model.layers if hasattr(layer.mlp, "experts")):
            if hasattr(mlp.experts, "forget"):
                mlp.experts.forget()
            mlp.experts.operands(mlp, home)

    def _read(self, tensors: Named) -> Named:
        """As they are kept, once all are checked. A GPU is asked for its answers together, not tensor by tensor."""
        for name, tensor in tensors:
            place = self.places.get(name)
            if place is None:
                raise InputError(f"{name}: the model has no such tensor; send the names of its Hugging Face checkpoint")
            if tuple(tensor.shape) != place.shape or tensor.dtype not in place.dtypes:
                found, taken = f"{tensor.dtype} {list(tensor.shape)}", f"{place.dtypes[0]} {list(place.shape)}"
                raise InputError(f"{name} is {found}; the model takes {taken}")
        answers: dict[torch.device, list[tuple[str, Tensor, str]]] = {}
        for name, tensor in tensors:
            if tensor.dtype in _BAD:
                asked, said = _BAD[tensor.dtype]
                answers.setdefault(tensor.device, []).append((name, asked(tensor), said))
        for some in answers.values():
            for (name, _, said), bad in zip(some, torch.stack([bad for _, bad, _ in some]).tolist(), strict=True):
                if bad:
                    raise InputError(f"{name} has {said}")
        return [(name, self.places[name].read(tensor)) for name, tensor in tensors]

    def _check_tied(self, tensors: dict[str, Tensor]) -> None:
        """A head beside tied embeddings must be them: those that come with it, or those that are there."""
        if HEAD in tensors and self.model.config.tie_word_embeddings:
            embedding = tensors.get(EMBEDDING, self.model.embed_tokens.weight)
            if not torch.equal(tensors[HEAD].to(embedding), embedding):
                raise InputError(f"{HEAD} differs from {EMBEDDING}, but config.json ties them")


def _numbers_to(home: torch.device, tensors: Named) -> Named:
    """Outer scales, of which there are tens of thousands, go there in one piece."""
    moved = [i for i, (_, t) in enumerate(tensors) if t.numel() == 1 and t.dtype == torch.float32 and t.device != home]
    if moved:
        values = torch.stack([tensors[i][1].reshape(()) for i in moved]).to(home)
        for i, value in zip(moved, values, strict=True):
            tensors[i] = tensors[i][0], value.reshape(tensors[i][1].shape)
    return tensors


def _parameter_places(model: Any) -> Iterator[tuple[str, Place]]:
    """Every piece of every BF16 parameter, experts one by one."""
    shapes = parameter_shapes(model.config)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for piece in pieces(model.config):
        if piece.parameter in parameters:
            into = parameters[piece.parameter][piece.index]
            yield piece.key, Place(_FLOATS, piece_shape(shapes[piece.parameter], piece.index), into)
    if model.config.tie_word_embeddings:
        yield HEAD, Place(_FLOATS, tuple(parameters["embed_tokens.weight"].shape), None)


def _quantised_places(q: Any, part: Part, form: Format) -> dict[str, Place]:
    codes, scales, outer, static = part.headers(form)
    N, K = part.shape
    outers = q.outer.view(q.outer.shape[0], -1)[part.expert]

    def decode_scale(tensor: Tensor) -> Tensor:
        stored = np.float32(tensor.reshape(-1)[0].item())
        return torch.tensor(float(form.read_scale(outer, stored)), dtype=torch.float32)

    return {
        codes: Place((torch.uint8,), (N, K // 2), q.codes[part.expert, part.rows]),
        scales: Place((torch.float8_e4m3fn,), (N, K // 16), q.scales[part.expert, part.rows], _bits),
        outer: Place((torch.float32,), form.scalar, outers[min(part.column, len(outers) - 1)], decode_scale),
        static: Place((torch.float32,), form.scalar, None),  # recipes here quantise by each token's own amax
    }


def answer(original: Any, checker: Any, action: str, allow_quant_error: bool = False) -> Any:
    """WeightChecker.handle: 'identity' tells what is live, 'checksum' the checksum of every tensor besides."""
    if action not in ("identity", "checksum"):
        return original(checker, action, allow_quant_error)
    entry = checker._get_model()
    form = entry.receiver.form
    prefills = entry.prefills and entry.prefills.replays
    sums = checksums(entry.model) if action == "checksum" else {}
    whole = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
    return {
        "checksums": sums | identity(entry.model, form and form.name, prefills), "per_gpu_checksum": whole,
        "parallelism_info": checker._parallelism_info().model_dump(),
    }  # fmt: skip


KEPT = "Nothing was written: SGLang goes on with the weights it had"
PARTLY = "The weights are partly written: send all of them again"
Answer = tuple[bool, str]


def _guarded(updater: Any, update: Callable[[], Answer], what: str = "") -> Answer:
    """update(), or what was wrong and what the server holds. Receiver.load checks all before it writes; it counts the
    weights' version up when it begins to."""
    version = updater.get_model().model.weights_version
    try:
        done, said = update()
    except Exception as error:
        done, said = False, f"{what}{error}"
    if done:
        return True, said
    # SGLang warns of weights that are partly written in any case.
    held = KEPT if updater.get_model().model.weights_version == version else PARTLY
    return False, f"{said.partition('. The full weights of')[0]}. {held}"


def from_tensor(original: Any, updater: Any, named_tensors: Any, load_format: str | None = None) -> Answer:
    """WeightUpdater.update_weights_from_tensor: a bad update is answered, it doesn't stop the server."""
    if isinstance(named_tensors, Exception):
        return False, f"the tensors can't be read; is their sender gone? ({named_tensors}) {KEPT}"
    if load_format == "direct":
        return False, f"load_format 'direct' is not supported by miniTransformer; send Hugging Face names. {KEPT}"
    return _guarded(updater, lambda: original(updater, named_tensors, load_format))


def from_distributed(
    original: Any, updater: Any, names: list, dtypes: list, shapes: list, group_name: str, load_format: Any = None
) -> Answer:
    """WeightUpdater.update_weights_from_distributed, which receives all tensors of the request, then loads them."""
    strange = next((d for d in dtypes if not isinstance(getattr(torch, str(d), None), torch.dtype)), None)
    if group_name not in updater._model_update_group:
        return False, f"no group {group_name!r}: POST /init_weights_update_group first. {KEPT}"
    if strange is not None or not len(names) == len(dtypes) == len(shapes):
        what = f"{len(names)} names, {len(dtypes)} types, {len(shapes)} shapes" if strange is None else repr(strange)
        return False, f"names, dtypes and shapes must be of the same tensors, types as 'bfloat16': {what}. {KEPT}"
    begun = updater.get_model().receiver.begun
    done, said = _guarded(updater, lambda: original(updater, names, dtypes, shapes, group_name, load_format))
    if not done and updater.get_model().receiver.begun == begun:  # not all came: a sender that is gone ends no group
        drop(updater._model_update_group, group_name)
    return done, said


def readable(original: Any, worker: Any, payloads: Any) -> Any:
    """BaseTpWorker._deserialize_own_rank: what can't be read is answered by from_tensor and ends no scheduler."""
    try:
        return original(worker, payloads)
    except Exception as error:
        return error


def from_disk(original: Any, updater: Any, model_path: str, load_format: str, *rest: Any, **options: Any) -> Answer:
    """WeightUpdater.update_weights_from_disk, which after an error loads the same bad files again to roll back."""
    before = updater.model_config.model_path

    def update() -> Answer:
        check_model(model_path)
        # Where an update doesn't say, SGLang takes the server's own format, which may be none.
        return original(updater, model_path, "auto" if load_format == "dummy" else load_format, *rest, **options)

    done, said = _guarded(updater, update, f"{model_path}: ")
    if not done:
        updater.model_config.model_path = before
    return done, said
