"""The main job: sample, score the same tokens with the learner, and compare every stage of every layer on bits.

    prompts -> sampler (pages, chunks, prefix cache, continuous batching) -> tokens, trace
    tokens  -> learner (one packed pass)                                  -> compared with the trace row by row
    tokens  -> transformers in BF16                                       -> the contrast

Memory: the sampler's trace of the stages that are compared, and one row's differences of the learner's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitransformer.alignment.compare import ComparingTrace, nothing_compared
from minitransformer.alignment.contrast import NotRun, score_with_transformers
from minitransformer.alignment.difference import StageResult
from minitransformer.alignment.gap import Gap, log_prob_gap
from minitransformer.alignment.trace import Trace
from minitransformer.learner.learner import Learner
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import Completion, NewToken, RequestError, SamplingParams


@dataclass(frozen=True)
class Alignment:
    """What `align` found.

    completions  of every request; one that an operator refused (its `error` says why) is not compared
    stages       sampler (a) against learner (b), in the model's order
    recomputed   rows that the sampler computed more than once (preemption), first bits against later ones
    gap          the completions' log-probs, learner against sampler
    contrast     transformers against the sampler, or the reason why it was not run
    seconds      wall time of each part
    """

    fingerprint: str
    completions: list[Completion]
    stages: list[StageResult]
    recomputed: list[StageResult]
    gap: Gap
    contrast: Gap | str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> list[Completion]:
        """The requests that were compared."""
        return [c for c in self.completions if c.error is None]

    @property
    def equal(self) -> bool:
        """Of the finished requests no element differs, every stage that one side has was compared, and every sampled
        token was scored."""
        tokens = sum(len(c.token_ids) for c in self.finished)
        stages = all(r.equal and r.rows for r in self.stages) and not nothing_compared(self.stages)
        return stages and all(r.equal for r in self.recomputed) and self.gap.tokens == tokens and not self.gap.differing


def align(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    sampler_options: dict[str, Any] | None = None,
    stages: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    on_step: Callable[[str], None] = lambda part: None,
    on_token: Callable[[NewToken], None] | None = None,
    learner_model: Any = None,
) -> Alignment:
    """Runs the whole comparison.

    prompts, params   ids of each request, and how it is sampled
    sampler_options   of Sampler: page_size, chunk_size, num_pages, ...
    stages            patterns of the stages to compare; None for all
    checkpoint        directory that transformers loads for the contrast; None leaves the contrast out
    on_step           told what starts; on_token gets each sampled token
    learner_model     the model that the learner scores with, of the same weights; None: `model`. On another device, it
                      shows that the one predicts the other's bits

    Raises InputError for bad prompts or parameters, or if the model's spec changed after sampling, and RequestError if
    every request failed; where some did, the others are compared.
    """
    seconds: dict[str, float] = {}
    # Taken now: what the sampler followed, whatever happens to the model before the learner scores.
    followed = model.spec
    on_step("sampler")
    with timed(seconds, "sampler"):
        sampler, trace = Sampler(model, **(sampler_options or {})), Trace(stages, strict=False)
        try:
            completions = sampler.generate(prompts, params, trace=trace, on_token=on_token)
        except RequestError as error:
            completions = error.completions
            if all(c.error is not None for c in completions):
                raise  # there is nothing to compare
    finished = [(c, p.log_prob_temperature) for c, p in zip(completions, params, strict=True) if c.error is None]
    good, temperatures = map(list, zip(*finished, strict=True))

    on_step("learner")
    with timed(seconds, "learner"):
        followed.require_same((learner_model or model).spec, "sampler and learner")
        compared, gap = score(learner_model or model, good, temperatures, trace)
    recomputed = trace.conflicts({c.request_id for c in good})
    del sampler, trace  # their memory is free before another copy of the model is loaded

    on_step("transformers")
    with timed(seconds, "transformers"):
        contrast = contrast_gap(checkpoint, good, temperatures)
    return Alignment(followed.fingerprint(), completions, compared, recomputed, gap, contrast, seconds)


def score(
    model: Any, completions: Sequence[Completion], temperatures: Sequence[float], trace: Trace
) -> tuple[list[StageResult], Gap]:
    """The learner scores the completions: each stage against the sampler's trace, and the gap of the log-probs."""
    sequences = [c.prompt_ids + c.token_ids for c in completions]
    # One pack, and no gradient: the learner's forward pass over everything at once, as in training.
    learner, comparing = Learner(model, max_tokens_per_pack=sum(map(len, sequences))), ComparingTrace(trace)
    starts, requests = [len(c.prompt_ids) for c in completions], [c.request_id for c in completions]
    scores = learner.score(sequences, starts, temperatures, trace=comparing, request_ids=requests)
    return comparing.results(), log_prob_gap(_sampled(completions), torch.cat(scores).cpu())


def _sampled(completions: Sequence[Completion]) -> Tensor:
    return torch.tensor([x for c in completions for x in c.log_probs], dtype=torch.float32)


def contrast_gap(
    checkpoint: str | Path | None, completions: Sequence[Completion], temperatures: Sequence[float]
) -> Gap | str:
    """transformers against the sampler, or why it was not run."""
    if checkpoint is None:
        return "left out on request"
    sequences, starts = [c.prompt_ids + c.token_ids for c in completions], [len(c.prompt_ids) for c in completions]
    try:
        scores = score_with_transformers(checkpoint, sequences, starts, temperatures)
    except NotRun as reason:
        return str(reason)
    return log_prob_gap(_sampled(completions), torch.cat(scores))


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - begin
