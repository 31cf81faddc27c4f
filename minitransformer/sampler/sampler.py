"""The sampler: many requests at once, each with the bits that it would have alone.

A step is schedule -> run -> postprocess. What a request's tokens and log-probs depend on: its prompt, its parameters
and the weights. What they do not depend on: the other requests, the order of arrival, chunk size, page size, number
of pages, prefix-cache hits and preemptions. All of these only move the moment at which a row is computed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.devices import naming_memory
from minitransformer.errors import InputError, RowError
from minitransformer.ops import gpu
from minitransformer.sampler.cache import KVCache, default_num_pages
from minitransformer.sampler.draw import draw
from minitransformer.sampler.graphs import DecodeGraphs, spare_pages
from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.request import Prompt, checked_params, make, params_list, prompt_list
from minitransformer.sampler.scheduler import Chunk, Scheduler
from minitransformer.sampler.sequence import Completion, NewToken, SamplingParams, Sequence, good, require_int
from minitransformer.weights_stamp import WeightsStamp, parts


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
    cuda_graphs        on a GPU, replay steps that only decode from CUDA graphs, unless the model is traced;
                       hooks of modules run when a graph is captured, not in a replay

    Raises InputError for a value out of range. A step reads the weights in place: no other thread may update them
    meanwhile, or step this sampler; between steps they may change (see reset_cache).
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
        cuda_graphs: bool = True,
    ) -> None:
        page_size = require_int("page_size", page_size, 1)
        max_batch_tokens = require_int("max_batch_tokens", max_batch_tokens, 1)
        chunk_size = require_int("chunk_size", chunk_size, 1)
        max_sequences = require_int("max_sequences", max_sequences, 1)
        config = model.config
        if num_pages is None:
            num_pages = default_num_pages(config, page_size, config.max_positions, max_sequences)
        num_pages = require_int("num_pages", num_pages, 1)
        self.model = model
        graphs = cuda_graphs and torch.device(model.device).type == "cuda"
        self.cache = KVCache(config, num_pages, page_size, model.device, spare_pages(max_sequences) if graphs else 0)
        self.pool = PagePool(num_pages, page_size, prefix_cache)
        self.scheduler = Scheduler(self.pool, max_batch_tokens, chunk_size, max_sequences)
        self._next_id, self._awaited = 0, {}
        self._weights = self._weights_stamp()
        self.graphs = DecodeGraphs(model, self.cache) if graphs else None

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        trace: Any = None,
        on_token: Callable[[NewToken], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts.

        prompts    token ids (list, tensor, array, generator), or text if the model has a tokenizer
        params     one for all, or one a prompt; None means SamplingParams()
        trace      takes every named tensor of every step, and the log-probs
        on_token   called with each new token as it is drawn; it may abort() requests, of which the rest is returned

        Raises InputError for bad input, before anything has changed. If a request fails (see step), the others are
        finished, and then a RequestError (an InputError) names it; all completions are in its .completions.
        """
        prompts = prompt_list(prompts)
        if self.scheduler.waiting or self.scheduler.running:
            raise InputError("generate() was called while requests are in flight: finish them with step(), or abort()")
        sequences = [
            make(self._next_id + i, prompt, p, f"prompts[{i}]", self.model, self.pool)
            for i, (prompt, p) in enumerate(zip(prompts, params_list(params, len(prompts)), strict=True))
        ]
        self._next_id += len(sequences)
        done: dict[int, Completion] = {}
        self._awaited = {sequence.request_id: done for sequence in sequences}
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
            while self._awaited:
                assert self.scheduler.running or self.scheduler.waiting, f"requests {[*self._awaited]} are lost"
                for token in self.step(trace):
                    if on_token is not None and token.token_id is not None:
                        on_token(token)
        finally:
            # After an error or an interrupt no request may stay behind with pages in its hands.
            for sequence in self.scheduler.running + self.scheduler.waiting:
                self.scheduler.remove(sequence)
            self._awaited = {}
        return good([done[sequence.request_id] for sequence in sequences])

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues one request and returns its id; step() brings it forward. Raises InputError, nothing changed."""
        sequence = make(self._next_id, prompt, checked_params(params, "params"), "prompt", self.model, self.pool)
        self._next_id += 1
        self.scheduler.add(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> Completion:
        """Ends a request that is in flight and returns what it has so far. Raises InputError if there is none."""
        for sequence in self.scheduler.running + self.scheduler.waiting:
            if sequence.request_id == request_id:
                self.scheduler.remove(sequence)
                return self._ended(sequence.completion("abort", self.model.tokenizer))
        raise InputError(f"request {request_id} is not in flight: abort() takes the id that add() returned")

    @torch.no_grad()
    def step(self, trace: Any = None) -> list[NewToken]:
        """One forward pass; the tokens it has drawn, at most one a request. Empty without requests in flight, and
        when every request that had a turn is still reading its prompt.

        A request ends with finish_reason "error" if an operator refuses its values (activations or router logits that
        are not finite), or if no token can be drawn from its logits (a NaN; a largest logit that its temperature makes
        overflow). The others go on, with the bits that they have without it; the prefix cache keeps none of its pages.
        Whatever else the model, the draw or the trace raises comes out with every request as it was before: the step
        can be repeated, and gives the same bits.
        """
        if self._weights_stamp() != self._weights:
            self._renew()
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        with naming_memory(f"a step of {sum(c.count for c in chunks)} tokens", "lower max_batch_tokens or num_pages"):
            computed, results = self._forward(chunks, trace)
        tokens = [self._new_token(*result) for result in results]
        if trace is not None:
            for (sequence, _), token in zip(results, tokens, strict=True):
                if token.token_id is not None:
                    trace.note_log_probs(token.request_id, [len(sequence.ids)], [token.log_prob])
        self._commit(computed, [sequence for sequence, _ in results], tokens)
        return tokens

    def reset_cache(self) -> None:
        """Forgets every key and value, and the model's quantised copies of its weights, because these have changed.
        Requests in flight keep their tokens, and their keys and values are computed again with the new weights.

        step() does this when it sees a change: model.weights_version raised (the learner and the loader do), another
        recipe, a parameter replaced, or changed in place by copy_, load_state_dict or one of torch's optimisers. It
        cannot see writes through `.data`, NumPy or another view that torch does not count, nor writes to parameters
        made under torch.inference_mode(); whoever writes so must raise model.weights_version or call this.
        """
        for module in self.model.modules():
            if getattr(module, "experts", None) is not None:
                module.experts.forget()
        self._renew()

    def _renew(self) -> None:
        for sequence in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(sequence)
        self.pool.forget()
        before, self._weights = self._weights, self._weights_stamp()
        if self.graphs is not None and not self._weights.same_storage(before):
            self.graphs.forget()
        for module in self.model.modules():
            if getattr(module, "experts", None) is not None:
                module.experts.refresh(module)

    def check(self) -> None:
        """Asserts the invariants of requests, pages and prefix cache."""
        self.scheduler.check()

    def _forward(self, chunks: list[Chunk], trace: Any) -> tuple[list[Chunk], list]:
        """(good chunks, (sequence, what was drawn or is wrong) of the others and of those that draw a token). The good
        ones are computed again without the bad: bits do not depend on the batch, so none of them moves."""
        failed: list[tuple[Sequence, InputError]] = []
        while chunks:
            try:
                logits_LV = self._logits(chunks, trace)
                drawing = [chunk.sequence for chunk in chunks if chunk.completes]
                drawn = zip(drawing, draw(drawing, logits_LV), strict=True)
                if logits_LV.is_cuda:  # now: a row found later would be taken for another batch's
                    gpu.device.check(logits_LV.device, sum(chunk.count for chunk in chunks))
                return chunks, [*failed, *drawn]
            except RowError as error:
                faults = self._batch(chunks).faults(error)
            failed += [(chunks[s].sequence, InputError(what)) for s, what in faults.items()]
            chunks = [chunk for s, chunk in enumerate(chunks) if s not in faults]
        return [], failed

    def _logits(self, chunks: list[Chunk], trace: Any) -> Tensor:
        """FP32 [L, V] of the chunks that draw a token. A step of single tokens may come from a CUDA graph."""
        if self.graphs is not None and (trace is None or trace.only_log_probs):
            if all(c.count == 1 and c.completes for c in chunks) and self.graphs.possible:
                return self.graphs.run([chunk.sequence for chunk in chunks])
        return self.model(self._batch(chunks).to(self.model.device), self.cache, trace)

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

    def _new_token(self, sequence: Sequence, drawn: tuple[int, float] | InputError) -> NewToken:
        """What this step says of the request; nothing is changed yet."""
        if isinstance(drawn, InputError):
            what = f"request {sequence.request_id}: {drawn}"
            completion = sequence.completion("error", self.model.tokenizer, what)
            return NewToken(sequence.request_id, None, None, completion)
        reason = sequence.finish_reason(drawn[0])
        completion = None
        if reason is not None:
            completion = sequence.with_token(*drawn).completion(reason, self.model.tokenizer)
        return NewToken(sequence.request_id, *drawn, completion)

    def _commit(self, chunks: list[Chunk], sequences: list[Sequence], tokens: list[NewToken]) -> None:
        """Keys, values and tokens of a step count from here on; nothing in here fails."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if token.token_id is not None:
                sequence.append(token.token_id, token.log_prob)
        for chunk in chunks:
            self.scheduler.computed(chunk)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token.completion is not None:
                (self.scheduler.fail if token.token_id is None else self.scheduler.remove)(sequence)
                self._ended(token.completion)

    def _ended(self, completion: Completion) -> Completion:
        """Into what generate() returns if it awaits this request: on_token may have ended it, by abort() or step()."""
        self._awaited.pop(completion.request_id, {})[completion.request_id] = completion
        return completion

    def _weights_stamp(self) -> WeightsStamp:
        """Another value after any change of weights or number format that can be seen without reading weights."""
        recipe = getattr(getattr(self.model, "recipe", None), "key", None)
        return WeightsStamp(*parts(self.model), (self.model.weights_version, recipe))
