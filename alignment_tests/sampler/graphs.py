"""Decode steps through padded inputs as a CUDA graph reads them, but computed anew each time: for a CPU."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from minitransformer.sampler.cache import KVCache
from minitransformer.sampler.graphs import DecodeGraphs, Inputs, spare_pages
from minitransformer.sampler.sampler import Sampler


class Uncaptured(DecodeGraphs):
    def _capture(self, inputs: Inputs) -> Callable[[], Tensor]:
        self.captures += 1

        def run() -> Tensor:
            batch = inputs.batch()  # whose kv_lens are bounds; the CPU's attention takes them as they are
            return self.model(replace(batch, kv_lens=tuple((batch.positions_T + 1).tolist())), self.cache)

        return run


def with_graphs(sampler: Sampler) -> Sampler:
    """The sampler, its decode steps padded."""
    pool, most = sampler.pool, sampler.scheduler.max_sequences
    sampler.cache = KVCache(sampler.model.config, pool.num_pages, pool.page_size, "cpu", spare_pages(most))
    sampler.graphs = Uncaptured(sampler.model, sampler.cache)
    return sampler
