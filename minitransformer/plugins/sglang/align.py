"""`align` with SGLang as the sampler: what its server says over HTTP against the learner's bits.

Compared: the log-prob of every sampled token at its temperature, that of every prompt token at temperature 1, and the
expert ids of every sparse layer if the server captures them (--enable-return-routed-experts). The stages in between
stay inside the server. Beside it, as a contrast, the server's own prefill scores what its decode has emitted.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minitransformer.alignment.align import Alignment, contrast_gap, score, timed
from minitransformer.alignment.compare import ComparingTrace
from minitransformer.alignment.difference import StageResult
from minitransformer.alignment.gap import Gap, log_prob_gap
from minitransformer.alignment.trace import Trace
from minitransformer.checkpoint_files import first_few
from minitransformer.errors import InputError
from minitransformer.plugins.sglang import stock
from minitransformer.plugins.sglang.checksums import checksums, unlike
from minitransformer.plugins.sglang.client import Client, Output
from minitransformer.plugins.sglang.identity import refuse_for_stock, require_same
from minitransformer.sampler.sequence import Completion, SamplingParams


@dataclass(frozen=True)
class EngineAlignment(Alignment):
    """server: what /server_info tells (version, model_path, ...); stock: it runs SGLang's own model.

    rescored: the server's prefill against what its decode emitted, or why it was not run; it is no part of `equal`.
    kernels: "own", or "sglang" if the learner ran on those and is compared with the server's prefill; why_own: why not.
    """

    server: dict[str, Any] | None = None
    stock: bool = False
    rescored: Gap | str = ""
    kernels: str = "own"
    why_own: str = ""

    @property
    def passes(self) -> int:
        """Of the learner over all sequences."""
        lengths = [len(c.prompt_ids) + len(c.token_ids) for c in self.completions]
        return 1 if self.kernels == "own" else len(list(stock.passes(lengths)))

    @property
    def equal(self) -> bool:
        """As Alignment's. On SGLang's kernels: the prefill's log-probs; a stock decode differs from them by itself."""
        if self.kernels == "own":
            return super().equal
        tokens = sum(len(c.prompt_ids) + len(c.token_ids) - 1 for c in self.completions)
        return all(r.equal for r in self.stages) and sum(r.rows for r in self.stages) == tokens


