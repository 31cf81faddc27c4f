"""Launches without Triton's host work: its `kernel[grid](...)` takes 15 to 30 us of Python, a known call here about 5.

Triton chooses what to compile from a call's arguments: their types, which pointers and integers are multiples of 16,
which integers are 1, constants, options. `Quick` makes a key of all that, and sometimes of more. A call with a new key
goes Triton's way, which compiles if it must and returns the kernel that it launched; one with a known key launches that
kernel. So two keys may mean one kernel, but a key never means two. Whatever a key can't tell (another kind of argument,
hooks, another version of Triton, whose launcher may take other arguments) goes Triton's way each time.

Two checks of Triton's are left out on the short way: that no global of a kernel has changed since it was compiled
(they are constants), and that the GPU can read a pointer (device.take looks at tensors' devices).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from inspect import getclosurevars
from itertools import chain
from threading import local
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

VERSIONS = ("3.6.0",)  # of Triton, whose launchers take what _Direct passes
_HERE = nullcontext()
_CONSTANTS = (int, bool, str)  # two of the same type that are equal compile to the same code


class Address(int):
    """Of a tensor; other integers are numbers."""


class _Thread(local):
    watcher: Any = None
    bound = False


_thread = _Thread()


def watch(watcher: Any) -> None:
    """watcher.launched(run, arguments) is called with each launch of this thread, or watcher.refuse(why)."""
    _thread.watcher = watcher


def watching() -> Any:
    """Who watches this thread."""
    return _thread.watcher


def cdiv(n: int, by: int) -> int:
    """n / by rounded up. Triton's, called on the host, costs 4 us."""
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


def on(home: torch.device) -> AbstractContextManager:
    """torch.cuda.device(home), which costs nothing where that is the current GPU."""
    if not _thread.bound and home.type == "cuda":
        # A thread that has called nothing of CUDA's runtime (its tensors came out of torch's cache) has no context, and
        # the driver refuses its launches.
        torch.cuda.mem_get_info(home)
        _thread.bound = True
    return _HERE if home.index == torch.cuda.current_device() else torch.cuda.device(home)


class Window(NamedTuple):
    """A contiguous tensor that the copy engine reads in blocks; gluon: for a kernel in Gluon.

    fetch: for a kernel in C++, how many bytes a miss brings to the L2 cache.
    """

    tensor: Tensor
    block: tuple[int, ...]
    gluon: bool = False
    fetch: int = 256

    def descriptor(self) -> Any:
        """What Triton takes. To make it costs as much as a launch."""
        if self.gluon:
            layout = shared_layout(self.block, self.tensor.dtype)
            return hopper.TensorDescriptor.from_tensor(self.tensor, list(self.block), layout)
        return TensorDescriptor.from_tensor(self.tensor, list(self.block))


@lru_cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.int32: gl.int32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)


class _Direct:
    """A compiled kernel and its launcher. ValueError where the short way does not serve it."""

    def __init__(self, compiled: Any) -> None:
        launcher, self.metas = compiled.run, compiled.metadata.tensordesc_meta or []
        if launcher.global_scratch_size or launcher.profile_scratch_size or not all(self.metas):
            raise ValueError("a kernel with scratch memory, or whose descriptors are no maps of the copy engine")
        # With windows, Triton wraps the launcher in a function that makes the maps at every call.
        self.launch = getclosurevars(launcher.launch).nonlocals["launcher"] if self.metas else launcher.launch
        self.flags = launcher.launch_cooperative_grid, launcher.launch_pdl
        self.function, self.shape = compiled.function, compiled.packed_metadata
        self.maps: dict[tuple, list] = {}

    def __call__(self, stream: int, grid: tuple[int, ...], values: list) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        if self.metas:
            values = self.mapped(values)
        self.launch(x, y, z, stream, self.function, *self.flags, None, None, self.shape, None, None, None, *values)

    def mapped(self, values: list) -> list:
        """Each window as its map, shape and strides. A map says where and what shape, so one address has one map,
        whoever owns it."""
        found, metas = [], iter(self.metas)
        for value in values:
            if type(value) is not Window:
                found.append(value)
                continue
            meta, x = next(metas), value.tensor
            key = len(found), x.data_ptr(), x.shape, x.stride()
            made = self.maps.get(key)
            if made is None:
                if len(self.maps) >= 4096:
                    self.maps.clear()
                from triton.backends.nvidia.driver import make_tensordesc_arg

                made = self.maps[key] = make_tensordesc_arg(value.descriptor(), meta)
            found += made
        return found


