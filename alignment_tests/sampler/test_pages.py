"""Pages: nothing leaked, nothing owned twice, and a prefix found if and only if its ids are there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.sampler.cache import DEFAULT_CACHE_BYTES, KVCache, default_num_pages
from minitransformer.sampler.pages import PagePool

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens: prefixes meet and part often


def filled(pool: PagePool, ids: list[int]) -> list[int]:
    """The page table of a sequence that has computed all its ids, prefix hits first."""
    pages = pool.match(ids)
    pool.share(pages)
    start = len(pages)
    pages += [pool.allocate() for _ in range(pool.pages_for(len(ids)) - start)]
    for index in range(start, len(ids) // pool.page_size):
        pool.publish(pages, index, ids[index * pool.page_size : (index + 1) * pool.page_size])
    return pages


class Worthless(int):
    """A token id whose hash says nothing."""

    def __hash__(self) -> int:
        return 0


def test_a_failed_requests_page_stays_if_another_page_continues_it() -> None:
    """Else the page that continues it would be found again behind whatever is computed there next."""
    pool = PagePool(4, 2)
    whole = filled(pool, [1, 2, 3, 4])
    pool.release(whole)
    failed = pool.match([1, 2, 9])
    pool.share(failed)
    pool.discard(failed)
    pool.check([])
    assert failed == whole[:1] and pool.match([1, 2, 3, 4, 5]) == whole


@given(st.lists(st.tuples(st.booleans(), IDS, st.integers(0, 20)), max_size=30), st.integers(1, 3), st.booleans())
def test_any_history_keeps_the_books(history, page_size: int, collide: bool) -> None:
    """The content of each page is kept beside the pool: a match must cover ids that are really there."""
    pool = PagePool(16, page_size)
    tables: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}  # page -> the whole prefix that it ends
    for come, ids, which in history:
        ids = [Worthless(i) for i in ids] if collide else ids
        if come and pool.pages_for(len(ids)) <= pool.available:
            for index, page in enumerate(pool.match(ids)):
                assert content[page] == tuple(ids[: (index + 1) * page_size])
            tables.append(filled(pool, ids))
            content |= {p: tuple(ids[: (i + 1) * page_size]) for i, p in enumerate(tables[-1])}
        elif tables:
            pool.release(tables.pop(which % len(tables)))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    pool.check([])
    pool.forget()
    pool.check([])
    assert pool.available == 16 and pool.match([0, 1, 0, 1]) == []


def test_match_leaves_the_last_id_to_be_computed() -> None:
    pool = PagePool(8, 4)
    pages = filled(pool, list(range(12)))
    assert [len(pool.match(list(range(n)))) for n in (1, 4, 5, 8, 9, 12, 13)] == [0, 0, 1, 1, 2, 2, 3]
    assert pool.match(list(range(13))) == pages
    assert pool.match([0, 1, 2, 9, 4, 5]) == [] and pool.match([4, 5, 6, 7, 8]) == []


def test_the_least_recently_used_page_is_evicted_and_children_before_parents() -> None:
    pool = PagePool(4, 2)
    for ids in ([1, 1, 2, 2], [3, 3, 4, 4]):
        pool.release(filled(pool, ids))
    pool.release(filled(pool, [1, 1, 2, 2]))  # used again: now the newer one
    pool.allocate()
    assert len(pool.match([3, 3, 4, 4, 0])) == 1  # its second page went, its first is still of use
    assert len(pool.match([1, 1, 2, 2, 0])) == 2
    pool.allocate()
    assert len(pool.match([3, 3, 4, 4, 0])) == 0
    assert len(pool.match([1, 1, 2, 2, 0])) == 2


def test_a_page_in_use_is_not_evicted() -> None:
    pool = PagePool(3, 2)
    pool.release(filled(pool, [1, 1, 2, 2]))
    held = filled(pool, [1, 1, 5])
    assert pool.available == 1
    assert pool.allocate() not in held


def test_the_same_content_is_kept_once() -> None:
    pool = PagePool(8, 2)
    first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    for index, ids in enumerate(([1, 2], [3, 4])):
        pool.publish(first, index, ids)
        pool.publish(second, index, ids)
    assert first == second and pool.references[first[0]] == 2
    pool.check([first, second])
    assert pool.available == 6


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(8, 2, prefix_cache=False)
    table = filled(pool, [1, 1, 2, 2])
    assert pool.match([1, 1, 2, 2, 3]) == []
    pool.check([table])


@pytest.mark.parametrize(
    "table", [[0, 0], [0], [0, 1, 2]], ids=["a page twice", "an owner less", "a page that is not allocated"]
)
def test_check_notices_a_table_that_is_wrong(table: list[int]) -> None:
    pool = PagePool(4, 2)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    with pytest.raises(AssertionError):
        pool.check([table])


def test_the_store_holds_a_context_and_stays_within_its_bytes() -> None:
    class Shape:
        num_layers, num_kv_heads, head_dim = 30, 3, 64

    row = KVCache.bytes_per_row(Shape)
    assert row == 30 * 2 * 3 * 64 * 2
    assert default_num_pages(Shape, 16, 2048, 1) == 128
    assert default_num_pages(Shape, 16, 2048, 64) == DEFAULT_CACHE_BYTES // (16 * row)
    assert default_num_pages(Shape, 16, 1 << 20, 64) == (1 << 20) // 16
    cache = KVCache(Shape, 5, 3)
    assert len(cache.k) == len(cache.v) == 30 and cache.k[0].shape == (15, 3, 64)
