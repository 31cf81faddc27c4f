"""Our logits, log-probs and draws in the places where SGLang looks for them.

A prompt token is scored at temperature 1, a sampled one at its request's temperature, by ops/logprob.py; a token is
drawn by ops/sample.py from (seed, position). Rows never see each other, so a batch is free to be any batch.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor as SGLangLogitsProcessor
from sglang.srt.layers.logprob_processor import InputLogprobProcessor, LogprobResult
from sglang.srt.layers.sampler import Sampler as SGLangSampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import gpu
from minitransformer.ops.logprob import forward, logprob
from minitransformer.ops.rounding import log_32
from minitransformer.ops.sample import sample


class LogitsProcessor(SGLangLogitsProcessor):
    """SGLang's choice of rows; our lm_head and our log-probs."""

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__(config)
        object.__setattr__(self, "model", model)  # not a submodule: its weights are the model's own
        self.input_logprob_processor = InputLogProbs()

    def _compute_lm_head(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
        return self.model.logits(hidden_states)


class InputLogProbs(InputLogprobProcessor):
    """Log-probs of prompt tokens, in pieces of `logprobs_chunk_size` rows to bound the memory of logits."""

    def forward(
        self, pruned_states, sample_indices, input_logprob_indices, token_to_seq_idx, lm_head, get_logits_fn,
        logits_metadata, skip_chunking_for_dp_attn=False,
    ):  # fmt: skip
        """-> (LogprobResult of the prompt's rows, logits [requests, V] of the rows to draw from)."""

        def logits_of(rows: Tensor) -> Tensor:
            return get_logits_fn(pruned_states[rows], lm_head, logits_metadata, use_logits_buffer=False)

        wanted = Wanted(logits_metadata)
        ids_T = logits_metadata.extend_input_logprob_token_ids_gpu
        done = 0
        for rows in filter(len, input_logprob_indices.split(self.logprobs_chunk_size)):
            wanted.score(logits_of(rows), ids_T[done : done + len(rows)].long(), done)
            done += len(rows)
        return wanted.result(), logits_of(sample_indices)


class Wanted:
    """What a prefill asks for beside its tokens' log-probs: the best k of each position, and given ids."""

    def __init__(self, metadata: Any) -> None:
        self.lengths = metadata.extend_logprob_pruned_lens_cpu
        requests = [s for s, n in enumerate(self.lengths) for _ in range(n)]
        self.top = [metadata.top_logprobs_nums[s] for s in requests] if metadata.extend_return_top_logprob else None
        self.ids = [metadata.token_ids_logprobs[s] for s in requests] if metadata.extend_token_ids_logprob else None
        self.scores: list[Tensor] = []
        self.top_rows: list[tuple[list, list]] = []
        self.ids_rows: list[tuple[list, list]] = []

    def score(self, logits_LV: Tensor, ids_L: Tensor, first: int) -> None:
        here = slice(first, first + len(ids_L))
        self.scores.append(score(logits_LV, ids_L))
        if self.top is not None:
            self.top_rows += [(v.tolist(), i.tolist()) for v, i in best(logits_LV, self.top[here])]
        if self.ids is not None:
            self.ids_rows += [(v.tolist(), i.tolist()) for v, i in chosen(logits_LV, self.ids[here])]

    def result(self) -> LogprobResult:
        result = LogprobResult(token_logprobs=torch.cat(self.scores or [torch.empty(0, dtype=torch.float32)]))
        if self.top is not None:
            result.top_logprobs_val, result.top_logprobs_idx = self._by_request(self.top_rows)
        if self.ids is not None:
            result.token_ids_logprobs_val, result.token_ids_logprobs_idx = self._by_request(self.ids_rows)
        return result

    def _by_request(self, rows: list[tuple[list, list]]) -> tuple[list, list]:
        values, ids, done = [], [], 0
        for n in self.lengths:
            values.append([v for v, _ in rows[done : done + n]])
            ids.append([i for _, i in rows[done : done + n]])
            done += n
        return values, ids


def score(logits_LV: Tensor, ids_L: Tensor) -> Tensor:
    """logprob at temperature 1. On a GPU a row that it refuses is told where the step's tokens are looked at."""
    if not logits_LV.is_cuda:
        return logprob(logits_LV, ids_L)
    one_L, where = torch.ones(len(ids_L), dtype=torch.float32, device=logits_LV.device), gpu.device.slot("logprob")
    return gpu.logprob.of_rows(logits_LV.contiguous(), ids_L, one_L, where=where)[0]


def best(logits_LV: Tensor, counts: Sequence[int], t: Sequence[float] | None = None) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, ids) of the counts[l] largest logits of each row; of equal ones the lower ids first.

    Which of equal ones topk takes depends on k, so on the rest of the batch: it only tells how large they are.
    """
    largest = logits_LV.topk(min(max(counts), logits_LV.shape[1])).values
    ids = [_largest(*row) for row in zip(logits_LV, largest, counts, strict=True)]
    return chosen(logits_LV, ids, t)


def _largest(row_V: Tensor, largest_K: Tensor, count: int) -> Tensor:
    """largest_K: of row_V, descending, `count` of them or all."""
    ids = (row_V >= largest_K[:count][-1:]).nonzero().flatten() if count else largest_K[:0].long()
    return ids[row_V[ids].argsort(descending=True, stable=True)[:count]]


def chosen(logits_LV: Tensor, ids: Sequence[Any], t: Sequence[float] | None = None) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, ids) of the given ids (a list, a tensor or None) of each row, at its temperature (default 1).

    The operator gives each row's m and S once; what it adds for an id is two roundings.
    """
    t, home = t or [1.0] * len(logits_LV), logits_LV.device
    max_sum_L2 = torch.empty(len(logits_LV), 2, dtype=torch.float32)
    for temperature in dict.fromkeys(t):
        rows = [l for l, own in enumerate(t) if own == temperature]
        some = logits_LV if len(rows) == len(t) else logits_LV[rows]
        any_id = torch.zeros(len(rows), dtype=torch.int64, device=home)
        max_sum_L2[rows] = forward(some, any_id, temperature)[1].cpu()
    found = []
    for (m, S), row_V, own, temperature in zip(max_sum_L2.numpy(), logits_LV, ids, t, strict=True):
        these = torch.as_tensor([] if own is None else own, dtype=torch.int64, device=home)
        x = row_V[these].cpu().numpy() / np.float32(temperature)
        found.append((torch.from_numpy((x - m) - np.float32(log_32(S))).to(home), these))
    return found


