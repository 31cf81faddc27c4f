"""A layer's launches once more, with the next layer's tensors and without the Python between them.

Eagerly a layer costs the host many times what its launches cost. All layers of a kind launch the same kernels on the
same shapes. So the first that has a residual is watched while it runs (`Recording`), and for the others each launch is
made again with their weights, caches, inputs and outputs in the places of the first one's (`Layers`).

What makes that sound: a recording knows each address that a launch was given as the layer's own tensor, its input or
output, a tensor of the batch, or memory that the layer allocated, which is kept until the pass ends; and each other
call of PyTorch as one that moves no data. Anything else is refused: then, and where a layer's tensors differ in kind,
layers run as they always do.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minitransformer.ops.gpu import device, launch
from minitransformer.ops.gpu.library import ALIGNED

MAX_TOKENS = 4096  # beyond, the GPU takes longer than the host, and a layer's memory should not be kept
_LOOKS = {"__get__", "data_ptr", "is_contiguous", "stride", "size", "dim", "numel", "element_size", "is_floating_point",
          "__len__", "__iter__", "view", "t", "transpose", "detach", "unbind", "split", "untyped_storage"}  # fmt: skip
_MAY_COPY = {"flatten", "__getitem__", "reshape", "contiguous"}
_MAKES = {torch.empty, torch.empty_like}
_WHAT = attrgetter("dtype", "shape", "device")
_PLAIN = {int, float, bool, str, type(None)}


class Call(NamedTuple):
    """One launch. arguments: addresses, tensors, windows and numbers; which places in them take the address of which of
    the layer's own tensors, and which take a tensor itself."""

    run: Callable[[list], Any]
    arguments: list
    addresses: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


class Recording(TorchFunctionMode):
    """Watches a layer. calls: its launches. refused: why they can't be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: list[Tensor] = []
        self.refused: str | None = None

    def __enter__(self) -> "Recording":
        launch.watch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        launch.watch(None)
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", str(function))
        if name in _LOOKS:
            return result
        if function in _MAKES:
            self.made.append(result)
        elif function is torch.mm and not kwargs:
            self.made.append(result)
            self.launched(lambda values: torch.mm(values[0], values[1], out=values[2]), [*args, result])
        elif name in _MAY_COPY:
            if result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
                self.refuse(f"{name} that copies")
        else:
            self.refuse(name)
        return result

    def launched(self, run: Callable[[list], Any], arguments: list) -> None:
        """Addresses among the arguments are tensors, windows or `launch.Address`."""
        self.calls.append(Call(run, arguments, [], []))

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def finish(self, own: list[Tensor], shared: Iterable[Tensor]) -> None:
        """Finds out whose each address is; own: inputs, outputs and the layer's tensors."""
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
        self.known_of = known_of
        self.recordings: dict[tuple, Recording] = {}

    def __call__(self, layer: Any, x: Tensor, residual: Tensor | None, batch: Any, table: Tensor, store, note):
        """-> what layer(...) returns."""
        if residual is None or x.shape[0] > MAX_TOKENS or torch.cuda.is_current_stream_capturing():
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
            with Recording() as found:
                outputs = layer(x, residual, batch, table, store, note)
            kept = batch.__dict__.get("_bounds_on", {}).values()
            shared = [t for t in (*batch.__dict__.values(), *kept, table) if isinstance(t, Tensor)]
            found.finish([x, residual, *outputs, *mine], shared)
            self.recordings[kind] = found
            return outputs
        if found.refused is not None:
            return layer(x, residual, batch, table, store, note)
        outputs = torch.empty_like(x), torch.empty_like(residual)
        with launch.on(x.device):
            found.again([x, residual, *outputs, *mine])
        return outputs
