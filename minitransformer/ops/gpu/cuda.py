"""CUDA C++ kernels where Triton can't say what is needed: compiled by NVRTC on first use, launched by the driver.

Both libraries come with torch's CUDA builds (NVRTC) and with the GPU's driver; nothing else is needed.
"""

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from minitransformer.errors import UnsupportedDevice
from minitransformer.ops.gpu.launch import Window, watching

OPTIONS = ("--fmad=false", "--std=c++17")  # no contraction; subnormals are kept unless -ftz is given
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_COOPERATIVE, _DEPENDENT_LAUNCH = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .._PROGRAMMATIC_STREAM_SERIALIZATION


@lru_cache
def _library(*names: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedDevice(f"{names[0]} was not found; a CUDA build of torch and the NVIDIA driver bring it")


def _nvrtc() -> ctypes.CDLL:
    name = f"libnvrtc.so.{(torch.version.cuda or '13.0').split('.')[0]}"
    beside_torch = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    return _library(name, *map(str, beside_torch), "libnvrtc.so")


def _driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


def _done(code: int, library: ctypes.CDLL, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        if hasattr(library, "cuGetErrorString"):
            library.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: error {code} {(text.value or b'').decode()}")


def source_of(file: str) -> str:
    """The text of ops/gpu/<file> with the files of that folder that it includes."""
    text = Path(__file__).with_name(file).read_text()
    return re.sub(r'^#include "([\w.]+)"$', lambda found: source_of(found.group(1)), text, flags=re.M)


@lru_cache(maxsize=256)
def compile_source(file: str, defines: tuple[tuple[str, int], ...], architecture: str = "sm_90a") -> bytes:
    """Machine code of ops/gpu/<file> with these macros, from Triton's cache on disk if it was made before."""
    nvrtc, source = _nvrtc(), source_of(file).encode()
    options = [*OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{name}={value}" for name, value in defines)]
    version = [ctypes.c_int(), ctypes.c_int()]
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    key = hashlib.sha256(repr((source, options, [v.value for v in version])).encode()).hexdigest()
    cache = get_cache_manager(key)
    if cache.get_file("kernel.cubin") is None:
        cache.put(_compile(nvrtc, file, source, options), "kernel.cubin", binary=True)
    return Path(cache.get_file("kernel.cubin")).read_bytes()


def _compile(nvrtc: ctypes.CDLL, file: str, source: bytes, options: list[str]) -> bytes:
    """RuntimeError with the compiler's words when it refuses."""
    program = ctypes.c_void_p()
    text = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _done(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None), nvrtc, file)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), text):
            log = ctypes.create_string_buffer(1 << 16)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{file} {' '.join(options)}: {log.value.decode()}")
        size = ctypes.c_size_t()
        _done(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), nvrtc, file)
        code = ctypes.create_string_buffer(size.value)
        _done(nvrtc.nvrtcGetCUBIN(program, code), nvrtc, file)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@lru_cache(maxsize=256)
def kernel(home: torch.device, file: str, name: str, defines: tuple[tuple[str, int], ...], shared: int = 0):
    """A function of a file for the current GPU, `home`, allowed `shared` bytes of dynamic shared memory."""
    torch.cuda.current_stream(home)  # there is a context to load into
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability(home)  # 9.0, or what --allow-unverified lets through
    # a: Hopper's own instructions, such as products of four warps.
    code = compile_source(file, defines, f"sm_{major}{minor}{'a' if major == 9 else ''}")
    _done(driver.cuModuleLoadData(ctypes.byref(module), code), driver, file)
    _done(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), driver, name)
    if shared > 48 << 10:
        _done(driver.cuFuncSetAttribute(function, _MAX_SHARED, shared), driver, f"{name}, {shared} B of shared memory")
    return function


