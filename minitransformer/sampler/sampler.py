"""The sampler: many requests at once, each with the bits that it would have alone.

A step is schedule -> run -> postprocess. What a request's tokens and log-probs depend on: its prompt, its parameters
and the weights. What they do not depend on: the other requests, the order of arrival, chunk size, page size, number
of pages, prefix-cache hits and preemptions. All of these only move the moment at which a row is computed.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.ops.logprob import logprob
from minitransformer.ops.sample import sample
from minitransformer.sampler.cache import KVCache, default_num_pages
from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.scheduler import Chunk, Scheduler
from minitransformer.sampler.sequence import Completion, NewToken, SamplingParams, Sequence, require_int

Prompt = SequenceOf[int] | Tensor | str


class Sampler:
    """Generates with a model: paged keys and values, continuous batching, chunked prefill, prefix cache, preemption.

    model              called as model(batch, cache, trace) -> logits FP32 [L, V]; has .config, .device,
                       .tokenizer (or None), .weights_version, .parameters()
    page_size          rows of the store in a page, at least 1
    num_pages          size of the store; None: whole contexts for max_sequences requests, within 512 MiB
    max_batch_tokens   tokens of one step, over all requests
    chunk_size         tokens of one request in one step
    max_sequences      requests that hold pages at the same time
    prefix_cache       let prompts start from the full pages of earlier ones

    Raises InputError for a value out of range.
    """

    def __init__(
        self,
        model: Any,
        page_size: int = 16,
        num_pages: int | None = None,
        max_batch_tokens: int = 512,
        chunk_size: int = 64,
        prefix_cache: bool = True,
        max_sequences: int = 64,
    ) -> None:
        sizes = dict(page_size=page_size, max_batch_tokens=max_batch_tokens, chunk_size=chunk_size)
        for name, value in (sizes | dict(max_sequences=max_sequences)).items():
            require_int(name, value, 1)
        config = model.config
        if num_pages is None:
            num_pages = default_num_pages(config, page_size, config.max_positions, max_sequences)
        require_int("num_pages", num_pages, 1)
        self.model = model
        self.cache = KVCache(config, num_pages, page_size, model.device)
        self.pool = PagePool(num_pages, page_size, prefix_cache)
        self.scheduler = Scheduler(self.pool, max_batch_tokens, chunk_size, max_sequences)
        self._next_id = 0
        self._weights = self._weights_stamp()

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        trace: Any = None,
        on_token: Callable[[NewToken], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts.

        prompts    token ids, or text if the model has a tokenizer
        params     one for all, or one a prompt; None means SamplingParams()
        trace      takes every named tensor of every step, and the log-probs
        on_token   called with each new token as it is drawn

        Raises InputError before anything has changed.
        """
        if isinstance(prompts, str | Tensor) or (len(prompts) and isinstance(prompts[0], int)):
            raise InputError("prompts is a single prompt: give a list of prompts")
        if self.scheduler.waiting or self.scheduler.running:
            raise InputError("generate() was called while requests are in flight: finish them with step(), or abort()")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"params has {len(params)} entries for {len(prompts)} prompts: give one, or one a prompt")
        sequences = [
            self._sequence(self._next_id + i, prompt, p, f"prompts[{i}]")
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        self._next_id += len(sequences)
        done: dict[int, Completion] = {}
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
            while len(done) < len(sequences):
                for token in self.step(trace):
                    if on_token is not None:
                        on_token(token)
                    if token.completion is not None:
                        done[token.request_id] = token.completion
        finally:
            # After an error or an interrupt no request may stay behind with pages in its hands.
            for sequence in self.scheduler.running + self.scheduler.waiting:
                self.scheduler.remove(sequence)
        return [done[sequence.request_id] for sequence in sequences]

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues one request and returns its id; step() brings it forward. Raises InputError, nothing changed."""
        sequence = self._sequence(self._next_id, prompt, params or SamplingParams(), "prompt")
        self._next_id += 1
        self.scheduler.add(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> Completion:
        """Ends a request that is in flight and returns what it has so far. Raises InputError if there is none."""
        for sequence in self.scheduler.running + self.scheduler.waiting:
            if sequence.request_id == request_id:
                self.scheduler.remove(sequence)
                return sequence.completion("abort", self.model.tokenizer)
        raise InputError(f"request {request_id} is not in flight: abort() takes the id that add() returned")

    @torch.no_grad()
    def step(self, trace: Any = None) -> list[NewToken]:
        """One forward pass; the tokens it has drawn, at most one a request. Empty without requests in flight, and
        when every request that had a turn is still reading its prompt."""
        if self._weights_stamp() != self._weights:
            self.reset_cache()
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        logits_LV = self.model(self._batch(chunks), self.cache, trace)
        for chunk in chunks:
            self.scheduler.computed(chunk)
        sequences = [chunk.sequence for chunk in chunks if chunk.completes]
        token_ids, log_probs = _draw(sequences, logits_LV)
        return [self._take(*row, trace) for row in zip(sequences, token_ids, log_probs, strict=True)]

    def reset_cache(self) -> None:
        """Forgets every key and value, because the weights have changed. Requests in flight keep their tokens, and
        their keys and values are computed again with the new weights.

        step() calls this when it sees a change: model.weights_version raised (the learner and the loader do), a
        parameter replaced, or changed in place by copy_, load_state_dict or one of torch's optimisers. It cannot see
        writes through `.data`, NumPy or another view that torch does not count; whoever writes so must raise
        model.weights_version or call this.
        """
        for sequence in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(sequence)
        self.pool.forget()
        self._weights = self._weights_stamp()

    def check(self) -> None:
        """Asserts the invariants of requests, pages and prefix cache."""
        self.scheduler.check()

    def _batch(self, chunks: list[Chunk]) -> Batch:
        """One batch of all chunks, prompts and single tokens alike; logits for those that draw a token."""
        rows, end = [], 0
        for chunk in chunks:
            end += chunk.count
            if chunk.completes:
                rows.append(end - 1)
        return Batch.paged(
            new_ids=[c.sequence.ids[c.start : c.start + c.count] for c in chunks],
            starts=[c.start for c in chunks],
            page_tables=[c.sequence.pages for c in chunks],
            page_size=self.pool.page_size,
            logit_rows=rows,
            request_ids=[c.sequence.request_id for c in chunks],
        )

    def _take(self, sequence: Sequence, token_id: int, log_prob: float, trace: Any) -> NewToken:
        if trace is not None:
            trace.note_log_probs(sequence.request_id, [len(sequence.ids)], [log_prob])
        reason = sequence.append(token_id, log_prob)
        completion = None
        if reason is not None:
            self.scheduler.remove(sequence)
            completion = sequence.completion(reason, self.model.tokenizer)
        return NewToken(sequence.request_id, token_id, log_prob, completion)

    def _sequence(self, request_id: int, prompt: Prompt, params: SamplingParams, where: str) -> Sequence:
        """A request that has been looked at whole: what is queued can be finished."""
        config = self.model.config
        ids = self._prompt_ids(prompt, where)
        for token_id in params.stop_token_ids:
            if token_id >= config.vocab_size:
                raise InputError(f"{where}: stop token {token_id} is outside the vocabulary of {config.vocab_size}")
        if len(ids) >= config.max_positions:
            raise InputError(
                f"{where} has {len(ids)} tokens, the context is {config.max_positions}: "
                f"shorten it to {config.max_positions - 1} or fewer, so that a new token fits"
            )
        max_len = min(len(ids) + params.max_new_tokens, config.max_positions)
        # The last token of all is never an input, so it needs no row.
        pages = self.pool.pages_for(max_len - 1)
        if pages > self.pool.num_pages:
            raise InputError(
                f"{where} with its new tokens takes {pages} pages of {self.pool.page_size} and there are "
                f"{self.pool.num_pages}: give the sampler more pages, or shorten the prompt or max_new_tokens"
            )
        eos = () if params.ignore_eos else config.eos_token_ids
        return Sequence(request_id, len(ids), ids, params, frozenset(params.stop_token_ids) | frozenset(eos), max_len)

    def _prompt_ids(self, prompt: Prompt, where: str) -> list[int]:
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise InputError(f"{where} is text and the model has no tokenizer: give token ids")
            prompt = self.model.tokenizer.encode(prompt)
        if not isinstance(prompt, SequenceOf | Tensor):
            raise InputError(f"{where} is {prompt!r}: give a list of token ids, or text")
        ids = list(prompt.tolist() if isinstance(prompt, Tensor) else prompt)
        if not ids:
            raise InputError(f"{where} is empty: give at least one token")
        for index, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id < self.model.config.vocab_size:
                raise InputError(
                    f"{where}: {token_id!r} at index {index} is not a token id: "
                    f"give integers from 0 to {self.model.config.vocab_size - 1}"
                )
        return ids

    def _weights_stamp(self) -> tuple:
        """Another value after any change of the weights that can be seen without reading them."""
        return self.model.weights_version, [(p.data_ptr(), p._version) for p in self.model.parameters()]


def _draw(sequences: list[Sequence], logits_LV: Tensor) -> tuple[list[int], list[float]]:
    """The next token of each row's sequence, and its log-prob.

    The new token's position is the length of the sequence so far: with the seed it keys the noise, so that neither
    the row nor the step matters. Log-probs go through one call a temperature.
    """
    token_ids = [
        sample(row_V, s.params.seed, len(s.ids), s.params.temperature, s.params.top_k, s.params.top_p)
        for s, row_V in zip(sequences, logits_LV, strict=True)
    ]
    log_probs = torch.full((len(sequences),), torch.nan, dtype=torch.float32)
    temperatures = [s.params.log_prob_temperature for s in sequences]
    for temperature in dict.fromkeys(temperatures):
        rows = [i for i, t in enumerate(temperatures) if t == temperature]
        ids_L = torch.tensor([token_ids[i] for i in rows], device=logits_LV.device)
        log_probs[rows] = logprob(logits_LV[rows], ids_L, temperature).to(log_probs.device)
    return token_ids, log_probs.tolist()
