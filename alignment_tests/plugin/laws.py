"""The laws through a running engine. Each counts what differs: Count(differing, of). They need only HTTP.

P prompts (lists of ids), N new tokens a prompt; temperature 0 is greedy. Every request has its own seed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from minitransformer.plugins.sglang.client import Client, Output

Ids = Sequence[Sequence[int]]


class Count(NamedTuple):
    differing: int
    of: int
    largest: float = 0.0

    def __str__(self) -> str:
        return f"{self.differing} of {self.of} differ, largest {self.largest:.3g}"


def prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=rng).tolist() for n in lengths]


def params(count: int, temperature: float, new_tokens: int, seed: int = 100) -> list[dict]:
    one = dict(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
    return [one | {"sampling_seed": seed + i} for i in range(count)]


def count(a: Sequence[float], b: Sequence[float]) -> Count:
    """Two lists of numbers that should be equal; a different length differs everywhere."""
    if len(a) != len(b):
        return Count(max(len(a), len(b)), max(len(a), len(b)), float("inf"))
    unlike = [abs(x - y) for x, y in zip(a, b, strict=True) if (x, math.copysign(1, x)) != (y, math.copysign(1, y))]
    return Count(len(unlike), len(a), max(unlike, default=0.0))


def total(counts: Sequence[Count]) -> Count:
    return Count(sum(c.differing for c in counts), sum(c.of for c in counts), max(c.largest for c in counts))


def same(a: Sequence[Output], b: Sequence[Output]) -> Count:
    """Tokens, their log-probs and the prompts' log-probs of two runs."""
    each = [
        count(getattr(x, field), getattr(y, field))
        for x, y in zip(a, b, strict=True)
        for field in ("token_ids", "log_probs", "prompt_log_probs")
    ]
    return total(each)


def run(client: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16, **more) -> list[Output]:
    """All prompts in one batch, nothing in the radix cache. more: of Client.generate."""
    client.flush_cache()
    return client.generate(ids, params(len(ids), temperature, new_tokens), **more)


def rescore(client: Client, sequences: Ids) -> list[Output]:
    client.flush_cache()
    return client.generate(sequences, dict(temperature=0, max_new_tokens=1, ignore_eos=True))


def decode_equals_rescoring(client: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16) -> Count:
    """What decoding emits is what prefill says of the same tokens (temperatures that are scored at 1: 1 and greedy)."""
    outs = run(client, ids, temperature, new_tokens)
    again = rescore(client, [list(p) + o.token_ids for p, o in zip(ids, outs, strict=True)])
    each = [count(o.log_probs, r.prompt_log_probs[len(p) - 1 :]) for p, o, r in zip(ids, outs, again, strict=True)]
    return total([*each, *(count(o.prompt_log_probs, r.prompt_log_probs[: len(p) - 1])
                           for p, o, r in zip(ids, outs, again, strict=True))])  # fmt: skip


def decode_equals_fresh_prefill(client: Client, ids: Ids, temperature: float, new_tokens: int = 6) -> Count:
    """Token by token, each drawn by a request of its own from a prefill: the same token, the same log-prob."""
    outs = run(client, ids, temperature, new_tokens)
    each = []
    for i, (prompt, out) in enumerate(zip(ids, outs, strict=True)):
        whole = [list(prompt) + out.token_ids[:n] for n in range(new_tokens)]
        client.flush_cache()
        own = params(1, temperature, 1, 100 + i) * new_tokens
        fresh = client.generate(whole, own)
        each.append(count(out.token_ids, [f.token_ids[0] for f in fresh]))
        each.append(count(out.log_probs, [f.log_probs[0] for f in fresh]))
    return total(each)


def alone_equals_batch(client: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16) -> Count:
    """Each request of a batch gives what it gives alone. Its seed is its own, wherever it stands."""
    together = run(client, ids, temperature, new_tokens)
    own = params(len(ids), temperature, new_tokens)
    alone = []
    for prompt, param in zip(ids, own, strict=True):
        alone += client.generate([prompt], [param])
    # A prompt whose tokens are all scored is computed whole, whatever the radix cache holds.
    assert all(out.cached_tokens == 0 for out in alone)
    return same(alone, together)


def two_runs(client: Client, ids: Ids, temperature: float = 1.0) -> Count:
    return same(run(client, ids, temperature), run(client, ids, temperature))


def hit_equals_miss(client: Client, prefix: Sequence[int], tail: Sequence[int], expected: int, new: int = 12) -> Count:
    """A prompt whose first tokens the radix cache holds. `expected`: how many of them a hit must reuse."""
    whole, own = [*prefix, *tail], params(1, 1.0, new)
    client.flush_cache()
    miss = client.generate([whole], own, first=-1)
    client.flush_cache()
    client.generate([prefix], params(1, 1.0, 1), first=-1)
    hit = client.generate([whole], own, first=-1)
    assert miss[0].cached_tokens == 0 and hit[0].cached_tokens == expected, (miss[0].meta, hit[0].meta)
    return same(miss, hit)


def engines_agree(a: Client, b: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16) -> Count:
    return same(run(a, ids, temperature, new_tokens), run(b, ids, temperature, new_tokens))