def align_engine(
    model: Any,
    client: Client,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    checkpoint: str | Path | None = None,
    on_step: Callable[[str], None] = lambda part: None,
    stock_kernels: bool = False,
) -> EngineAlignment:
    """Arguments as `align`'s; model: the learner's. stock_kernels: it runs on SGLang's kernels if it can.

    InputError for a server that does not answer, and, before anything is sampled, for one with our model that follows
    another spec or holds other weights. A stock server is taken as it is: its log-probs are compared all the same.
    """
    seconds: dict[str, float] = {}
    on_step("check")
    with timed(seconds, "check"):
        server, identity = client.about(), client.identity()
        if identity is None:
            refuse_for_stock(model.config)
        elif stock_kernels:
            raise InputError(f"{client.url}: it serves miniTransformer's model, not SGLang's own; leave --stock out")
        else:
            require_same(model, identity, client.url)
            _require_weights(model, client)
        _require_room(server, prompts, params, client.url)
    temperatures = [p.log_prob_temperature for p in params]
    routed = bool(server.get("enable_return_routed_experts"))
    on_step("sampler")
    with timed(seconds, "sampler"):
        completions, outs = sample(model, client, prompts, params, return_routed_experts=routed)
    on_step("rescore")
    with timed(seconds, "rescore"):
        sequences = [c.prompt_ids + c.token_ids for c in completions]
        again = client.generate(sequences, {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
        _require_complete(completions, again)
    on_step("learner")
    why_own = stock.unable(model, server) if stock_kernels else ""
    kernels = "sglang" if stock_kernels and why_own is None else "own"
    with timed(seconds, "learner"):
        if kernels == "sglang":
            stages, gap = _score_on_stock(model, completions, again, temperatures)
        else:
            trace = _trace(completions, outs if routed else [], model.config)
            stages, gap = score(model, completions, temperatures, trace)
            stages += _prompt_stage(model, completions, again)
    on_step("transformers")
    with timed(seconds, "transformers"):
        contrast = contrast_gap(checkpoint, completions, temperatures)
    rescored = _rescored(completions, again, temperatures)
    found = completions, stages, [], gap, contrast, seconds, server, identity is None, rescored, kernels, why_own or ""
    return EngineAlignment(model.spec.fingerprint(), *found)


def sample(
    model: Any, client: Client, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **more: Any
) -> tuple[list[Completion], list[Output]]:
    """The server's completions, as Sampler.generate gives its own. model: for its tokenizer and its config."""
    # -1: prompt tokens are not scored, so that the radix cache may spare them.
    outs = client.generate(prompts, [_sglang(p, model.config) for p in params], -1, **more)
    return [_completion(i, *row, model) for i, row in enumerate(zip(prompts, params, outs, strict=True))], outs


def _require_weights(model: Any, client: Client) -> None:
    ours = checksums(model)
    wrong = unlike(ours, client.checksums())
    if wrong:
        raise InputError(
            f"{client.url}: the server holds other weights than --model: {len(wrong)} of {len(ours)} tensors differ "
            f"({first_few(wrong)}); send them with `minitransformer sync --model DIR --to {client.url}`"
        )


def _require_room(server: dict[str, Any], prompts: Sequence, params: Sequence[SamplingParams], url: str) -> None:
    """InputError for a request that the server would refuse, or never answer; a completion is sent to it again."""
    lengths = [len(ids) + p.max_new_tokens for ids, p in zip(prompts, params, strict=True)]
    most = server.get("max_req_input_len")
    for i, length in enumerate(lengths):
        if isinstance(most, int) and length > most:
            size = f"has {len(prompts[i])} tokens and asks for {params[i].max_new_tokens}"
            raise InputError(
                f"prompts[{i}] {size}: more than the {most} that {url} takes at once; shorten it, ask for fewer, or "
                "start the server with more room"
            )
    if why := stock.stalls(server, max(lengths, default=0)):
        raise InputError(f"{url}: {why}")


def _sglang(p: SamplingParams, config: Any) -> dict[str, Any]:
    stops = [] if p.ignore_eos else list(config.eos_token_ids)
    return {
        "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k or -1, "max_new_tokens": p.max_new_tokens,
        "sampling_seed": p.seed, "ignore_eos": p.ignore_eos, "stop_token_ids": [*stops, *p.stop_token_ids],
    }  # fmt: skip


def _completion(request: int, prompt: Sequence[int], p: SamplingParams, out: Output, model: Any) -> Completion:
    if out.finish_reason not in ("stop", "length"):
        said = (out.meta.get("finish_reason") or {}).get("message", out.finish_reason)
        raise InputError(f"prompts[{request}]: the server gave it up: {said}")
    ids = out.token_ids[:-1] if out.finish_reason == "stop" else out.token_ids
    return Completion(
        request_id=request,
        prompt_ids=list(prompt),
        token_ids=out.token_ids,
        log_probs=out.log_probs,
        log_prob_of=p.log_prob_of,
        finish_reason=out.finish_reason,
        text=None if model.tokenizer is None else model.tokenizer.decode(ids),
        cached_tokens=out.cached_tokens,
        preemptions=out.meta.get("num_retractions", 0),
    )


def _require_complete(completions: Sequence[Completion], again: Sequence[Output]) -> None:
    for c, out in zip(completions, again, strict=True):
        found, asked = len(c.log_probs) + len(out.prompt_log_probs), len(c.prompt_ids) + 2 * len(c.token_ids) - 1
        if found != asked:
            raise InputError(f"prompts[{c.request_id}]: the server gave {found} log-probs, {asked} were asked for")


def _trace(completions: Sequence[Completion], outs: Sequence[Output], config: Any) -> Trace:
    """What the server told of the sampling, under the learner's names of the stages."""
    trace = Trace(["log_prob", "layers.*.expert_ids"] if outs else ["log_prob"])
    for c in completions:
        start = len(c.prompt_ids)
        trace.note_log_probs(c.request_id, range(start, start + len(c.token_ids)), c.log_probs)
    for c, out in zip(completions, outs, strict=False):
        raw = torch.frombuffer(bytearray(base64.b64decode(out.meta["routed_experts"])), dtype=torch.int32)
        ids_TLK = raw.view(-1, config.num_layers, config.top_k).long()
        keys_T = trace.keys.number((c.request_id, position) for position in range(len(ids_TLK)))
        for i in (i for i, sparse in enumerate(config.sparse_layers) if sparse):
            trace.take(f"layers.{i}.expert_ids", keys_T, ids_TLK[:, i])
    return trace


def _prompt_stage(model: Any, completions: Sequence[Completion], again: Sequence[Output]) -> list[StageResult]:
    """The prompts' log-probs as a stage of their own; none where no prompt has a second token."""
    trace, some = Trace(["log_prob"]), []
    for c, out in zip(completions, again, strict=True):
        if len(c.prompt_ids) > 1:
            n = len(c.prompt_ids)
            trace.note_log_probs(c.request_id, range(1, n), out.prompt_log_probs[: n - 1])
            some.append(replace(c, prompt_ids=c.prompt_ids[:1], token_ids=c.prompt_ids[1:], log_probs=[0.0] * (n - 1)))
    if not some:
        return []
    (stage,), _ = score(model, some, [1.0] * len(some), trace)
    return [replace(stage, stage="prompt_log_prob")]


def _score_on_stock(
    model: Any, completions: Sequence[Completion], again: Sequence[Output], temperatures: Sequence[float]
) -> tuple[list[StageResult], Gap]:
    """The learner on SGLang's kernels: every token against the server's prefill, and the gap to what was emitted."""
    sequences, kernels = [c.prompt_ids + c.token_ids for c in completions], stock.SglangKernels()
    ours = stock.log_probs(model, sequences, kernels)
    prefill = Trace(["log_prob"])
    for c, ids, out in zip(completions, sequences, again, strict=True):
        prefill.note_log_probs(c.request_id, range(1, len(ids)), out.prompt_log_probs)
    comparing = ComparingTrace(prefill)
    for c, ids, scores_L in zip(completions, sequences, ours, strict=True):
        comparing.note_log_probs(c.request_id, range(1, len(ids)), scores_L)
    if any(t != 1 for t in temperatures):
        ours = stock.log_probs(model, sequences, kernels, temperatures)
    emitted = torch.tensor([x for c in completions for x in c.log_probs], dtype=torch.float32)
    sampled = torch.cat([scores_L[len(c.prompt_ids) - 1 :] for c, scores_L in zip(completions, ours, strict=True)])
    return [replace(r, stage="prefill_log_prob") for r in comparing.results()], log_prob_gap(emitted, sampled)


def _rescored(completions: Sequence[Completion], again: Sequence[Output], temperatures: Sequence[float]) -> Gap | str:
    if any(t != 1 for t in temperatures):
        return "SGLang scores prompts at temperature 1 only"
    emitted = [x for c in completions for x in c.log_probs]
    prefill = [x for c, o in zip(completions, again, strict=True) for x in o.prompt_log_probs[len(c.prompt_ids) - 1 :]]
    return log_prob_gap(torch.tensor(emitted, dtype=torch.float32), torch.tensor(prefill, dtype=torch.float32))
