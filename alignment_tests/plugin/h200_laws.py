"""The law tables of h200.py: of one engine, of its long contexts, and of an engine beside the one it must equal."""

import argparse
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache

import torch

from alignment_tests.plugin import laws
from alignment_tests.plugin.h200_engines import VARIANTS, add_row, connect, learners
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.plugins.sglang.checksums import unlike
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.identity import gpu
from minitransformer.plugins.sglang.sync import SyncReport, sync

Laws = dict[str, Callable[[], laws.Count]]
VOCAB = 1024  # ids that every model here has
# Attention folds its keys in segments of 1,024 positions: prompts that end about the first and the second border.
LONG = (*range(1020, 1031), 2047, 2048, 2049, 2050, 3000)
NEW = 12  # tokens a long prompt: from 1,020 on they cross the border


def of_an_engine(c: Client, model: Qwen3MoeForCausalLM, experts: bool) -> Laws:
    ids = laws.prompts((5, 1, 37, 64, 65, 90, 16, 200), VOCAB)
    crowd = laws.prompts([3 + 7 * i % 61 for i in range(32)], VOCAB, 7)
    return {
        "decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids),
        "greedy decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids, 0.0),
        "each token from a fresh prefill, 0.6": lambda: laws.decode_equals_fresh_prefill(c, ids[2:4], 0.6),
        "learner against engine": lambda: laws.learner_equals_engine(model, c, ids),
        "learner against engine, temperature 0.6": lambda: laws.learner_equals_engine(model, c, ids, 0.6),
        "alone against a batch of 2": lambda: laws.alone_equals_batch(c, ids[2:4], 1.0, 8),
        "alone against a batch of 5, padded to 8": lambda: laws.alone_equals_batch(c, ids[:5], 1.0, 8),
        "alone against a batch of 8": lambda: laws.alone_equals_batch(c, ids, 1.0, 8),
        "alone against a batch of 32": lambda: laws.alone_equals_batch(c, crowd, 0.6, 8),
        "two runs": lambda: laws.two_runs(c, ids),
        "radix hit of 100 tokens against none": lambda: laws.hit_equals_miss(c, ids[7][:100], ids[2], 100),
        "our sampler against engine": lambda: laws.sampler_equals_engine(model, c, ids),
        "our sampler against engine, top_p 0.9": lambda: laws.sampler_equals_engine(model, c, ids, 0.8, 8, top_p=0.9),
        "1,024 likeliest tokens against rescoring": lambda: laws.distribution_agrees(c, ids[2], VOCAB),
        **({"expert ids": lambda: laws.experts_agree(model, c, ids)} if experts else {}),
    }


def of_long_contexts(c: Client, model: Qwen3MoeForCausalLM, lengths: list[int], experts: bool) -> Laws:
    """lengths: of the prompts, the last one the longest; its first tokens are the prefixes of the hits."""
    ids, tail, short = laws.prompts(lengths, VOCAB, 21), *laws.prompts((16, 64), VOCAB, 22)
    mixed = [*ids[::4], short, tail, ids[-1]]
    hits = [n for n in (1000, 1023, 1024, 1025, 2047, 2990) if n < lengths[-1]]
    return {
        "long: decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids, 1.0, NEW),
        "long: each token from a fresh prefill, 0.6": lambda: laws.decode_equals_fresh_prefill(c, ids[2:4], 0.6),
        "long: learner against engine": lambda: laws.learner_equals_engine(model, c, ids, 1.0, NEW),
        "long: learner against engine, temperature 0.6": lambda: laws.learner_equals_engine(model, c, ids, 0.6, NEW),
        "long: alone against a batch with short ones": lambda: laws.alone_equals_batch(c, mixed, 1.0, NEW),
        "long: our sampler against engine": lambda: laws.sampler_equals_engine(model, c, ids, 1.0, NEW),
        **{f"long: radix hit of {n} tokens against none": lambda n=n: laws.hit_equals_miss(c, ids[-1][:n], tail, n)
           for n in hits},
        **({"long: expert ids": lambda: laws.experts_agree(model, c, ids[2::9], NEW)} if experts else {}),
    }  # fmt: skip


