"""The border between torch tensors and the Numba kernels: bit views, no copies, and a thread pool."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from os import register_at_fork

import numpy as np
import torch

from minitransformer.errors import UnsupportedDevice

_SMALLEST, _ONE = 5e-324, 1.0  # their product tells whether the processor flushes subnormals in this thread


def on_cpu(op: str, *tensors: torch.Tensor) -> None:
    """Raises UnsupportedDevice unless every tensor is on the CPU, naming the op and the device."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedDevice(f"{op}: no kernel for device {tensor.device}; move the tensors to the CPU")


def _view(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"expected a {name} tensor, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.detach().contiguous()


def bf16_bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a BF16 tensor as np.uint16 of the same shape (shares memory when contiguous)."""
    return _view(tensor, torch.bfloat16, "BF16").view(torch.int16).numpy().view(np.uint16)


def f32(tensor: torch.Tensor) -> np.ndarray:
    """An FP32 tensor as np.float32 of the same shape (shares memory when contiguous)."""
    return _view(tensor, torch.float32, "FP32").numpy()


def i64(tensor: torch.Tensor) -> np.ndarray:
    """An int64 tensor as np.int64 of the same shape (shares memory when contiguous)."""
    return _view(tensor, torch.int64, "int64").numpy()


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="minitransformer")


register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads, and would wait for them for ever


def parallel(kernel: Callable, n: int, *args, grain: int = 1) -> None:
    """Runs the nogil kernel(begin, end, *args) over 0..n on torch.get_num_threads() threads.

    Every index is computed whole by one thread, so the number of threads cannot move a bit.
    grain: the least number of indices worth a thread.
    """
    if _SMALLEST * _ONE == 0:
        raise RuntimeError("subnormals are flushed to zero here, which moves bits: torch.set_flush_denormal(False)")
    threads = max(1, min(torch.get_num_threads(), n // max(1, grain)))
    if threads == 1:
        kernel(0, n, *args)
        return
    # Four ranges a thread: uneven rows (causal attention, busy experts) then still fill both cores.
    parts = min(n, 4 * threads)
    bounds = [n * i // parts for i in range(parts + 1)]
    for done in [_pool(threads).submit(kernel, a, b, *args) for a, b in zip(bounds, bounds[1:], strict=False)]:
        done.result()
