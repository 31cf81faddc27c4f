"""SGLang's ForwardBatch as our Batch, and the attention backend that makes one a step.

K/V rows are SGLang's own: `req_to_token` says in which row of the pool each position of a request lies, whatever the
page size, the prefix cache or a retraction made of it. Our attention reads positions, so nothing else is needed:
prefill, a chunk of it and decode are one kind of batch.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend as Base

from minitransformer.batch import Batch
from minitransformer.plugins.sglang.prefill_graphs import SIZES, PrefillGraphs, needed


def translate(forward_batch: Any, req_to_token: torch.Tensor, num_store_rows: int) -> Batch:
    """forward_batch: sglang's ForwardBatch of an extend or a decode; req_to_token [requests, positions]: pool rows."""
    kv_lens = tuple(forward_batch.seq_lens_cpu.tolist())
    new = (1,) * len(kv_lens) if forward_batch.forward_mode.is_decode() else tuple(forward_batch.extend_seq_lens_cpu)
    bounds = [0]
    for n in new:
        bounds.append(bounds[-1] + n)
    rows_SL = req_to_token[forward_batch.req_pool_indices.long(), : max(kv_lens)].long()
    past_end = torch.arange(rows_SL.shape[1], device=rows_SL.device) >= forward_batch.seq_lens[:, None]
    return Batch(
        ids_T=forward_batch.input_ids.long(),
        positions_T=forward_batch.positions.long(),
        cu_seqlens=tuple(bounds),
        kv_lens=kv_lens,
        key_rows_SL=rows_SL.masked_fill_(past_end, -1),
        store_rows_T=forward_batch.out_cache_loc.long(),
        logit_rows_L=None,
        request_ids=tuple(range(len(kv_lens))),
        num_store_rows=num_store_rows,
    )


class AttentionBackend(Base):
    """Keeps the step's batch. Our model attends by itself; layers of SGLang's never call this.

    In a CUDA graph of a decode step the batch is made of SGLang's static buffers. Its lengths are bounds, since they
    may not come to the host; the kernels read positions. Pool rows are copied before each replay: SGLang may hand a
    request's slots of req_to_token on while the graph still runs.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.batch: Batch | None = None
        self.prefills: PrefillGraphs | None = None
        self.captured: list[Batch] = []  # graphs read what the operators keep beside a batch

    @property
    def num_rows(self) -> int:
        return self.token_to_kv_pool.k_buffer[0].shape[0]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.batch = None
        if not forward_batch.forward_mode.is_idle():
            self.batch = translate(forward_batch, self.req_to_token_pool.req_to_token, self.num_rows)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        table = self.req_to_token_pool.req_to_token
        self.rows_SL = torch.zeros(max_bs, table.shape[1], dtype=torch.int64, device=table.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        size, longest = forward_batch.batch_size, int(forward_batch.seq_lens_cpu.max())
        requests = forward_batch.req_pool_indices[:size].long()
        # What lies past a request's end is never read: its position says where that is.
        self.rows_SL[:size, :longest] = self.req_to_token_pool.req_to_token[requests, :longest]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        size, known = forward_batch.batch_size, self.batch
        self.batch = Batch(
            ids_T=forward_batch.input_ids.long(),
            positions_T=forward_batch.positions.long(),
            cu_seqlens=tuple(range(size + 1)),
            kv_lens=(self.rows_SL.shape[1],) * size,
            key_rows_SL=self.rows_SL[:size],
            store_rows_T=forward_batch.out_cache_loc.long(),
            logit_rows_L=None,
            request_ids=tuple(range(size)),
            num_store_rows=self.num_rows,
        )
        # Warm-up has copied the batch's bounds to the GPU, which a capture can't.
        if known is not None and known.cu_seqlens == self.batch.cu_seqlens:
            kept = {name: known.__dict__[name] for name in ("_bounds_on", "_contiguous") if name in known.__dict__}
            self.batch.__dict__.update(kept)
        self.captured = [one for one in self.captured if one.cu_seqlens != self.batch.cu_seqlens] + [self.batch]

    def hidden(self, model: Any, forward_batch: Any, note: Any) -> torch.Tensor:
        """The model's `hidden` of the step's batch. note: as that of the graphs of prefills."""
        found = None
        if self.prefills is not None and forward_batch.forward_mode.is_extend():
            found = self.prefills.run(self.batch)
        return model.hidden(self.batch, Pool(self.token_to_kv_pool), note) if found is None else found

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False


class Pool:
    """What our model calls a cache: keys and values of layer i in k[i] and v[i], [rows, G, H]."""

    def __init__(self, token_to_kv_pool: Any) -> None:
        self.k, self.v = token_to_kv_pool.k_buffer, token_to_kv_pool.v_buffer


def with_prefills(original: Any, runner: Any, *rest: Any, **options: Any) -> None:
    """ModelRunner.init_cuda_graphs: after SGLang's own, which are of decode steps, ours of prefills."""
    from minitransformer.plugins.sglang.routed import noting

    original(runner, *rest, **options)
    args, attention = runner.server_args, runner.attn_backend
    off = "disabled" in (args.cuda_graph_backend_prefill, args.cuda_graph_config.decode.backend)
    if isinstance(attention, AttentionBackend) and not off:
        model, pool, most = runner.model.model, Pool(attention.token_to_kv_pool), args.cuda_graph_max_bs_prefill
        sizes = needed(args.cuda_graph_bs_prefill or SIZES, args.chunked_prefill_size, most)
        attention.prefills = PrefillGraphs(model, pool, attention.num_rows, sizes, noting())
        runner.model.prefills = attention.prefills  # which tells how many have run
