"""The protocol of pingpong.py's ring, acted out on the CPU: no step is read before it is loaded, none overwritten.

Nobody waits for ever, in any order of events. The barriers are the hardware's: a wait names a parity, not a phase.
"""

import random
from collections.abc import Iterator

import pytest

from alignment_tests.mutations import Mutation, assert_caught


class Barrier:
    """One arrival ends a phase; a wait passes if the phase before the current one has the parity that it names."""

    def __init__(self):
        self.phase = 0

    def arrive(self) -> None:
        self.phase += 1

    def passes(self, parity: int) -> bool:
        return (self.phase - 1) & 1 == parity


class Ring:
    """`tiles` tiles of `steps` steps through `stages` slots: a loading warp, a copy engine, two groups."""

    def __init__(self, tiles: int, steps: int, stages: int, turns: bool, seed: int):
        self.tiles, self.steps, self.stages, self.in_turn = tiles, steps, stages, turns
        self.random = random.Random(seed)
        self.full, self.empty = ([Barrier() for _ in range(stages)] for _ in range(2))
        self.turns = [Barrier(), Barrier()]
        self.slots: list[int | None] = [None] * stages
        self.on_the_way: list[int] = []

    def produce(self) -> Iterator[None]:
        for step in range(self.tiles * self.steps):
            slot = step % self.stages
            while not self.empty[slot].passes((step // self.stages & 1) ^ 1):
                yield
            assert self.slots[slot] is None, f"step {step} overwrites step {self.slots[slot]}"
            self.on_the_way.append(step)
            yield

    def release(self, step: int) -> None:
        self.slots[step % self.stages] = None
        self.empty[step % self.stages].arrive()

    def consume(self, which: int) -> Iterator[None]:
        for round_, number in enumerate(range(which, self.tiles, 2)):
            while self.in_turn and not self.turns[which].passes((round_ & 1) ^ (1 - which)):
                yield
            for step in range(number * self.steps, (number + 1) * self.steps):
                while not self.full[step % self.stages].passes(step // self.stages & 1):
                    yield
                assert self.slots[step % self.stages] == step, f"group {which} reads step {step} too early"
                yield
                if step > number * self.steps:
                    self.release(step - 1)
            self.turns[1 - which].arrive()
            yield
            self.release((number + 1) * self.steps - 1)
            yield from [None] * self.random.randrange(5)  # the tile is written

    def run(self) -> None:
        agents = [self.produce(), self.consume(0), self.consume(1)]
        for _ in range(100_000):
            chosen = self.random.randrange(len(agents) + 1)
            if chosen == len(agents):
                if self.on_the_way:
                    step = self.on_the_way.pop(self.random.randrange(len(self.on_the_way)))
                    self.slots[step % self.stages] = step
                    self.full[step % self.stages].arrive()
            elif next(agents[chosen], agents) is agents:
                agents.pop(chosen)
                if not agents:
                    return
        raise AssertionError("someone waits for ever")


def acts(turns: bool, seeds: range) -> None:
    for seed in seeds:
        chosen = random.Random(seed)
        Ring(chosen.randrange(1, 9), chosen.randrange(1, 14), chosen.choice((2, 3, 5, 6, 8)), turns, seed).run()


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_every_order_of_events(first):
    acts(True, range(first, first + 100))


def test_groups_that_do_not_take_turns_are_caught():
    class Turns:
        taken = True

    class Unordered:
        def __enter__(self):
            Turns.taken = False

        def __exit__(self, *error):
            Turns.taken = True

    law = "a step is read after it was loaded"
    assert_caught(Mutation("no turns", law, Unordered, lambda: acts(Turns.taken, range(40))))
