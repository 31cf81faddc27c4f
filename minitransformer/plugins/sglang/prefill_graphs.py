"""CUDA graphs of short prefills: one replay in place of a thousand launches, with the bits of the eager pass.

A short prefill waits for the host, on a busy machine for most of its time: there are eighteen launches a layer. A graph
is of a number of tokens and of REQUESTS sequences; bounds, positions and rows of the pool are data, so it serves
prompts, chunks and what follows a cached prefix alike. Sequences that a batch does not have are empty, and the tokens
that it does not have are one more sequence, whose keys and values go to a row that nobody reads. Rows never see each
other.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.layers import Note, no_trace
from minitransformer.ops import gpu
from minitransformer.ops.attention import KEY_TILE

SIZES = (128, 256, 512, 768, 1024, 1536, 2048)  # tokens; beyond, the GPU takes longer than the host
REQUESTS = 8
KEYS = 8192  # of all sequences, each rounded up to whole tiles
RESERVE = 3 << 30  # bytes that stay free, for what is launched one by one
SPARE_ROW = 0  # SGLang gives it to no request: its own padding is written there
log = logging.getLogger("minitransformer")


def needed(sizes: Sequence[int], chunk: int, most: int | None = None) -> list[int]:
    """Of the sizes, those up to the first that holds a chunk, and up to `most`, if the user names a largest one.

    chunk: tokens of a prefill at most, or none.
    """
    enough = min((n for n in sizes if n >= chunk), default=None) if chunk > 0 else None
    return [n for n in sizes if (enough is None or n <= enough) and (most is None or n <= most)]


def takes(config: Any) -> bool:
    """Whether the attention kernel that reads a batch's bounds on the GPU takes these heads."""
    group = config.num_heads // config.num_kv_heads
    return isinstance(gpu.attention.choose(KEY_TILE + 1, group, config.head_dim, False), gpu.attention.Prefill)


