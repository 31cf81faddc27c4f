"""A request: what was asked (SamplingParams), how far it is (Sequence), and what came out (NewToken, Completion)."""

from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from minitransformer.errors import InputError
from minitransformer.integers import integer, listed

SEED_LIMIT = 1 << 63


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one request are drawn.

    max_new_tokens   at most this many; fewer if the context is full, then the finish reason is "length" too
    temperature      logits are divided by it (FP32), 1e-6 to 1e6 so that the quotients stay finite; 0 is greedy: the
                     largest logit, ties to the lower id
    top_k            draw among the k largest logits; 0 means all
    top_p            draw among the fewest tokens whose probability sums to top_p; 1 means all
    seed             the noise is a function of (seed, position, token id) and of nothing else
    stop_token_ids   generation ends after one of these; it is part of the output. The model's own end-of-sequence
                     ids count as well, unless ignore_eos
    ignore_eos       go on after the model's end-of-sequence ids

    The log-prob of a token is that of the softmax over the WHOLE vocabulary of the logits divided by the temperature
    (greedy: by 1), whatever top_k and top_p are: it is what a learner computes from the tokens alone. With top_k or
    top_p the tokens come from a narrower distribution, whose probabilities are larger; no log-prob of it is given.

    Raises InputError for a value outside its range.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stops = listed(self.stop_token_ids)
        if stops is None:
            raise InputError(f"stop_token_ids is {self.stop_token_ids!r}: give a tuple of token ids")
        plain: dict[str, Any] = {
            "max_new_tokens": require_int("max_new_tokens", self.max_new_tokens, 1),
            "top_k": require_int("top_k", self.top_k, 0, "0 means no limit"),
            "seed": require_int("seed", self.seed, 0),
            "stop_token_ids": tuple(require_int("stop_token_ids", token_id, 0) for token_id in stops),
        }
        if self.seed >= SEED_LIMIT:
            raise InputError(f"seed is {self.seed}: give an integer below 2**63")
        if not _is_number(self.temperature) or not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise InputError(f"temperature is {self.temperature!r}: give a number from 1e-6 to 1e6, or 0 for greedy")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r}: give a number above 0 and at most 1, where 1 means no limit")
        plain |= {name: float(getattr(self, name)) for name in ("temperature", "top_p")}
        for name, value in plain.items():  # of NumPy's kinds too: what follows computes with Python's
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """What the logits are divided by before the log-softmax."""
        return 1.0 if self.greedy else float(self.temperature)

    @property
    def log_prob_of(self) -> str:
        """The distribution that log-probs are of, in words."""
        text = f"softmax of logits / {self.log_prob_temperature:g} over the whole vocabulary"
        narrowed = self.greedy or self.top_k > 0 or self.top_p < 1
        return text + (", which is not the narrower distribution that was sampled from" if narrowed else "")


@dataclass(eq=False)
class Sequence:
    """One request on its way. Lives in the scheduler's waiting or running list; ordered by request_id (arrival).

    ids            prompt and generated tokens
    num_computed   how many of them have keys and values in the store: a prefix
    pages          page table: position p lies at offset p % page_size of pages[p // page_size]
    """

    request_id: int
    prompt_len: int
    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_len: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        """Known tokens that are still to be computed: 1 for a decoding request, never 0."""
        return len(self.ids) - self.num_computed

    @property
    def next_draw(self) -> tuple[int, int, float, int, float, float]:
        """How the next token is drawn: seed, position, temperature, top_k, top_p, temperature of its log-prob."""
        p = self.params
        return p.seed, len(self.ids), p.temperature, p.top_k, p.top_p, p.log_prob_temperature

    def finish_reason(self, token_id: int) -> str | None:
        """Why the request ends with this token as its next one; None if it goes on."""
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.ids) + 1 >= self.max_len else None

    def append(self, token_id: int, log_prob: float) -> None:
        """Takes a sampled token."""
        self.ids.append(token_id)
        self.log_probs.append(log_prob)

    def with_token(self, token_id: int, log_prob: float) -> "Sequence":
        """A copy that has taken the token: what can fail is done on it before the request itself changes."""
        return replace(self, ids=[*self.ids, token_id], log_probs=[*self.log_probs, log_prob])

    def completion(self, finish_reason: str, tokenizer: Any, error: str | None = None) -> "Completion":
        token_ids = self.ids[self.prompt_len :]
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(token_ids[:-1] if finish_reason == "stop" else token_ids)
        return Completion(
            request_id=self.request_id,
            prompt_ids=self.ids[: self.prompt_len],
            token_ids=token_ids,
            log_probs=list(self.log_probs),
            log_prob_of=self.params.log_prob_of,
            finish_reason=finish_reason,
            text=text,
            cached_tokens=self.cached_tokens or 0,
            preemptions=self.preemptions,
            error=error,
        )


@dataclass(frozen=True)
class Completion:
    """What came out of one request.

    token_ids       the sampled tokens, a final stop token included
    log_probs       FP32 values (exact as Python floats), one a token; of which distribution says log_prob_of
    log_prob_of     in words; see SamplingParams
    finish_reason   "stop" (a stop token), "length" (max_new_tokens, or the context is full), "abort", or "error": an
                    operator has refused this request's values (not finite); the tokens before are good
    text            token_ids without a final stop token, decoded; None without a tokenizer
    cached_tokens   tokens of the prompt that the prefix cache spared when the request was first admitted
    preemptions     how often its pages were taken away and its tokens computed again
    error           with "error": the request, the position, the layer, the operator and what was wrong; else None
    """

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    log_prob_of: str
    finish_reason: str
    text: str | None
    cached_tokens: int
    preemptions: int
    error: str | None = None


@dataclass(frozen=True)
class NewToken:
    """One token that a step has sampled; with the completion if it was the request's last.

    token_id and log_prob are None if there is no token: the completion then says "error", and what was wrong.
    """

    request_id: int
    token_id: int | None
    log_prob: float | None
    completion: Completion | None = None


class RequestError(InputError):
    """Some requests of a generate() failed. completions: of all its requests, in order; good but for the failed ones,
    which have finish_reason "error"."""

    def __init__(self, message: str, completions: list[Completion]) -> None:
        super().__init__(message)
        self.completions = completions


def good(completions: list[Completion]) -> list[Completion]:
    """The same; RequestError, naming the first by its prompt, if some of them failed."""
    failed = [(i, c.error) for i, c in enumerate(completions) if c.finish_reason == "error"]
    if failed:
        (first, what), more = failed[0], f" ({len(failed)} requests failed)" if len(failed) > 1 else ""
        raise RequestError(f"prompts[{first}]: {what}{more}", completions)
    return completions


def require_int(name: str, value: Any, minimum: int, note: str = "") -> int:
    """The value as a Python integer; InputError unless it is one (of any kind, no bool) of at least minimum."""
    found = integer(value)
    if found is None or found < minimum:
        raise InputError(f"{name} is {value!r}: give an integer of at least {minimum}{note and ', where ' + note}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
