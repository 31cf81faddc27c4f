"""Faults of samplers, put back one by one: noise, positions, log-probs, prefix cache, pages, preemption, stopping."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from alignment_tests.mutations import Mutation, patched
from alignment_tests.sampler import (
    test_failures,
    test_graphs,
    test_pages,
    test_prefix_cache,
    test_sampler,
    test_scheduler,
)
from alignment_tests.sampler.fake import FakeModel, Request, assert_alone, play, poisoned, prompts
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.sampler import draw as draw_module
from minitransformer.sampler import graphs
from minitransformer.sampler import sampler as sampler_module
from minitransformer.sampler.pages import ROOT, PagePool
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.scheduler import Chunk, Scheduler
from minitransformer.sampler.sequence import SamplingParams, Sequence
from minitransformer.weights_stamp import WeightsStamp

DRAW, ADMIT, SAMPLE, LOGPROB = sampler_module.draw, Scheduler._admit, draw_module.sample, draw_module.logprob


def crowd() -> None:
    """Requests that differ in everything, few pages, small chunks: each must give what it gives alone."""
    requests = [
        Request(prompt, SamplingParams(9, temperature, top_k, top_p, seed=7, ignore_eos=True), arrival)
        for prompt, temperature, top_k, top_p, arrival in zip(
            prompts(20, [5, 12, 9, 20]),
            (0.6, 1.0, 1.7, 0.0),
            (0, 2, 0, 0),
            (1.0, 1.0, 0.5, 1.0),
            (0, 0, 3, 1),
            strict=True,
        )
    ]
    assert_alone(requests, play(poisoned(Sampler(FakeModel(), page_size=4, num_pages=9, chunk_size=5)), requests))


def noise_by_slot(row_V: torch.Tensor, seed: int, *options) -> int:
    """As an engine does that draws one block of noise for the batch: the seed moves with the row's place."""
    return SAMPLE(row_V, seed + row_V.storage_offset() // row_V.numel(), *options)


def noise_by_count(sequences: list[Sequence], logits_LV: torch.Tensor) -> list:
    """The noise's position counts new tokens, not positions."""
    drawn = iter([len(s.log_probs) for s in sequences])
    with patched(draw_module, "sample", lambda row_V, seed, _, *rest: SAMPLE(row_V, seed, next(drawn), *rest))():
        return DRAW(sequences, logits_LV)


def hit_one_page_too_long(self: Scheduler) -> bool:
    admitted = ADMIT(self)
    if admitted and (s := self.running[-1]).pages and s.remaining > self.pool.page_size:
        s.num_computed += self.pool.page_size
    return admitted


def resumed_after_its_prompt(self: Scheduler) -> bool:
    """The keys and values of a preempted request's prompt are taken for still there."""
    admitted = ADMIT(self)
    if admitted and (s := self.running[-1]).preemptions:
        s.num_computed = s.prompt_len - 1
    return admitted


def resumed_without_its_tokens(self: Scheduler, sequence: Sequence) -> None:
    PREEMPT(self, sequence)
    del sequence.ids[sequence.prompt_len :]


def released_for_everyone(self: PagePool, pages: SequenceOf[int]) -> None:
    for page in reversed(pages):
        self.references[page] = 0
        if page in self._keys:
            self._kept[page] = None
        elif page not in self._free:
            self._free.append(page)


def shared_but_still_kept(self: PagePool, pages: SequenceOf[int]) -> None:
    for page in pages:
        self.references[page] += 1


def published_before_it_is_full(self: Scheduler, chunk: Chunk) -> None:
    sequence, size = chunk.sequence, self.pool.page_size
    sequence.num_computed = chunk.start + chunk.count
    for index in range(min(len(sequence.ids) // size, len(sequence.pages))):
        self.pool.publish(sequence.pages, index, sequence.ids[index * size : (index + 1) * size])


def duplicate_beside_the_published(self: PagePool, pages: list[int], index: int, ids: SequenceOf[int]) -> None:
    key = self._key(pages[index - 1] if index else ROOT, ids)
    if self._published.setdefault(key, pages[index]) == pages[index]:
        self._keys[pages[index]] = key


def gives_way_itself(self: Scheduler, sequence: Sequence, count: int) -> bool:
    missing = self.pool.pages_for(sequence.num_computed + count) - len(sequence.pages)
    if missing > self.pool.available:
        self.preempt(sequence)
        return False
    sequence.pages += [self.pool.allocate() for _ in range(missing)]
    return True


def key_of_a_weak_hash(self: PagePool, parent: int, ids: SequenceOf[int]) -> tuple[int, tuple[int, ...]]:
    return parent, (sum(i // 2 for i in ids),) * len(ids)


def stop_seen_one_token_late(self: Sequence, token_id: int) -> str | None:
    if len(self.ids) > self.prompt_len and self.ids[-1] in self.stop_ids:
        return "stop"
    return "length" if len(self.ids) + 1 >= self.max_len else None


def counted_before_they_are_drawn(self: Sampler, chunks: list[Chunk]) -> Batch:
    """Keys and values count as computed although the step may still fail."""
    batch = BATCH(self, chunks)
    for chunk in chunks:
        self.scheduler.computed(chunk)
    return batch


def all_fail_with_one(sequences: list[Sequence], logits_LV: torch.Tensor) -> list:
    drawn = DRAW(sequences, logits_LV)
    errors = [token for token in drawn if isinstance(token, InputError)]
    return [errors[0]] * len(drawn) if errors else drawn


def stamp_without_the_recipe(self: Sampler) -> WeightsStamp:
    return WeightsStamp(self.model.parameters(), (), (self.model.weights_version,))


def stamp_of_addresses(self: Sampler) -> tuple:
    recipe = getattr(getattr(self.model, "recipe", None), "key", None)
    return recipe, self.model.weights_version, [(p.data_ptr(), p._version) for p in self.model.parameters()]


def removed_with_its_pages(self: Scheduler, sequence: Sequence) -> None:
    (self.running if sequence in self.running else self.waiting).remove(sequence)


def released_first_page_first(self: PagePool, pages: SequenceOf[int]) -> None:
    RELEASE(self, list(reversed(pages)))


PREEMPT, RELEASE, MATCH, BATCH = Scheduler.preempt, PagePool.release, PagePool.match, Sampler._batch
IGNORES, NOISE = "ignores the schedule", "the noise is keyed by (seed, position, token id)"
FAILS = "a failure is one request's own, or nobody's"
PREFIX, PAGES, FAIR = "ignores the prefix cache", "no page is leaked or owned twice", "the earliest request advances"


def prefix_hit(length: int, cached: int) -> Callable[[], None]:
    return lambda: test_prefix_cache.test_prefix_hits_of_no_page_one_page_and_several(length, cached)


def scored(temperature: float) -> Callable[[], None]:
    return lambda: test_sampler.test_log_probs_are_those_of_one_packed_pass(temperature)


MUTATIONS = [
    Mutation("noise keyed by batch slot", NOISE, patched(draw_module, "sample", noise_by_slot), crowd),
    Mutation("noise keyed by the count of new tokens", NOISE, patched(sampler_module, "draw", noise_by_count), crowd),
    Mutation("top-k and top-p forgotten", IGNORES,
             patched(draw_module, "sample", lambda row_V, *options: SAMPLE(row_V, *options[:3])), crowd),
    Mutation("log-prob at temperature 1", "learner == sampler",
             patched(draw_module, "logprob", lambda x, ids, _: LOGPROB(x, ids, 1.0)), scored(0.6)),
    Mutation("log-probs of all rows at the first row's temperature", IGNORES,
             patched(sampler_module.SamplingParams, "log_prob_temperature", 0.6), scored(1.0)),
    Mutation("a token drawn before the prompt is read", IGNORES, patched(Chunk, "completes", True), crowd),
    Mutation("prefix hit one page too long", PREFIX, patched(Scheduler, "_admit", hit_one_page_too_long),
             test_prefix_cache.test_prefixes_part_ways_inside_a_page),
    Mutation("prefix hit covers the last id", PREFIX,
             patched(PagePool, "match", lambda self, ids: MATCH(self, [*ids, 0])),
             test_pages.test_match_leaves_the_last_id_to_be_computed),
    Mutation("prefix hit one page too short", PREFIX,
             patched(PagePool, "match", lambda self, ids: MATCH(self, ids)[:-1]), prefix_hit(9, 8)),
    Mutation("prefix found by a hash alone", PREFIX,
             patched(PagePool, "_key", key_of_a_weak_hash),
             test_prefix_cache.test_prefixes_part_ways_inside_a_page),
    Mutation("page found behind another prefix", PREFIX,
             patched(PagePool, "_key", lambda self, parent, ids: (ROOT, tuple(ids))),
             test_prefix_cache.test_a_page_is_found_only_behind_its_own_prefix),
    Mutation("page published before it is full", PREFIX, patched(Scheduler, "computed", published_before_it_is_full),
             test_prefix_cache.test_a_page_is_found_only_once_it_is_full),
    Mutation("prefix cache outlives the weights", PREFIX, patched(Sampler, "_weights_stamp", lambda self: 0),
             test_prefix_cache.test_new_weights_are_seen_and_old_keys_are_not),
    Mutation("new weights, prefix cache not emptied", PREFIX, patched(PagePool, "forget", lambda self: None),
             test_prefix_cache.test_new_weights_are_seen_and_old_keys_are_not),
    Mutation("preempted request resumed after its prompt", IGNORES,
             patched(Scheduler, "_admit", resumed_after_its_prompt),
             test_sampler.test_preemption_recomputes_the_same_bits),
    Mutation("preempted request resumed without its new tokens", IGNORES,
             patched(Scheduler, "preempt", resumed_without_its_tokens),
             test_sampler.test_preemption_recomputes_the_same_bits),
    Mutation("the request that runs out of pages gives way itself", FAIR,
             patched(Scheduler, "_reserve", gives_way_itself),
             test_scheduler.test_the_earliest_takes_pages_from_the_latest),
    Mutation("page freed while another request reads it", PAGES, patched(PagePool, "release", released_for_everyone),
             test_prefix_cache.test_identical_prompts_at_the_same_time),
    Mutation("shared page may be evicted", PAGES, patched(PagePool, "share", shared_but_still_kept),
             test_pages.test_a_page_in_use_is_not_evicted),
    Mutation("finished request keeps its pages", PAGES, patched(Scheduler, "remove", removed_with_its_pages),
             test_sampler.test_abort_gives_pages_back_and_disturbs_nobody),
    Mutation("same prefix published by two pages", PAGES, patched(PagePool, "publish", duplicate_beside_the_published),
             test_prefix_cache.test_identical_prompts_at_the_same_time),
    Mutation("a page evicted before the page that continues it", PAGES,
             patched(PagePool, "release", released_first_page_first),
             test_pages.test_the_least_recently_used_page_is_evicted_and_children_before_parents),
    Mutation("prefix cache outlives the recipe", PREFIX, patched(Sampler, "_weights_stamp", stamp_without_the_recipe),
             test_prefix_cache.test_another_recipe_is_seen_and_old_keys_are_not),
    Mutation("weights known by their address", PREFIX, patched(Sampler, "_weights_stamp", stamp_of_addresses),
             test_prefix_cache.test_new_weights_are_seen_and_old_keys_are_not),
    Mutation("keys count before the tokens are drawn", FAILS,
             patched(Sampler, "_batch", counted_before_they_are_drawn),
             lambda: test_failures.interrupted_schedule("draw")),
    Mutation("a bad request takes its neighbours along", FAILS, patched(sampler_module, "draw", all_fail_with_one),
             test_failures.one_bad_request),
    Mutation("stop token noticed one token late", "stops where it must",
             patched(Sequence, "finish_reason", stop_seen_one_token_late),
             test_sampler.test_a_request_ends_where_it_must),
    Mutation("padded step: an exchanged page is not seen", PAGES, patched(graphs, "REREAD", 0), test_graphs.crowd),
    Mutation("padded step: padding writes into the pool", PAGES, patched(graphs.Inputs, "_spare", lambda self, i: i),
             test_graphs.crowd),
    Mutation("graphs outlive the storage", PREFIX, patched(WeightsStamp, "same_storage", lambda self, other: True),
             test_graphs.test_only_an_other_storage_or_format_drops_the_graphs),
]  # fmt: skip
