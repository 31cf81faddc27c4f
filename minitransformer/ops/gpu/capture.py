"""Captures CUDA graphs, and closes what torch leaves open where the end of a capture fails.

A call that a capture does not allow, or a kernel for which CUDA finds no memory, makes CUDA refuse the end of the
capture too, and torch leaves there before it has closed anything: the allocator goes on for the graph's pool, which no
other capture may use then and whose memory never comes back; the generator stays in the capture, so that the next
random number of torch's raises; and the capture's stream stays the current one.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capture(graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """As torch.cuda.graph. Where it raises, all is as before it; of a pool only the graphs that were there still are.

    After an error give the next graph another pool: some versions of torch have closed this one but in part.
    """
    pool, device = pool or torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool, stream=stream):
            device = torch.cuda.current_device()  # the stream's
            yield
    except BaseException:
        close(device, pool)
        raise


def close(device: int, pool: Any) -> None:
    """Ends a capture of the pool whose end failed; nothing where it did not."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # no capture is under way there
        return
    torch._C._cuda_releasePool(device, pool)
    # The generator leaves a capture at the end of one that succeeds. The error on its way out says more than one here.
    with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, dtype=torch.int32, device="cuda")
