"""The Triton kernels on a CPU, bit for bit: Triton's interpreter with Hopper's arithmetic where it has its own.

The interpreter runs a kernel's Python on NumPy arrays. Put in their places here: tl.dot by the tensor core's chain
(ops/mma.py), tl.exp2 by exp2_hw, tl.fma by one that rounds once, and the BF16 conversions. So masks, tiles, orders and
addresses of a kernel are checked without a GPU; what a compiler makes of it is not. Triton chooses the interpreter when
a kernel is imported, so the process needs TRITON_INTERPRET=1 in its environment.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from minitransformer.ops import gpu
from minitransformer.ops.jit import jit
from minitransformer.ops.mma import chain_bits
from minitransformer.ops.rounding import ex2_table, exp2_hw, fma32, fma64


@jit
def _exp2_cpu(x, table, out):
    for i in range(x.size):
        out[i] = exp2_hw(x[i], table)


def _exp2(x: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty_like(flat)
    _exp2_cpu(flat, ex2_table(), out)
    return out.reshape(x.shape)


@jit
def _fma32_cpu(x, y, z, out):
    for i in range(x.size):
        out[i] = fma32(x[i], y[i], z[i])


@jit
def _fma64_cpu(x, y, z, out):
    for i in range(x.size):
        out[i] = fma64(x[i], y[i], z[i])


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    x, y, z = np.broadcast_arrays(x, y, z)
    flat = [np.ascontiguousarray(a).reshape(-1) for a in (x, y, z)]
    out = np.empty_like(flat[0])
    (_fma32_cpu if out.dtype == np.float32 else _fma64_cpu)(*flat, out)
    return out.reshape(x.shape)


def _to_f32(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    """As cvt.rn.bf16.f32: nearest even, a NaN becomes 0x7fff."""
    bits = torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits).astype(np.uint16).reshape(x.shape)


def install() -> None:
    """Switches Triton to the interpreter and the border in ops/gpu/device.py to CPU tensors, for this process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("start this process with TRITON_INTERPRET=1")
    import triton.language as tl
    import triton.runtime.interpreter as interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from alignment_tests.gpu import cuda_host
    from minitransformer.ops.gpu import device, launch

    theirs, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert(x, source, target, rounding):
        if (source, target) == (tl.bfloat16, tl.float32):
            return _to_f32(x)
        return _to_bf16(x) if (source, target) == (tl.float32, tl.bfloat16) else theirs(x, source, target, rounding)

    def dot(self, a, b, c, precision, imprecise):
        a, b, acc = (np.ascontiguousarray(x.data) for x in (a, b, c))
        return TensorHandle(chain_bits(a, b, True, acc), c.dtype.scalar)

    def tensor_as_scalar(tensor, scope):
        patch_tensor(tensor, scope)
        # NumPy 2 turns only arrays without dimensions into numbers; the interpreter's scalars have one.
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.reshape(-1)[0]))
        scope.set_attr(tensor, "__bool__", lambda x: bool(x.handle.data.reshape(-1)[0]))

    interpreter._convert_float, interpreter._patch_lang_tensor = convert, tensor_as_scalar
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.create_fma = lambda self, x, y, z: TensorHandle(_fma(x.data, y.data, z.data), x.dtype.scalar)
    InterpreterBuilder.create_exp2 = lambda self, x: TensorHandle(_exp2(x.data), x.dtype.scalar)
    cuda_host.install()
    device._capability = lambda home: (9, 0)
    device.multiprocessors = lambda home: 5
    torch.cuda.device = lambda home: contextlib.nullcontext()
    torch.cuda.current_device = lambda: None
    run = interpreter.InterpretedFunction.run

    def with_descriptors(self, *args, **options):
        return run(self, *(a.descriptor() if isinstance(a, launch.Window) else a for a in args), **options)

    interpreter.InterpretedFunction.run = with_descriptors
    torch.cuda.is_current_stream_capturing = lambda: False


def wrong(got, want) -> int:
    """Elements whose bits differ."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    pairs = [(a.view(kinds[a.itemsize]), b.view(kinds[b.itemsize])) for a, b in zip(got, want, strict=True)]
    return sum(int((a != b).sum()) for a, b in pairs)


def _mutate(module: str, old: str, new: str) -> None:
    """Puts a mutated copy of a kernel's file where the operators find it."""
    path = Path(gpu.__file__).with_name(f"{module}.py")
    source = path.read_text()
    assert old in source, f"{path.name} no longer holds {old!r}"
    copy = Path(tempfile.mkdtemp()) / path.name
    copy.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"minitransformer.ops.gpu.{module}", copy)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


def main(sources: Mapping[str, Callable[[], Iterator[tuple[str, int]]]], mutations: Mapping[str, tuple]) -> None:
    """A line a case: how many elements differ, and its name. With a mutation's name as argument, a fault is put in, and
    only the cases run that must see it, up to the first that does."""
    install()
    words = list(sources)
    if mutation := " ".join(sys.argv[1:]):
        *fault, word = mutations[mutation]
        _mutate(*fault)
        words = [word]
    for word in words:
        for name, differing in sources[word]():
            print(f"{differing} {name}", flush=True)
            if mutation and differing:
                return
