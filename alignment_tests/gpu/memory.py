"""How many bytes of a GPU a call has at a time, by the allocator's own count."""

import time
from collections.abc import Callable

import torch

REQUESTED = "requested_bytes.all"  # without what the allocator adds to a block


def settled() -> int:
    """Bytes in use, once two readings agree: autograd's thread may hold a gradient a moment longer than its reader."""
    torch.cuda.synchronize()
    now = -1
    while now != (now := torch.cuda.memory_stats()[f"{REQUESTED}.current"]):
        time.sleep(0.2)
    return now


def peak(call: Callable) -> int:
    """The most bytes that the second call has at a time, its result included."""
    call()  # compiles, and makes what stays: packed weights, workspaces, cuBLAS's of each thread
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.memory_stats()[f"{REQUESTED}.peak"] - before
