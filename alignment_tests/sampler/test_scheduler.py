"""The scheduler: earlier requests first, every token once, never more than the budget, and no one starves."""

from hypothesis import given
from hypothesis import strategies as st

from alignment_tests.sampler.fake import FakeModel
from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.scheduler import Scheduler
from minitransformer.sampler.sequence import SamplingParams, Sequence


def sequence(request_id: int, prompt_len: int, max_new_tokens: int = 4) -> Sequence:
    ids = [request_id] * prompt_len
    return Sequence(request_id, prompt_len, ids, SamplingParams(), frozenset(), prompt_len + max_new_tokens)


def advance(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One step without a model: (request, start, count) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.computed(chunk)
    for chunk in chunks:
        if chunk.sequence.remaining == 0:
            finished = chunk.sequence.finish_reason(0)
            chunk.sequence.append(0, 0.0)
            if finished:
                scheduler.remove(chunk.sequence)
    scheduler.check()
    return [(c.sequence.request_id, c.start, c.count) for c in chunks]


def test_prefill_chunks_and_decode_tokens_share_a_step() -> None:
    scheduler = Scheduler(PagePool(64, 4), max_batch_tokens=10, chunk_size=6, max_sequences=8)
    for n, length in enumerate((2, 14, 3)):
        scheduler.add(sequence(n, length))
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [
        [(0, 0, 2), (1, 0, 6), (2, 0, 2)],
        [(0, 2, 1), (1, 6, 6), (2, 2, 1)],
        [(0, 3, 1), (1, 12, 2), (2, 3, 1)],
        [(0, 4, 1), (1, 14, 1), (2, 4, 1)],
    ]


def test_the_latest_gives_way_and_resumes_from_all_its_tokens() -> None:
    scheduler = Scheduler(PagePool(5, 2, prefix_cache=False), max_batch_tokens=64, chunk_size=64, max_sequences=8)
    for n in range(2):
        scheduler.add(sequence(n, 4, max_new_tokens=6))
    assert advance(scheduler) == [(0, 0, 4), (1, 0, 4)]
    assert advance(scheduler) == [(0, 4, 1)]  # one page was left, and the earlier request has it
    assert scheduler.waiting[0].preemptions == 1 and len(scheduler.waiting[0].ids) == 5
    while scheduler.running:
        before = advance(scheduler)
    assert before == [(0, 8, 1)]
    assert advance(scheduler) == [(1, 0, 5)]


def test_the_earliest_takes_pages_from_the_latest() -> None:
    scheduler = Scheduler(PagePool(4, 2), max_batch_tokens=64, chunk_size=64, max_sequences=8)
    for n in range(2):
        scheduler.add(sequence(n, 4))
    assert advance(scheduler) == [(0, 0, 4), (1, 0, 4)]
    assert advance(scheduler) == [(0, 4, 1)]


def test_no_request_overtakes_another() -> None:
    """Request 1 needs more pages than are left; request 2 would fit, but waits its turn."""
    scheduler = Scheduler(PagePool(8, 4), max_batch_tokens=64, chunk_size=64, max_sequences=8)
    for n, length in enumerate((5, 28, 1)):
        scheduler.add(sequence(n, length))
    assert advance(scheduler) == [(0, 0, 5)]


def test_at_most_max_sequences_run() -> None:
    scheduler = Scheduler(PagePool(8, 4), max_batch_tokens=64, chunk_size=64, max_sequences=2)
    for n in range(3):
        scheduler.add(sequence(n, 1, max_new_tokens=1 + n))
    assert [advance(scheduler) for _ in range(2)] == [[(0, 0, 1), (1, 0, 1)], [(1, 1, 1), (2, 0, 1)]]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_the_earliest_advances_in_every_step(shapes, page_size, spare, budget, chunk_size, max_sequences) -> None:
    pool = PagePool(max(-(-(n + m) // page_size) for n, m in shapes) + spare, page_size)
    scheduler = Scheduler(pool, budget, chunk_size, max_sequences)
    for n, (length, new) in enumerate(shapes):
        scheduler.add(sequence(n, length, new))
    while scheduler.running or scheduler.waiting:
        first = (scheduler.running + scheduler.waiting)[0]
        steps = advance(scheduler)
        assert steps[0][0] == first.request_id
        assert 0 < sum(count for _, _, count in steps) <= budget
        assert all(count <= chunk_size for _, _, count in steps) and len(steps) <= max_sequences
    assert pool.available == pool.num_pages


def test_a_step_of_unfinished_prompts_draws_nothing() -> None:
    sampler = Sampler(FakeModel(), chunk_size=4)
    sampler.add([5] * 9)
    assert [len(sampler.step()) for _ in range(3)] == [0, 0, 1]
