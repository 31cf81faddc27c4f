"""A model that is all memory: its logits are a hash of everything that it reads through the page table.

A wrong page, a stale row, a wrong position or a wrong order of rows changes the hash, and so the tokens and the
log-probs. Each row's value is a hash of the values before it, so one wrong read poisons all later ones, as it does in
a network of several layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from minitransformer.batch import Batch
from minitransformer.ops.logprob import logprob
from minitransformer.ops.sample import sample
from minitransformer.sampler.cache import KVCache
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, SamplingParams

EXACT = 251  # integers below 256 are exact in BF16


@dataclass(frozen=True)
class FakeConfig:
    vocab_size: int = 24
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    max_positions: int = 96
    eos_token_ids: tuple[int, ...] = (3,)


class FakeModel(torch.nn.Module):
    """key row = (id, position), value row = (hash of the rows before, 0); salt stands for the weights."""

    device = "cpu"
    weights_version = 0

    def __init__(self, config: FakeConfig | None = None, tokenizer: object = None) -> None:
        super().__init__()
        self.config, self.tokenizer = config or FakeConfig(), tokenizer
        self.salt = torch.nn.Parameter(torch.ones(1))
        self.batches: list[Batch] = []
        rng = np.random.default_rng(7)
        self._factors = rng.integers(-(2**62), 2**62, (self.config.max_positions, 3))
        self._columns = rng.integers(-(2**62), 2**62, self.config.vocab_size)

    def forward(self, batch: Batch, cache: KVCache | None = None, trace: object = None) -> torch.Tensor:
        self.batches.append(batch)
        empty = torch.full((len(batch.ids_T), 1, 2), torch.nan, dtype=torch.bfloat16)
        k, v = (empty, empty.clone()) if cache is None else (cache.k[0], cache.v[0])
        k[batch.store_rows_T, 0] = torch.stack((batch.ids_T, batch.positions_T), -1).to(torch.bfloat16)
        digests = []
        for s in range(batch.num_sequences):
            for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]):
                rows = batch.key_rows_SL[s, : batch.positions_T[t] + 1]
                v[rows[-1], 0] = float(self._hash(k, v, rows, own_value=False) % EXACT)
                digests.append(self._hash(k, v, rows, own_value=True))
        wanted = range(len(digests)) if batch.logit_rows_L is None else batch.logit_rows_L.tolist()
        return torch.stack([self._logits(digests[t]) for t in wanted]) if len(wanted) else torch.empty(0, 24)

    def _hash(self, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, own_value: bool) -> int:
        read = torch.cat((k[rows, 0], v[rows, 0, :1]), -1).float()
        if not own_value:
            read[-1, 2] = 0
        seen = read.nan_to_num(nan=EXACT).numpy().astype(np.int64)  # a row that nobody wrote is a wrong value as well
        return int((seen * self._factors[: len(rows)]).sum()) + int(self.salt.item() * 1000)

    def _logits(self, digest: int) -> torch.Tensor:
        mixed = self._columns * np.int64(digest | 1)
        mixed = (mixed ^ (mixed >> 29)) * np.int64(0x1B873593CC9E2D51)
        return torch.from_numpy(((mixed >> 40) / 2**22).astype(np.float32))


Alone = tuple[list[int], list[float], str]  # tokens, log-probs, finish reason


def alone(model: torch.nn.Module, prompt: tuple[int, ...], params: SamplingParams) -> Alone:
    """The definition: no cache, no pages, no other request. Every token from a packed pass over all before it."""
    ids, log_probs = list(prompt), []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.config.eos_token_ids))
    limit = min(len(prompt) + params.max_new_tokens, model.config.max_positions)
    while True:
        with torch.no_grad():
            logits_1V = model(Batch.packed([ids]))[-1:]
        token = sample(logits_1V[0], params.seed, len(ids), params.temperature, params.top_k, params.top_p)
        log_probs.append(logprob(logits_1V, torch.tensor([token]), params.log_prob_temperature).item())
        ids.append(token)
        if token in stops or len(ids) == limit:
            return ids[len(prompt) :], log_probs, "stop" if token in stops else "length"


@cache
def fake_alone(prompt: tuple[int, ...], params: SamplingParams) -> Alone:
    """alone() on the fake model: what every test expects."""
    return alone(FakeModel(), prompt, params)


@dataclass(frozen=True)
class Request:
    """One request of a schedule: added before step `arrival`, aborted before step `abort` if still in flight."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    abort: int | None = None


def poisoned(sampler: Sampler) -> Sampler:
    """The sampler with NaN in every row of its store: a row that is read before it is written shows."""
    for tensor in sampler.cache.k + sampler.cache.v:
        tensor.fill_(torch.nan)
    return sampler


def play(sampler: Sampler, requests: list[Request]) -> list[Completion]:
    """Runs a schedule to its end, with the invariants checked after every step; completions in order of requests."""
    ids: dict[int, int] = {}
    done: dict[int, Completion] = {}
    last_arrival = max(r.arrival for r in requests)
    t = 0
    while t <= last_arrival or len(done) < len(requests):
        for i, request in enumerate(requests):
            if request.arrival == t:
                ids[sampler.add(list(request.prompt), request.params)] = i
            flying = {ids[s.request_id]: s.request_id for s in sampler.scheduler.running + sampler.scheduler.waiting}
            if request.abort == t and i in flying:
                done[i] = sampler.abort(flying[i])
        done |= {ids[token.request_id]: token.completion for token in sampler.step() if token.completion is not None}
        sampler.check()
        t += 1
        assert t < 10_000, "no progress"
    assert sampler.pool.available == sampler.pool.num_pages, "pages are leaked"
    return [done[i] for i in range(len(requests))]


def assert_bits(got: list[float], want: list[float], what: str) -> None:
    """Equal as FP32 bits."""
    a, b = (torch.tensor(x, dtype=torch.float32).view(torch.int32) for x in (got, want))
    assert torch.equal(a, b), f"{what}: log-probs {got} instead of {want}"


def assert_alone(requests: list[Request], completions: list[Completion], expected=fake_alone) -> None:
    """Every completion is what its request gives alone; an aborted one, the beginning of it."""
    for i, (request, got) in enumerate(zip(requests, completions, strict=True)):
        token_ids, log_probs, reason = expected(request.prompt, request.params)
        n = len(got.token_ids) if got.finish_reason == "abort" else len(token_ids)
        assert got.token_ids == token_ids[:n], f"request {i}: tokens {got.token_ids} instead of {token_ids[:n]}"
        assert_bits(got.log_probs, log_probs[:n], f"request {i}")
        assert got.finish_reason in (reason, "abort") and got.prompt_ids == list(request.prompt)


def prompts(seed: int, lengths: list[int], vocab_size: int = 24) -> Iterator[tuple[int, ...]]:
    """Prompts of these lengths, the longer ones beginning with the shorter ones."""
    stem = np.random.default_rng(seed).integers(4, vocab_size, max(lengths)).tolist()
    yield from (tuple(stem[:n]) for n in lengths)