class Quick:
    """Takes the place of a kernel's `run`, which Triton's `kernel[grid](...)` calls. known: key -> the short way, or
    None where there is none."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel, self.triton_run = kernel, kernel.run
        self.parameters, self.known = kernel.params, {}
        self.constants = sum(not p.is_constexpr for p in kernel.params)  # where they begin
        self._places: dict[tuple[type, ...], tuple[list[int], ...] | None] = {}

    def __call__(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        gpu = driver.active.get_current_device()
        key, values = (None, None) if warmup or self._hooked() else self.key_of(gpu, args, options)
        direct = None if key is None else self.known.get(key)
        if direct is not None:
            stream = driver.active.get_current_stream(gpu)
            if (watcher := _thread.watcher) is not None:
                for i in self._places[tuple(map(type, args))][0]:
                    values[i] = Address(values[i])
                watcher.launched(partial(direct, stream, grid), values)
            return direct(stream, grid, values)
        if _thread.watcher is not None:
            _thread.watcher.refuse("a launch of Triton's own way")
        args = [a.descriptor() if type(a) is Window else a for a in args]
        compiled = self.triton_run(*args, grid=grid, warmup=warmup, **options)
        if options.get("launch_pdl") and "griddepcontrol.wait" not in compiled.asm["ptx"]:
            raise RuntimeError(f"{self.kernel.__name__} is launched early and never waits: call tiles.in_turn in it")
        if key is not None and key not in self.known:
            self.known[key] = _direct(compiled)
        return compiled

    def key_of(self, gpu: int, args: tuple, options: dict) -> tuple[tuple, list] | tuple[None, None]:
        """(all that decides what Triton compiles, the values that its launcher takes); None for what is not known."""
        kinds = tuple(map(type, args))  # of constants too: True is not 1
        if kinds not in self._places:
            self._places[kinds] = self._sorted(kinds)
        if self._places[kinds] is None:
            return None, None
        tensors, integers, windows = self._places[kinds]
        key, values = [gpu, kinds, args[self.constants :], *options.items()], list(args)
        for i in tensors:
            x = args[i]
            values[i] = at = x.data_ptr()
            key.append((x.dtype, x.is_cuda, at % 16 == 0))
        for i in integers:
            n = args[i]
            if not 0 <= n < 1 << 31:  # an i64
                return None, None
            key.append(1 if n == 1 else 16 if n % 16 == 0 else 0)
        for i in windows:
            x, block, gluon, _ = args[i]
            key.append((x.dtype, block, gluon, x.dim()))
        return tuple(key), values

    def _sorted(self, kinds: tuple[type, ...]) -> tuple[list[int], ...] | None:
        """(places of tensors, of integers, of windows) among arguments of these types; None if there are others."""
        count, known = self.constants, ((Tensor, Parameter), (int,), (Window,), (float,))
        if len(kinds) != len(self.parameters) or any(p.is_constexpr for p in self.parameters[:count]):
            return None
        if not (set(kinds[count:]) <= set(_CONSTANTS) and set(kinds[:count]) <= set(chain(*known))):
            return None
        return tuple([i for i, kind in enumerate(kinds[:count]) if kind in some] for some in known[:3])

    def _hooked(self) -> bool:
        """Someone watches the launches."""
        chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        return bool(self.kernel.pre_run_hooks) or any(getattr(chain, "calls", chain) for chain in chains)


def _direct(compiled: Any) -> _Direct | None:
    try:
        return _Direct(compiled)
    except (AttributeError, KeyError, ValueError):
        return None


def quick(kernel: Any) -> Any:
    """A decorator above @triton.jit or @gluon.jit: known calls of the kernel take the short way."""
    if isinstance(kernel, JITFunction) and triton.__version__ in VERSIONS:
        kernel.run = Quick(kernel)
    return kernel