class PrefillGraphs:
    """The graphs of one model and pool, captured when it is made. sizes: of which there are any, ascending.

    pool: keys and values as the model's cache, `num_rows` rows a layer, all free yet. note: of the model's `hidden`;
    what it does is part of the graphs. All is on one GPU, and used on one stream at a time. A size for which there is
    no memory beside RESERVE is left out. replays: how many batches graphs have run.
    """

    def __init__(
        self, model: Any, pool: Any, num_rows: int, sizes: Sequence[int] = SIZES, note: Note = no_trace
    ) -> None:
        home, most = model.device, model.config.max_positions  # which tokens that pad have, too
        most = min(most, KEYS, num_rows - 1)
        sizes = sorted({n for n in sizes if KEY_TILE < n <= most}) if takes(model.config) else []
        largest = max(sizes, default=0)
        self.model, self.pool, self.note, self.sizes, self.replays = model, pool, note, [], 0
        self.numbers = torch.zeros(2 * REQUESTS + 3, dtype=torch.int32, device=home)  # bounds, then where keys begin
        self.counting_T = torch.arange(largest, device=home)
        self.inputs = Batch(
            ids_T=self.counting_T % model.config.vocab_size,
            positions_T=self.counting_T.clone(),
            cu_seqlens=(),
            kv_lens=(KEYS, *[0] * REQUESTS),  # how much room gathered keys need
            key_rows_SL=torch.full((REQUESTS + 1, KEYS), SPARE_ROW, device=home),
            store_rows_T=torch.full((largest,), SPARE_ROW, device=home),
            logit_rows_L=None,
            request_ids=tuple(range(REQUESTS + 1)),
            num_store_rows=num_rows,
        )
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        began, self.memory = time.monotonic(), None
        for size in reversed(sizes):  # the largest first: smaller ones find room in what it has taken
            if self._captured(size):
                self.sizes.insert(0, size)
                continue
            self.memory = self.memory if self.sizes else None  # of no graph yet: given back
            torch.cuda.empty_cache()
        log.info("graphs of prefills of up to %s tokens: %.1f s", self.sizes, time.monotonic() - began)

    def run(self, batch: Batch) -> Tensor | None:
        """The model's `hidden` of the batch, [T, D]; keys and values are stored. None where no graph takes it."""
        size = self.size_for(batch)
        if size is None:
            return None
        self.fill(batch, size)
        graph, hidden_TD = self.graphs[size]
        graph.replay()
        self.replays += 1
        return hidden_TD[: batch.cu_seqlens[-1]].clone()  # the next replay writes there

    def size_for(self, batch: Batch) -> int | None:
        tokens = batch.cu_seqlens[-1]
        size = next((n for n in self.sizes if n >= tokens), None)
        if size is None or batch.num_sequences > REQUESTS:
            return None
        return size if sum(-(-n // KEY_TILE) for n in (*batch.kv_lens, size - tokens)) * KEY_TILE <= KEYS else None

    def fill(self, batch: Batch, size: int) -> None:
        """What the graph of `size` tokens reads becomes this batch, padded."""
        tokens, absent = batch.cu_seqlens[-1], REQUESTS - batch.num_sequences
        starts = gpu.attention_pages.starts((*batch.kv_lens, *[0] * absent, size - tokens))
        numbers = torch.tensor([*batch.cu_seqlens, *[tokens] * absent, size, *starts], dtype=torch.int32)
        # Pinned, so that the host goes on while the GPU still computes what came before.
        self.numbers.copy_(numbers.pin_memory() if self.numbers.is_cuda else numbers, non_blocking=True)
        to = self.inputs
        padding_T = self.counting_T[: size - tokens]
        to.positions_T[tokens:size], to.store_rows_T[tokens:size] = padding_T, SPARE_ROW
        to.ids_T[tokens:size] = batch.ids_T[padding_T % tokens]  # its own: no weight is used that it does not use
        to.ids_T[:tokens], to.positions_T[:tokens] = batch.ids_T, batch.positions_T
        to.store_rows_T[:tokens] = batch.store_rows_T
        to.key_rows_SL[: batch.num_sequences, : batch.key_rows_SL.shape[1]] = batch.key_rows_SL

    def batch(self, size: int) -> Batch:
        """What the graph of `size` tokens reads. On the host one sequence has them all: the kernels read `numbers`."""
        to, some = self.inputs, slice(size)
        made = replace(
            to, ids_T=to.ids_T[some], positions_T=to.positions_T[some], store_rows_T=to.store_rows_T[some],
            cu_seqlens=(0, *[size] * (REQUESTS + 1)),
        )  # fmt: skip
        bounds, starts = self.numbers[: REQUESTS + 2], self.numbers[REQUESTS + 2 :]
        home = self.numbers.device
        made.__dict__.update(_bounds_on={("bounds", home): bounds, ("starts", home): starts}, _contiguous=False)
        return made

    def _captured(self, size: int) -> bool:
        try:
            self._capture(size)
        except RuntimeError as error:
            if not _of_memory(error):
                raise
            log.warning("no memory for a graph of prefills of %s tokens: they run eagerly (%s)", size, error)
            return False
        return True

    @torch.no_grad()
    def _capture(self, size: int) -> None:
        # Without padding, whose tokens race for one row: what a repeated layer gives would have other bits at each try.
        ids_T, positions_T, rows_T = self.inputs.ids_T[:size], self.counting_T[:size], self.counting_T[:size] + 1
        one = replace(
            self.inputs, ids_T=ids_T, positions_T=positions_T, store_rows_T=rows_T, key_rows_SL=rows_T[None],
            cu_seqlens=(0, size), kv_lens=(size,), request_ids=(0,),
        )  # fmt: skip
        self.fill(one, size)
        batch = self.batch(size)
        try:
            self.model.hidden(batch, self.pool, self.note)  # once eagerly: kernels are compiled and chosen
        finally:
            gpu.device.clear(self.numbers.device)  # what is found from here on belongs to requests
        graph, memory = torch.cuda.CUDAGraph(), self.memory or torch.cuda.graph_pool_handle()
        self.memory = None  # of a capture that fails: not used again
        with gpu.capture.capture(graph, memory):
            hidden_TD = self.model.hidden(batch, self.pool, self.note)
        self.memory = memory
        torch.cuda.empty_cache()  # what torch keeps then is the graphs' own, which nothing else can have
        if (free := torch.cuda.mem_get_info(self.numbers.device)[0]) < RESERVE:
            raise torch.OutOfMemoryError(f"{free / 2**30:.1f} GiB would be left")
        self.graphs[size] = graph, hidden_TD


def _of_memory(error: BaseException | None) -> bool:
    """Whether memory is what lacked: CUDA says it in other types too, and the end of a capture hides what ended it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