class Sampler(SGLangSampler):
    """Draws each row by itself. Penalties, logit bias and custom processors have changed the logits before."""

    def forward(
        self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
    ) -> Tensor:  # fmt: skip
        """-> ids int32 [requests]; log-probs go into logits_output. positions: of each row's newest token."""
        logits_LV, info = logits_output.next_token_logits, sampling_info
        if info.has_custom_logit_processor:
            logits_LV = self._preprocess_logits(logits_LV, info)
        cuts = info.need_top_p_sampling or info.need_top_k_sampling  # SGLang writes a greedy request as top_k = 1
        if logits_LV.is_cuda and (info.is_all_greedy or not cuts):
            ids_L, scores_L = draw_there(logits_LV, info, positions)
        else:
            ids_L, scores_L = draw(logits_LV, _draws(info, positions), return_logprob)
        if return_logprob:
            self._attach(logits_output, logits_LV, scores_L, info, top_logprobs_nums, token_ids_logprobs)
        self._sync_token_ids_across_tp(ids_L, info)
        return ids_L.to(torch.int32)

    def _attach(self, output, logits_LV, scores_L, info, top_logprobs_nums, token_ids_logprobs) -> None:
        result = LogprobResult(token_logprobs=scores_L)
        if any(top_logprobs_nums):
            found = best(logits_LV, top_logprobs_nums, _temperatures(info))
            result.top_logprobs_val, result.top_logprobs_idx = map(list, zip(*found, strict=True))
        if any(ids is not None for ids in token_ids_logprobs):
            found = chosen(logits_LV, token_ids_logprobs, _temperatures(info))
            result.token_ids_logprobs_val = [values for values, _ in found]
            result.token_ids_logprobs_idx = [ids or [] for ids in token_ids_logprobs]
        result.write_output_to(output)