def _learner(model, sequences: Ids):
    """Its passes take the longest sequence, whatever else fits beside it."""
    from minitransformer.learner.learner import Learner

    return Learner(model, max_tokens_per_pack=max(1024, *map(len, sequences)))


def learner_equals_engine(model, client: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16) -> Count:
    """The learner, in this process, scores what the engine emitted, at its temperature."""
    outs = run(client, ids, temperature, new_tokens)
    sequences = [list(p) + o.token_ids for p, o in zip(ids, outs, strict=True)]
    learner = _learner(model, sequences)
    scores = learner.score(sequences, [len(p) for p in ids], temperature)
    each = [count(o.log_probs, s.tolist()) for o, s in zip(outs, scores, strict=True)]
    prompt_scores = learner.score(sequences, [1] * len(ids), 1.0)
    each += [
        count(o.prompt_log_probs, s.tolist()[: len(p) - 1]) for p, o, s in zip(ids, outs, prompt_scores, strict=True)
    ]
    return total(each)


def sampler_equals_engine(
    model, client: Client, ids: Ids, temperature: float = 1.0, new_tokens: int = 16, **options
) -> Count:
    """Our own sampler draws the same tokens with the same seeds, and gives them the same log-probs. options: top_p."""
    from minitransformer.sampler.sampler import Sampler
    from minitransformer.sampler.sequence import SamplingParams

    client.flush_cache()
    outs = client.generate(ids, [p | options for p in params(len(ids), temperature, new_tokens)])
    own = [SamplingParams(new_tokens, temperature, seed=100 + i, ignore_eos=True, **options) for i in range(len(ids))]
    done = Sampler(model).generate(ids, own)
    each = [count(o.token_ids, c.token_ids) for o, c in zip(outs, done, strict=True)]
    return total(each + [count(o.log_probs, c.log_probs) for o, c in zip(outs, done, strict=True)])


def experts_agree(model, client: Client, ids: Ids, new_tokens: int = 8) -> Count:
    """Expert ids of every token and layer: SGLang's capture against the learner's trace."""
    import base64

    from minitransformer.alignment.trace import Trace

    outs = run(client, ids, 1.0, new_tokens, return_routed_experts=True)
    sequences = [list(p) + o.token_ids for p, o in zip(ids, outs, strict=True)]
    trace = Trace(["*.expert_ids"])
    _learner(model, sequences).score(sequences, [len(p) for p in ids], 1.0, trace=trace)
    each, config = [], model.config
    for s, (sequence, out) in enumerate(zip(sequences, outs, strict=True)):
        got = torch.frombuffer(bytearray(base64.b64decode(out.meta["routed_experts"])), dtype=torch.int32)
        got = got.view(-1, config.num_layers, config.top_k)
        assert len(got) == len(sequence) - 1, (len(got), len(sequence))
        for i in (i for i, sparse in enumerate(config.sparse_layers) if sparse):
            want = torch.stack([trace.row(f"layers.{i}.expert_ids", s, p) for p in range(len(sequence) - 1)])
            each.append(Count(int((got[:, i] != want).sum()), want.numel()))
    return total(each)


def distribution_agrees(client: Client, prompt: Sequence[int], top: int, new_tokens: int = 6) -> Count:
    """The `top` likeliest tokens at each position and three others, when it was sampled and when it is rescored."""
    asked = dict(top_logprobs_num=top, token_ids_logprob=[[7, 3, 200]])
    client.flush_cache()
    [out] = client.generate([prompt], params(1, 1.0, new_tokens), **asked)
    [again] = client.generate([[*prompt, *out.token_ids]], params(1, 0.0, 1), **asked)
    each = []
    for kind in ("top_logprobs", "token_ids_logprobs"):
        for sampled, scored in zip(
            out.meta[f"output_{kind}"], again.meta[f"input_{kind}"][len(prompt) :], strict=True
        ):  # fmt: skip
            a, b = ({i: log_prob for log_prob, i, _ in found} for found in (sampled, scored))
            assert len(a) == (top if kind == "top_logprobs" else 3), (kind, len(a))
            each += [count(sorted(a), sorted(b)), count([a[i] for i in sorted(a)], [b[i] for i in sorted(b)])]
    own = [{i: x for x, i, _ in found} for found in out.meta["output_top_logprobs"]]
    among = [(x, found[i]) for x, i, found in zip(out.log_probs, out.token_ids, own, strict=True) if i in found]
    return total([*each, count([a for a, _ in among], [b for _, b in among])])


def squeezed(small: Client, large: Client, ids: Ids, new_tokens: int) -> tuple[Count, list[int]]:
    """Many requests in a pool that holds few of them: what they emit, and how often each was retracted."""
    outs = run(small, ids, 1.0, new_tokens, first=-1)
    return same(outs, run(large, ids, 1.0, new_tokens, first=-1)), [o.meta.get("num_retractions", 0) for o in outs]


def update_from_disk(client: Client, checkpoint) -> None:
    client.flush_cache()  # an answer is out before the scheduler has wound its request up, and SGLang ends then
    answer = client.call("/update_weights_from_disk", {"model_path": str(checkpoint)})
    assert answer["success"], answer
