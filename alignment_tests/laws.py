"""The laws, as functions of a model: each raises AssertionError unless it holds to the last bit.

repeats, ignores_the_batch, ignores_the_packing, ignores_the_chunking_and_the_pages, learner_equals_sampler and
recomputes_the_same hold for a whole model here; alignment_tests/ops states them (and `agrees`, `differentiates`) for
each operator, alignment_tests/sampler for schedules, prefix cache and preemption.
"""

import torch
from torch import Tensor

from alignment_tests.bits import assert_bits_equal
from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.sampler.cache import KVCache


def sequences(model, lengths, seed=0) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, model.config.vocab_size, (n,), generator=gen).tolist() for n in lengths]


def logits(model, batch: Batch, cache=None) -> Tensor:
    with torch.no_grad():
        return model(batch, cache)


def repeats(model, lengths=(30, 7)) -> None:
    """Two runs over the same batch give the same bits at every stage."""
    batch = Batch.packed(sequences(model, lengths))
    first, again = Trace(), Trace()
    with torch.no_grad():
        model(batch, trace=first), model(batch, trace=again)
    for stage in first.stages:
        assert_bits_equal(again.rows(stage), first.rows(stage), f"second run, {stage}")


def ignores_the_batch(model, lengths=(5, 1, 40, 33, 2)) -> None:
    """Each sequence alone gives the bits that it has beside the others."""
    ids = sequences(model, lengths)
    whole = logits(model, Batch.packed(ids)).split(list(lengths))
    for sequence, want in zip(ids, whole, strict=True):
        assert_bits_equal(logits(model, Batch.packed([sequence])), want, f"alone, {len(sequence)} tokens")


def ignores_the_packing(model, lengths=(9, 64, 3, 17)) -> None:
    """The order of the sequences in a pack is free."""
    ids = sequences(model, lengths)
    want = logits(model, Batch.packed(ids)).split(list(lengths))
    order = [2, 0, 3, 1]
    got = logits(model, Batch.packed([ids[i] for i in order])).split([lengths[i] for i in order])
    for place, i in enumerate(order):
        assert_bits_equal(got[place], want[i], f"sequence {i} at place {place}")


def run_paged(model, ids: list[int], chunk: int, page_size: int, beside: list[int] = ()) -> Tensor:
    """Logits [len(ids), V] through the paged store, chunk after chunk, with a decoding neighbour in every step."""
    pages = -(-len(ids) // page_size)
    other_pages = -(-max(1, len(beside)) // page_size)
    cache = KVCache(model.config, pages + other_pages + 1, page_size)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(torch.nan)  # a row that is read before it is written shows
    table = list(range(pages, 0, -1))  # descending, so that a page number is never its position
    other = list(range(pages + 1, pages + other_pages + 1))
    out = []
    for step, start in enumerate(range(0, len(ids), chunk)):
        new, starts, tables = [ids[start : start + chunk]], [start], [table]
        if step < len(beside):
            new, starts, tables = [[beside[step]], *new], [step, *starts], [other, *tables]
        got = logits(model, Batch.paged(new, starts, tables, page_size), cache)
        out.append(got[len(got) - len(new[-1]) :])
    return torch.cat(out)


def ignores_the_chunking_and_the_pages(model, length=70) -> None:
    """Prefill in chunks, token by token, over any pages, beside a neighbour: the bits of one packed pass."""
    ids, beside = sequences(model, (length, 20))
    want = logits(model, Batch.packed([ids]))
    for chunk, page_size in ((1, 16), (7, 1), (16, 5), (64, 64), (length, 3)):
        got = run_paged(model, ids, chunk, page_size, beside)
        assert_bits_equal(got, want, f"chunks of {chunk}, pages of {page_size}")


def learner_equals_sampler(model, temperature=1.0) -> None:
    """Every stage and every log-prob of sampled tokens: the learner's packed pass has the sampler's bits."""
    from minitransformer.alignment.compare import compare
    from minitransformer.learner.learner import Learner
    from minitransformer.sampler.sampler import Sampler
    from minitransformer.sampler.sequence import SamplingParams

    prompts = sequences(model, (12, 3, 30, 12))
    prompts[3] = prompts[2][:20] + prompts[3]  # shares a prefix
    params = SamplingParams(max_new_tokens=6, temperature=temperature, seed=11, ignore_eos=True)
    sampled, scored = Trace(), Trace()
    done = Sampler(model, page_size=8, chunk_size=9, max_batch_tokens=24).generate(prompts, params, trace=sampled)
    whole = [c.prompt_ids + c.token_ids for c in done]
    starts = [len(c.prompt_ids) for c in done]
    scores = Learner(model).score(whole, starts, temperature, trace=scored)
    for i, (completion, score) in enumerate(zip(done, scores, strict=True)):
        assert_bits_equal(score, torch.tensor(completion.log_probs, dtype=torch.float32), f"log-probs of request {i}")
    results = compare(sampled, scored)
    assert results and any(r.stage == "log_prob" for r in results), "the trace has no log-probs"
    for result in results:
        assert result.rows > 0 and result.differing == 0, f"{result.stage}: {result}"


def gradients(model, batch: Batch, recompute: bool, seed=3) -> dict[str, Tensor]:
    out = model(batch, recompute=recompute)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(out, params, pull), strict=True))


def recomputes_the_same(model, lengths=(20, 9)) -> None:
    """Gradients with recomputation by layer, and of a second run, have the bits of the first."""
    batch = Batch.packed(sequences(model, lengths))
    want = gradients(model, batch, recompute=False)
    for what, recompute in (("a second run", False), ("recomputed", True)):
        for name, got in gradients(model, batch, recompute).items():
            assert got.dtype == torch.bfloat16
            assert_bits_equal(got, want[name], f"{what}: gradient of {name}")
