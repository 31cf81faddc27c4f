"""Which tokens the next forward pass computes, and who gives up pages for them.

One rule: earlier requests go first. The running requests are always the earliest ones that have not finished, each
step serves them in order of arrival, and pages are taken from the latest. So the earliest request advances in every
step, and every request finishes. Nothing here can move a bit of any output: only when it is computed.
"""

from bisect import insort
from dataclasses import dataclass

from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of one sequence from position `start`; its page table covers them."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """The chunk reaches the last known token, so its last row gives the next one."""
        return self.start + self.count == len(self.sequence.ids)


class Scheduler:
    """waiting and running requests, each in order of arrival; only running ones hold pages."""

    def __init__(self, pool: PagePool, max_batch_tokens: int, chunk_size: int, max_sequences: int) -> None:
        self.pool = pool
        self.max_batch_tokens, self.chunk_size, self.max_sequences = max_batch_tokens, chunk_size, max_sequences
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, at most max_batch_tokens tokens; empty only when no request is left.

        A prompt's chunk and another request's single decoded token are the same thing: the next `remaining` tokens.
        """
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        turn = 0
        while budget > 0:
            if turn == len(self.running) and not self._admit():
                break
            sequence = self.running[turn]
            count = min(sequence.remaining, self.chunk_size, budget)
            # A chunk of no tokens would draw from the logits of the request before it.
            assert count > 0, f"request {sequence.request_id} has no token left to compute"
            if not self._reserve(sequence, count):
                break
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count
            turn += 1
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in the store: pages it filled can serve other prompts from now on."""
        sequence, size = chunk.sequence, self.pool.page_size
        sequence.num_computed = chunk.start + chunk.count
        for index in range(chunk.start // size, sequence.num_computed // size):
            self.pool.publish(sequence.pages, index, sequence.ids[index * size : (index + 1) * size])

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted request out and gives its pages back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._give_back(sequence)

    def fail(self, sequence: Sequence) -> None:
        """Takes a request out whose rows may be wrong: the prefix cache does not keep them."""
        self.running.remove(sequence)
        self.pool.discard(sequence.pages)
        sequence.pages, sequence.num_computed = [], 0

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting with all its tokens and none of its pages; it will be computed again from position 0."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=lambda s: s.request_id)

    def check(self) -> None:
        """Asserts the invariants of requests and pages; tests call it after every step."""
        order = [s.request_id for s in self.running + self.waiting]
        assert order == sorted(set(order)), f"requests out of order of arrival: {order}"
        assert not any(s.pages or s.num_computed for s in self.waiting), "a waiting request holds pages"
        self.pool.check([s.pages for s in self.running])
        for s in self.running:
            assert 0 <= s.num_computed < len(s.ids)
            assert len(s.pages) >= self.pool.pages_for(s.num_computed), "computed tokens without a page"

    def _admit(self) -> bool:
        """Moves the earliest waiting request to running if all its known tokens fit: no prefill starts in vain."""
        if not self.waiting or len(self.running) == self.max_sequences:
            return False
        sequence = self.waiting[0]
        hit = self.pool.match(sequence.ids)
        self.pool.share(hit)
        if self.pool.pages_for(len(sequence.ids)) - len(hit) > self.pool.available:
            self.pool.release(hit)
            return False
        sequence.pages, sequence.num_computed = hit, len(hit) * self.pool.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        self.running.append(self.waiting.pop(0))
        return True

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Pages for the next count tokens, taken from the latest requests if need be; False if from itself."""
        missing = self.pool.pages_for(sequence.num_computed + count) - len(sequence.pages)
        while missing > self.pool.available:
            # Later requests have had no turn in this step yet, so no chunk of this step loses its pages.
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += [self.pool.allocate() for _ in range(missing)]
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_computed = [], 0