def of_a_variant(c: Client, variants: list[str], plain: Client, lengths: list[int]) -> Laws:
    """plain: the engine without them."""
    ids, what = laws.prompts((5, 1, 37, 64, 65, 90, 16, 200), VOCAB), "-".join(variants)
    long = laws.prompts(lengths[2::9] if "chunk16" in variants else lengths[::3], VOCAB, 21)  # 16 a step take long
    rows = {
        f"{what} against none": lambda: laws.engines_agree(plain, c, ids, 1.0, 40 if "mixed" in variants else 16),
        f"{what} against none, 0.6": lambda: laws.engines_agree(plain, c, ids, 0.6),
        "decode against rescoring": lambda: laws.decode_equals_rescoring(c, ids),
    }
    if "page16" in variants:
        for n, reused in ((15, 0), (16, 16), (17, 16), (100, 96)):
            rows[f"radix hit of {n} tokens, {reused} reused"] = lambda n=n, reused=reused: laws.hit_equals_miss(
                c, ids[7][:n], ids[2], reused)  # fmt: skip
    if "small" in variants:
        rows["retraction against none"] = lambda: retracted(c, plain, [20 + i for i in range(24)], 32)
    if "tight" in variants:
        rows["retraction against none"] = lambda: retracted(c, plain, [32 + i % 24 for i in range(68)], 32)
    if long:
        rows[f"long: {what} against none"] = lambda: laws.engines_agree(plain, c, long, 1.0, NEW)
        rows["long: decode against rescoring"] = lambda: laws.decode_equals_rescoring(c, long[:3], 1.0, NEW)
    if long and "page16" in variants:
        prefix = laws.prompts([lengths[-1]], VOCAB, 23)[0]
        for n in (n for n in (1000, 1023, 1024, 1030, 2060) if n < len(prefix)):
            rows[f"long: radix hit of {n} tokens, {n // 16 * 16} reused"] = lambda n=n: laws.hit_equals_miss(
                c, prefix[:n], ids[2], n // 16 * 16)  # fmt: skip
    if long and "tight" in variants:
        rows["long: retraction against none"] = lambda: retracted(
            c, plain, [1016, 1005, *range(30, 48)], 40, 2)  # fmt: skip
    return rows


def retracted(c: Client, plain: Client, lengths: list[int], new_tokens: int, first: int | None = None) -> laws.Count:
    """One of the first requests must have been turned out; which one is, is SGLang's choice and a matter of timing."""
    counts = []
    for _ in range(3):
        found, times = laws.squeezed(c, plain, laws.prompts(lengths, VOCAB, seed=5), new_tokens)
        counts.append(found)
        if any(times[:first]):
            return laws.total(counts)
    raise AssertionError(f"the pool was never short for them: the law shows nothing: {times}")


@cache
def _learner_of(size: str, kind: str, load: Callable[[str], Qwen3MoeForCausalLM]) -> Qwen3MoeForCausalLM:
    model = load(size)
    model.set_recipe("bf16" if kind == "bf16" else "nvfp4_per_token")
    if kind == "packed":
        keep_packed(model)
    return model


@torch.no_grad()
def keep_packed(model: Qwen3MoeForCausalLM) -> None:
    """Of its experts what a packed engine holds, layer by layer: 48 layers leave no room for the BF16 weights."""
    for i, mlp in ((i, layer.mlp) for i, layer in enumerate(model.layers)):
        gate_up, down = (mlp.experts.quantised(name, getattr(mlp, name).weight) for name in ("gate_up", "down"))
        outer = gate_up.outer.view(-1, 1).expand(-1, 2).contiguous()
        mlp.set_quantised(model.recipe.for_layer(i), Nvfp4(gate_up.codes, gate_up.scales, outer), down)


def same_gpu(model: Qwen3MoeForCausalLM, c: Client) -> bool:
    return gpu(model.device) == c.identity().get("gpu")


def send(args: argparse.Namespace, model: Qwen3MoeForCausalLM, c: Client, route: str | None) -> SyncReport:
    return sync(Learner(model), c, route, backend=args.backend if route == "distributed" else None)


def tables(args: argparse.Namespace) -> int:
    """The law tables of all engines. -> how many elements differ, and one for each law that could not be looked at."""

    def load(size: str) -> Qwen3MoeForCausalLM:
        return learners(args, size)

    wrong = 0
    for name in args.names:
        try:
            wrong += table(args, name, load)
        except Exception as error:  # one engine that fails must not take the others along
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            wrong += 1
    return wrong


def table(args: argparse.Namespace, name: str, load: Callable[[str], Qwen3MoeForCausalLM]) -> int:
    size, kind, *rest = name.split("-")
    c, _ = connect(args, name)
    variants = [word for word in rest if word in VARIANTS]
    if "bare" in rest:
        bring_weights(args, name, c, _learner_of(size, kind, load))
    if variants:
        plain = "-".join(word for word in name.split("-") if word not in variants)
        rows = of_a_variant(c, variants, of_the_same_weights(c, args, plain), args.long)
    else:
        model = _learner_of(size, kind, load)
        assert c.identity()["fingerprint"] == model.spec.fingerprint()
        rows = of_an_engine(c, model, args.experts)
        rows |= of_long_contexts(c, model, args.long, args.experts) if args.long else {}
    wrong, before = 0, prefills(c)
    for what, law in ((what, law) for what, law in rows.items() if fnmatchcase(what, args.only)):
        began = time.monotonic()
        try:
            found = law()
        except Exception as error:
            print(f"{name}: {what}: {type(error).__name__}: {error}", flush=True)
            wrong += 1
            continue
        took = time.monotonic() - began
        wrong += found.differing
        print(f"{name}: {what:<47} {found}  {took:.1f} s", flush=True)
        add_row(args, engine=name, law=what, differing=found.differing, of=found.of, seconds=round(took, 1))
    steps = connect(args, name)[1]
    live = next(line for line in steps.splitlines() if "is live" in line)
    graphs = steps.count("cuda graph: True")
    replayed = prefills(c) - before
    print(f"{name}: decode steps from graphs {graphs}, prefills {replayed}; {live}", flush=True)
    add_row(
        args, engine=name, decode_steps_from_graphs=graphs, prefills_from_graphs=replayed,
        live=live[live.index("miniTransformer") :],
    )  # fmt: skip
    return wrong + shows_nothing(args, name, replayed)


def prefills(c: Client) -> int:
    """How many prefills an engine has run as graphs so far."""
    return c.identity()["prefills_from_graphs"] or 0


def shows_nothing(args: argparse.Namespace, name: str, replayed: int) -> bool:
    """Whether the laws of an engine with graphs were of prefills without: what held says nothing of the graphs."""
    nothing = not replayed and not args.cpu and not {"graphs", "default"}.isdisjoint(name.split("-"))
    if nothing:
        print(f"{name}: no prefill came from a graph: the laws show nothing of them", flush=True)
    return nothing


def of_the_same_weights(c: Client, args: argparse.Namespace, plain: str) -> Client:
    """The engine that c must equal; it may not have got its weights yet."""
    other = connect(args, plain)[0]
    if wrong := unlike(c.checksums(), other.checksums()):
        raise InputError(f"{plain} holds other weights in {len(wrong)} tensors; run its own laws first")
    return other


def bring_weights(args: argparse.Namespace, name: str, c: Client, model: Qwen3MoeForCausalLM) -> None:
    r = send(args, model, c, args.routes[0])
    parts = ", ".join(f"{part} {x:.2f}" for part, x in r.seconds.items())
    print(f"{name}: {r.bytes / 2**30:.1f} GiB by {r.route}; seconds {parts}; {r.verdict()}", flush=True)
    found = dict(route=r.route, bytes=r.bytes, seconds=r.seconds, verdict=r.verdict(), same_gpu=same_gpu(model, c))
    add_row(args, engine=name, **found)
    assert r.equal
