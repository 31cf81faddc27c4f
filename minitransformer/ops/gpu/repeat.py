"""A layer's launches once more, with the next layer's tensors and without the Python between them.

Eagerly a layer costs the host many times what its launches cost. All layers of a kind launch the same kernels on the
same shapes. So the first that has a residual is watched while it runs (`Recording`), and for the others each launch is
made again with their weights, caches, inputs and outputs in the places of the first one's (`Layers`).

What makes that sound: a recording knows each address that a launch was given as the layer's own tensor, its input or
output, a tensor of the batch, or memory that the layer allocated, which is kept until the pass ends; and each other
operator of PyTorch, seen below Python, as a view by its own schema. Anything else is refused: then, and where a layer's
tensors differ in kind, layers run as they always do.

A recording can't see a launch that tells no watcher, nor that a number is one layer's own. So the first repeat of each
kind in a process that launches these kernels (another number of tokens may choose others) is proven: the layer runs
itself too, and outputs, keys and values must have the same bits.
MINITRANSFORMER_REPEAT=check proves every repeat; =off runs every layer itself.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minitransformer.errors import InputError
from minitransformer.ops.gpu import device, launch
from minitransformer.ops.gpu.library import ALIGNED

MAX_TOKENS = 4096  # beyond, the GPU takes longer than the host, and a layer's memory should not be kept
_MAKES = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
          torch.ops.aten.new_empty.default}  # fmt: skip
_MM, _FROM_HOST = torch.ops.aten.mm.default, torch.ops.aten.lift_fresh.default  # the latter: torch.tensor, no view
SWITCH = "MINITRANSFORMER_REPEAT"
_proven: set[tuple] = set()
_WHAT = attrgetter("dtype", "shape", "device")
_PLAIN = {int, float, bool, str, type(None)}


class Call(NamedTuple):
    """One launch. arguments: addresses, tensors, windows and numbers; which places in them take the address of which of
    the layer's own tensors, and which take a tensor itself."""

    run: Callable[[list], Any]
    arguments: list
    addresses: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


class Recording(TorchDispatchMode):
    """Watches a layer. calls: its launches. refused: why they can't be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: list[Tensor] = []
        self.kernels: tuple = ()
        self.refused: str | None = None

    def __enter__(self) -> "Recording":
        launch.watch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        launch.watch(None)
        super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator in _MAKES:
            self.made.append(result)
        elif operator is _MM:
            self.made.append(result)
            self.launched(_mm, [*args, result])
        elif not operator.is_view or operator is _FROM_HOST:
            self.refuse(operator.name())
        return result

    def launched(self, run: Callable[[list], Any], arguments: list) -> None:
        """Addresses among the arguments are tensors, windows or `launch.Address`."""
        self.calls.append(Call(run, arguments, [], []))

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def finish(self, own: list[Tensor], shared: Iterable[Tensor]) -> None:
        """Finds out whose each address is; own: inputs, outputs and the layer's tensors."""
        self.kernels = tuple(_kernel(call.run) for call in self.calls)
        number = {x.data_ptr(): i for i, x in enumerate(own)}
        if len(number) < len(own):
            self.refuse("two of the layer's tensors at one address")
        spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (*self.made, *shared)]
        for call in self.calls:
            for i, value in enumerate(call.arguments):
                at = _address(value)
                if at in number:
                    seen = getattr(value, "tensor", value)
                    if isinstance(seen, Tensor) and seen.dtype != own[number[at]].dtype:
                        self.refuse("a tensor seen as another dtype")
                    places = call.addresses if isinstance(value, launch.Address) else call.tensors
                    places.append((i, number[at]))
                elif at is None and type(value) not in _PLAIN:
                    self.refuse(f"a launch with a {type(value).__name__}")
                elif at is not None and not any(begin <= at < end for begin, end in spans):
                    self.refuse("an address whose owner is not known")

    def again(self, own: list[Tensor]) -> None:
        at = list(map(Tensor.data_ptr, own))
        for run, arguments, addresses, tensors in self.calls:
            for i, n in addresses:
                arguments[i] = at[n]
            for i, n in tensors:
                arguments[i] = _in_place_of(arguments[i], own[n])
            run(arguments)