def _temperatures(info: Any) -> list[float]:
    return info.temperatures.flatten().tolist()


def _draws(info: Any, positions: Tensor) -> list[tuple]:
    columns = (positions, info.top_ks, info.top_ps)
    options = zip(info.sampling_seed.tolist(), _temperatures(info), *(c.tolist() for c in columns), strict=True)
    return [
        (seed, position + 1, 0.0 if k == 1 else t, 0 if k in (1, TOP_K_ALL) else k, p, t)
        for seed, t, position, k, p in options
    ]


UNSEEN: deque[Callable[[bool], bool]] = deque()  # of steps whose tokens nobody has read yet: gpu.device.watch


def draw_there(logits_LV: Tensor, info: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """draw without top_k and top_p: nothing comes to the host, so the next step is launched behind this one."""
    scored = info.temperatures.flatten()
    drawn = torch.where(info.top_ks == 1, 0.0, scored) if info.is_any_greedy else scored
    found = gpu.sample.draw_rows(logits_LV, gpu.sample.Rows(info.sampling_seed, positions + 1, drawn, scored))
    UNSEEN.append(gpu.device.watch(logits_LV.device))
    return found


def before_results(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    """Scheduler.process_batch_result: a step that met a bad value ends the server before a token of it is handed out.

    Of a step that overlaps the next, SGLang says when its tokens are there; else all of them are waited for.
    """
    done = getattr(result, "copy_done", None)
    if done is not None:
        done.synchronize()
    while UNSEEN and UNSEEN[0](done is None):
        UNSEEN.popleft()
    return original(scheduler, batch, result)


def draw(logits_LV: Tensor, draws: Sequence[tuple], scored: bool) -> tuple[Tensor, Tensor | None]:
    """draws: of each row (seed, position, temperature, top_k, top_p, temperature of the log-prob) -> ids, log-probs."""
    home = logits_LV.device
    if logits_LV.is_cuda:  # all rows at once, so that the GPU is waited for once
        drawn = gpu.sample.draw(logits_LV, [gpu.sample.Draw(*d) for d in draws])
        gpu.device.check(home)
        for refused in (d for d in drawn if isinstance(d, InputError)):
            raise refused
        ids, scores = zip(*drawn, strict=True)
        return torch.tensor(ids, device=home), torch.tensor(scores, dtype=torch.float32, device=home)
    ids_L = torch.tensor([sample(row, *options) for row, (*options, _) in zip(logits_LV, draws, strict=True)])
    if not scored:
        return ids_L, None
    scores_L, t = logits_LV.new_empty(len(draws)), [d[-1] for d in draws]
    for temperature in dict.fromkeys(t):
        rows = [l for l, own in enumerate(t) if own == temperature]
        scores_L[rows] = logprob(logits_LV[rows], ids_L[rows], temperature)
    return ids_L, scores_L


def with_seeds(original: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """SamplingBatchInfo with a seed for every request: its own, or one of its name, which SGLang draws at random.

    top_p is FP64, as the spec has it; SGLang rounds it to FP32."""
    info = original(cls, batch, vocab_size)

    def there(values: list, dtype: torch.dtype) -> Tensor:
        made = torch.tensor(values, dtype=dtype, pin_memory=torch.cuda.is_available())
        return made.to(batch.device, non_blocking=True)

    params = [r.sampling_params for r in batch.reqs]
    names = [int.from_bytes(hashlib.sha256(r.rid.encode()).digest()[:7]) for r in batch.reqs]
    seeds = [n if p.sampling_seed is None else p.sampling_seed for n, p in zip(names, params, strict=True)]
    info.sampling_seed = there(seeds, torch.int64)
    info.top_ps = there([p.top_p for p in params], torch.float64)
    return info
