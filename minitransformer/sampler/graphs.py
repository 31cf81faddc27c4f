"""CUDA graphs of the decode step: one replay instead of a thousand launches, with the bits of the eager step.

A graph is captured when it is first needed, for a padded number of requests (1, 2, 4, 8, ...) and of pages a request.
It reads the parameters in place, so an update is seen; where a parameter's storage has changed, or the number format,
the graphs are dropped and captured again. Rows that pad a batch hold token 0 at position 0 of a spare page each; every
row's bits are its own, so nothing else knows of them.

Memory: all graphs share one pool, which holds the intermediates of the largest and a [requests, V] FP32 logits each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops import gpu
from minitransformer.sampler.cache import KVCache
from minitransformer.sampler.sequence import Sequence
from minitransformer.weights_stamp import parts

LEAST_PAGES = 16
REREAD = 1  # entries of a page table that are written again beside new ones


def padded(n: int, least: int = 1) -> int:
    """The power of two that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def spare_pages(max_sequences: int) -> int:
    """Pages beside the pool's that the rows of padding write to, for up to max_sequences requests: one at least, for
    the step before a capture, whose rows are all padding."""
    return max(1, padded(max_sequences) // 2 - 1)


@dataclass
class Inputs:
    """What a decode step of `requests` rows reads, in one buffer on the host and one on the device: a single copy.

    Each row: id, position, and the pages of its page table; pages past the end are 0 and never read.
    """

    requests: int
    pages: int
    cache: KVCache
    host: Tensor = field(init=False)
    on: Tensor = field(init=False)
    _seen: list = field(init=False)  # of each row: the page table that stands there, how many of its entries, the last

    def __post_init__(self) -> None:
        size, home = self.requests * (2 + self.pages), self.cache.k[0].device
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=home.type == "cuda")
        self.on = torch.zeros(size, dtype=torch.int64, device=home)
        self._seen = [(None, 0, None)] * self.requests
        self.fill([])

    def fill(self, sequences: list[Sequence]) -> None:
        """Each sequence's last token, which has no key yet; the other rows are padding."""
        n, host, some = self.requests, self.host.numpy(), len(sequences)
        ids, positions, tables = host[:n], host[n : 2 * n], host[2 * n :].reshape(n, self.pages)
        ids[:some], positions[:some] = [s.ids[-1] for s in sequences], [s.num_computed for s in sequences]
        ids[some:], positions[some:] = 0, 0
        for row in range(n):
            pages = sequences[row].pages if row < some else [self._spare(row - some)]
            # A table grows at its end, and of what stands there only the last page, when it is full, may be exchanged
            # for an equal one (PagePool.publish). Everything else makes a new list.
            table, known, last = self._seen[row]
            if table is pages and known == len(pages) and last == pages[-1]:
                continue
            begin = max(0, known - REREAD) if table is pages else 0
            tables[row, begin : len(pages)] = pages[begin:]
            self._seen[row] = pages, len(pages), pages[-1]
        self.on.copy_(self.host, non_blocking=True)

    def _spare(self, i: int) -> int:
        """The i'th row of padding writes here. Before a capture all rows are padding, and share pages."""
        return self.cache.num_pages + i % self.cache.spare_pages

    def batch(self) -> Batch:
        """A paged batch, computed from the device's buffer as part of the graph.

        kv_lens are bounds: the lengths may not come to the host, and the kernels read positions_T.
        """
        n, size = self.requests, self.cache.page_size
        ids_T, positions_T = self.on[:n], self.on[n : 2 * n]
        j = torch.arange(self.pages * size, device=self.on.device)
        rows_SL = self.on[2 * n :].view(n, self.pages)[:, j // size] * size + j % size
        rows_SL = torch.where(j <= positions_T[:, None], rows_SL, -1)
        return Batch(
            ids_T=ids_T,
            positions_T=positions_T,
            cu_seqlens=tuple(range(n + 1)),
            kv_lens=(self.pages * size,) * n,
            key_rows_SL=rows_SL,
            store_rows_T=rows_SL.gather(1, positions_T[:, None])[:, 0],
            logit_rows_L=None,
            request_ids=tuple(range(n)),
            num_store_rows=self.cache.k[0].shape[0],
        )


class DecodeGraphs:
    """The graphs of one model and cache. captures: how many were made; possible: the number format can be captured."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.captures = 0
        self.forget()
        self._pool = None

    def forget(self) -> None:
        """Drops every graph: the parameters' storage or the number format has changed."""
        self._graphs: dict[tuple[int, int], tuple[Inputs, Callable[[], Tensor]]] = {}
        self.possible = all(one.capturable for one in parts(self.model)[1])

    def run(self, sequences: list[Sequence]) -> Tensor:
        """Logits FP32 [len(sequences), V] of one decode step, valid until the next; keys and values are stored."""
        key = padded(len(sequences)), padded(max(len(s.pages) for s in sequences), LEAST_PAGES)
        if key not in self._graphs:
            inputs = Inputs(*key, self.cache)
            self._graphs[key] = inputs, self._capture(inputs)
        inputs, replay = self._graphs[key]
        inputs.fill(sequences)
        return replay()[: len(sequences)]

    def _capture(self, inputs: Inputs) -> Callable[[], Tensor]:
        self.captures += 1
        # Once eagerly, on padding alone: kernels are compiled and chosen, and a batch's bounds are copied.
        batch = inputs.batch()
        self.model(batch, self.cache)
        gpu.device.clear(self.cache.k[0].device)  # of padding; what is found from here on belongs to requests
        kept = {name: batch.__dict__[name] for name in ("_bounds_on", "_contiguous") if name in batch.__dict__}
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        self._pool = None  # of a capture that fails: not used again
        with gpu.capture.capture(graph, pool):
            batch = inputs.batch()
            batch.__dict__.update(kept)  # what the operators found out about the batch from its host side
            logits_LV = self.model(batch, self.cache)
        self._pool = pool

        def replay(_alive: dict = kept) -> Tensor:  # the graph reads the bounds, which lie outside of its pool
            graph.replay()
            return logits_LV

        return replay