def _mm(values: list) -> None:
    torch.mm(values[0], values[1], out=values[2])


def _kernel(run: Callable[[list], Any]) -> Any:
    """What a launch runs, on whatever grid and stream."""
    return run.func if isinstance(run, partial) else getattr(run, "kernel", run)  # partial: a launch of Triton's


def _address(value: Any) -> int | None:
    if isinstance(value, launch.Address):
        return value
    tensor = value.tensor if isinstance(value, launch.Window) else value
    return tensor.data_ptr() if isinstance(tensor, Tensor) else None


def _in_place_of(old: Any, new: Tensor) -> Any:
    if isinstance(old, launch.Window):
        return old._replace(tensor=_in_place_of(old.tensor, new))
    return new.as_strided(old.shape, old.stride())  # a square matrix turned has the same shape


class Layers:
    """Runs the layers of one forward pass without gradients or a trace; called once a layer, in any order.

    known_of(layer): (what decides beside the tensors' shapes which kernels it launches; its weights, and what else its
    kernels read that other layers' kernels do not), or None for a layer that has to run itself.
    """

    def __init__(self, known_of: Callable[[Any], tuple[tuple, list[Tensor]] | None]) -> None:
        self.known_of, self.how = known_of, how()
        self.recordings: dict[tuple, Recording] = {}

    def __call__(self, layer: Any, x: Tensor, residual: Tensor | None, batch: Any, table: Tensor, store, note):
        """-> what layer(...) returns."""
        if self.how == "off" or residual is None or x.shape[0] > MAX_TOKENS or torch.cuda.is_current_stream_capturing():
            return layer(x, residual, batch, table, store, note)
        known = self.known_of(layer)
        if known is None:
            return layer(x, residual, batch, table, store, note)
        kind, mine = known[0], [*(store or ()), *known[1]]
        aligned = [at % ALIGNED for at in map(Tensor.data_ptr, mine)]  # kernels and libraries are chosen by that
        kind = (*kind, *map(_WHAT, mine), *map(Tensor.stride, mine), *aligned)
        mine.append(device.faults(x.device))
        found = self.recordings.get(kind)
        if found is None:
            device.meeting(x.device)  # made before a recording, which refuses what fills memory
            with Recording() as found:
                outputs = layer(x, residual, batch, table, store, note)
            kept = batch.__dict__.get("_bounds_on", {}).values()
            shared = [t for t in (*batch.__dict__.values(), *kept, table) if isinstance(t, Tensor)]
            found.finish([x, residual, *outputs, *mine], [*shared, *device.meeting(x.device)])
            self.recordings[kind] = found
            return outputs
        if found.refused is not None:
            return layer(x, residual, batch, table, store, note)
        outputs = torch.empty_like(x), torch.empty_like(residual)
        with launch.on(x.device):
            found.again([x, residual, *outputs, *mine])
        which = kind, found.kernels
        if self.how == "check" or which not in _proven:
            _prove(which, outputs, store, batch, partial(layer, x, residual, batch, table, store, note))
        return outputs


def how() -> str:
    """What the environment asks for: first, check or off. InputError for another word."""
    found = os.environ.get(SWITCH, "first")
    if found not in ("first", "check", "off"):
        raise InputError(f"{SWITCH} is {found!r}; set it to first, check or off, or unset it")
    return found


def _prove(which: tuple, outputs: tuple[Tensor, Tensor], store: Any, batch: Any, run: Callable[[], Any]) -> None:
    """RuntimeError unless the layer itself, run(), gives the repeated one's outputs, keys and values, bit for bit.

    Nothing is said where a kernel has met a bad row: what depends on one may be memory that nobody wrote.
    """

    def left() -> list[Tensor]:
        return [rows[batch.store_rows_T] for rows in store or ()]

    again, own = [*outputs, *left()], [*run(), *left()]
    if device.met_bad_row(outputs[0].device):
        return
    names = ("output", "residual", "keys", "values")
    wrong = [name for name, a, b in zip(names, again, own, strict=False) if not torch.equal(_bits(a), _bits(b))]
    if wrong:
        said = f"a repeated layer has other bits than the layer itself: {', '.join(wrong)}"
        raise RuntimeError(f"{said}; {SWITCH}=off runs every layer itself. Please report this")
    _proven.add(which)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
