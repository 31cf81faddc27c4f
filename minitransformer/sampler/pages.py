"""Who owns which page of the key/value store, and which full pages can be found again by their content.

A page is `page_size` consecutive rows of the store. Each page is in exactly one state:

    free      nobody's, content worthless
    owned     in the page tables of `references` >= 1 sequences; shared only if full and published
    kept      nobody's, but published: found again by a later prompt until evicted, least recently used first

The prefix cache is a tree. A full page is published under (parent page, its token ids): the parent stands for the
whole prefix before it, so the ids on the path from the root are the ids of the prefix. A lookup hashes this key and
then compares the ids themselves; two prefixes with equal hashes cannot be taken for one another. There is one page
per prefix: who computes a page that is already published takes the published one and frees its own (same bits).

The keys of the tree hold no weights: `forget` empties it, and must be called when the weights change.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = -1

Key = tuple[int, tuple[int, ...]]


class PagePool:
    """num_pages pages of page_size rows each, and the tree of published ones."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._published: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # the inverse of _published

    @property
    def available(self) -> int:
        """Pages that can be allocated now, evictions included."""
        return len(self._free) + len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """A page for one owner, its rows undefined. The caller has looked at `available`."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._published[self._keys.pop(page)]
        self.references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for published pages."""
        for page in pages:
            self.references[page] += 1
            self._kept.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One owner less. Last page first: a page is then never evicted before the pages that continue it."""
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] > 0:
                continue
            if page in self._keys:
                self._kept[page] = None
            else:
                self._free.append(page)

    def discard(self, pages: Sequence[int]) -> None:
        """As release, for a request that failed: what only it held is not found again, for its rows may be NaN.

        A page that others continue or hold stays; who reads it has the same ids, so the same rows, and fails alike.
        """
        for page in reversed(pages):
            continued = any(parent == page for parent, _ in self._keys.values())
            if page in self._keys and self.references[page] == 1 and not continued:
                del self._published[self._keys.pop(page)]
            self.release([page])

    def match(self, ids: Sequence[int]) -> list[int]:
        """The published pages that hold the longest prefix of ids, in order.

        The last id is never covered: its logits are wanted, so it has to be computed.
        """
        pages: list[int] = []
        if not self.prefix_cache:
            return pages
        for begin in range(0, (len(ids) - 1) // self.page_size * self.page_size, self.page_size):
            page = self._published.get(self._key(pages[-1] if pages else ROOT, ids[begin : begin + self.page_size]))
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, pages: list[int], index: int, ids: Sequence[int]) -> None:
        """pages[index] of a page table is now full and holds the keys and values of these page_size ids.

        Pages before it are published already. If the same prefix is published elsewhere, pages[index] is replaced.
        """
        if not self.prefix_cache:
            return
        own, key = pages[index], self._key(pages[index - 1] if index else ROOT, ids)
        page = self._published.setdefault(key, own)
        if page == own:
            self._keys[own] = key
        else:
            self.share([page])
            self.release([own])
            pages[index] = page

    def forget(self) -> None:
        """Empties the prefix cache. For a moment when no page is owned: a new prefix can't hang from an old one."""
        assert not any(self.references), "forget() while sequences own pages"
        self._free.extend(self._kept)
        self._kept.clear()
        self._published.clear()
        self._keys.clear()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Asserts that nothing is leaked or owned twice, given the page tables of all sequences that hold pages."""
        owners = [0] * self.num_pages
        for table in tables:
            assert len(set(table)) == len(table), f"a page stands twice in one page table: {table}"
            for page in table:
                owners[page] += 1
        assert owners == self.references, f"references {self.references}, owners {owners}"
        idle = self._free + list(self._kept)
        owned = [page for page in range(self.num_pages) if owners[page]]
        assert sorted(idle + owned) == list(range(self.num_pages)), "a page is leaked, or both idle and owned"
        assert all(self._published[key] == page for page, key in self._keys.items())
        assert len(self._published) == len(self._keys)
        assert all(owners[page] == 1 or page in self._keys for page in owned), "an unpublished page has two owners"
        assert all(page in self._keys for page in self._kept), "an unpublished page is kept"
        order = {page: i for i, page in enumerate(self._kept)}
        for page, (parent, ids) in self._keys.items():
            assert len(ids) == self.page_size
            assert parent == ROOT or parent in self._keys, f"page {page} was published after {parent}, which is gone"
            assert page in order or parent == ROOT or owners[parent], f"page {page} is owned, the page before it is not"
            assert order.get(parent, self.num_pages) > order.get(page, -1), "a page would be evicted before its child"

    def _key(self, parent: int, ids: Sequence[int]) -> Key:
        return (parent, tuple(ids))