def at_once(function, threads: int, shared: int) -> int:
    """How many blocks of a kernel a multiprocessor runs at the same time; 0 if one is too large for it."""
    found, driver = ctypes.c_int(), _driver()
    code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(found), function, threads, ctypes.c_size_t(shared)
    )
    _done(code, driver, f"occupancy of {threads} threads with {shared} B of shared memory")
    return found.value


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("gap", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [(name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


def launch(
    function, blocks: int, threads: int, shared: int, arguments: Iterable[Tensor | Window | int | float | None],
    early: bool = False, meets: bool = False,
) -> None:  # fmt: skip
    """On the current stream of the current GPU. A tensor is its pointer, None a null pointer, an int an `int`, a float
    a `float`, a window [rows, columns], or of one size more, the copy engine's map: zeros outside, blocks of BF16 (not
    of int32) swizzled by 128 bytes.

    early: the kernel may begin before the one in front of it has ended (programmatic dependent launch), and waits by
    griddepcontrol.wait where it must. meets: its blocks wait for each other, so all must run at once (a cooperative
    launch, which the driver refuses where they can't: fewer processors in a part of a GPU, say).
    """
    arguments, run = list(arguments), Launch(function, blocks, threads, shared, early, meets)
    if watching() is not None:
        watching().launched(run, arguments)
    run(arguments)


class Launch:
    """`launch` that can be made again, with as many arguments, on the stream that is current now. What was made of an
    argument serves as long as it is the same object. kernel: what runs."""

    def __init__(self, function, blocks: int, threads: int, shared: int, early: bool, meets: bool) -> None:
        self.function, self.kernel, self.what = function, getattr(function, "value", function), (blocks, threads)
        kinds = [kind for kind, wanted in ((_DEPENDENT_LAUNCH, early), (_COOPERATIVE, meets)) if wanted]
        attributes = (_Attribute * 2)(*(_Attribute(kind, 0, 1) for kind in kinds))
        stream = torch.cuda.current_stream().cuda_stream
        self.config = _Config(blocks, 1, 1, threads, 1, 1, shared, stream, attributes, len(kinds))
        self.seen, self.values, self.pointers = [], [], None

    def __call__(self, arguments: list) -> None:
        if self.pointers is None:
            self.seen, self.values = [self] * len(arguments), [None] * len(arguments)  # self: no argument is that
            self.pointers = (ctypes.c_void_p * len(arguments))()
        for i, argument in enumerate(arguments):
            if argument is not self.seen[i]:
                self.seen[i], self.values[i] = argument, _value(argument)
                self.pointers[i] = ctypes.addressof(self.values[i])
        code = _driver().cuLaunchKernelEx(ctypes.byref(self.config), self.function, self.pointers, None)
        if code:
            _done(code, _driver(), "launch of {} blocks of {} threads".format(*self.what))


class Capture(NamedTuple):
    """A stream's: its number is no other capture's; graph: what it makes, None if the driver doesn't say."""

    number: int
    graph: int | None


def capture(stream: int) -> Capture | None:
    """The capture that this stream is in; None if there is none or the driver doesn't say."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    rest = ctypes.byref(graph), None, None, None  # None: what later versions would tell as well
    for version in ("_v2", "", "_v3"):
        ask = getattr(_driver(), f"cuStreamGetCaptureInfo{version}", None)
        if ask and ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), *rest) == 0:
            return Capture(number.value, graph.value) if status.value == _CAPTURING else None
    return None


def end_of(graph: int | None) -> Callable[[], bool]:
    """Tells, when asked, whether a graph that is being captured is gone, with all that was instantiated from it and
    their launches; always False where the driver doesn't watch it.

    At that end the driver calls sem_post, from a thread of its own where no Python may run. The semaphore is never
    freed: a graph may outlive the interpreter.
    """
    c, watched, count = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_int()
    c.calloc.restype = ctypes.c_void_p
    semaphore = ctypes.c_void_p(c.calloc(1, 64))
    c.sem_init(semaphore, 0, 0)
    create, retain = (getattr(_driver(), name, None) for name in ("cuUserObjectCreate", "cuGraphRetainUserObject"))
    # The 1s: one reference, no order with the driver's other work; one reference, which moves to the graph.
    if graph is None or not (create and retain) or create(ctypes.byref(watched), semaphore, c.sem_post, 1, 1):
        return lambda: False
    if retain(ctypes.c_void_p(graph), watched, 1, 1):
        return lambda: False

    def gone() -> bool:
        c.sem_getvalue(semaphore, ctypes.byref(count))
        return count.value > 0

    return gone


def _value(argument) -> ctypes._SimpleCData | ctypes.Array:
    if type(argument) is Window:
        x = argument.tensor
        return _map(x.data_ptr(), tuple(x.shape), argument.block, x.dtype, argument.fetch)
    if isinstance(argument, int | float):
        return (ctypes.c_int if isinstance(argument, int) else ctypes.c_float)(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


@lru_cache(maxsize=4096)
def _map(at: int, shape: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype, fetch: int) -> ctypes.Array:
    """A map says where and what shape, so one address has one map, whoever owns it."""
    memory = (ctypes.c_uint64 * 24)()
    place = (ctypes.c_uint64 * 16).from_buffer(memory, -ctypes.addressof(memory) % 64)
    rank, inner = len(shape), accumulate(reversed(shape[1:]), mul)
    sizes, strides = (ctypes.c_uint64 * rank)(*reversed(shape)), [dtype.itemsize * n for n in inner]
    stride = (ctypes.c_uint64 * (rank - 1))(*strides)
    box, steps = (ctypes.c_uint32 * rank)(*reversed(block)), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind, swizzle = {torch.bfloat16: (9, 3), torch.int32: (3, 0)}[dtype]
    promotion = {128: 2, 256: 3}[fetch]
    code = _driver().cuTensorMapEncodeTiled(
        place, kind, rank, ctypes.c_void_p(at), sizes, stride, box, steps, 0, swizzle, promotion, 0
    )
    _done(code, _driver(), f"a map of {shape}")
    return place
