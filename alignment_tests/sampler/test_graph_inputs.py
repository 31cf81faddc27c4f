"""What a decode graph reads: ids, positions and page tables, of which only what is new is written."""

import random
from types import SimpleNamespace

import torch

from minitransformer.sampler.graphs import Inputs

ROWS, PAGES = 4, 8


def cache() -> SimpleNamespace:
    return SimpleNamespace(k=[torch.zeros(1)], num_pages=100, page_size=4, spare_pages=3)


def sequence(rng: random.Random) -> SimpleNamespace:
    pages = [rng.randrange(100) for _ in range(rng.randrange(1, 4))]
    return SimpleNamespace(ids=[rng.randrange(50)], num_computed=rng.randrange(9), pages=pages)


def wrong(inputs: Inputs, sequences: list) -> list[int]:
    ids, positions = inputs.on[:ROWS].tolist(), inputs.on[ROWS : 2 * ROWS].tolist()
    tables = inputs.on[2 * ROWS :].view(ROWS, PAGES).tolist()
    found = []
    for row in range(ROWS):
        spare = SimpleNamespace(ids=[0], num_computed=0, pages=[100 + (row - len(sequences)) % 3])
        s = sequences[row] if row < len(sequences) else spare
        if (ids[row], positions[row], tables[row][: len(s.pages)]) != (s.ids[-1], s.num_computed, s.pages):
            found.append(row)
    return found


def test_a_buffer_filled_step_by_step_holds_what_the_requests_hold():
    """They come and go, tables grow, the last page is exchanged before that, a preempted one has a new list."""
    rng, inputs, sequences = random.Random(0), Inputs(ROWS, PAGES, cache()), []
    for _ in range(2000):
        if rng.random() < 0.2 and len(sequences) < ROWS:
            sequences.append(sequence(rng))
        if rng.random() < 0.1 and sequences:
            sequences.pop(rng.randrange(len(sequences)))
        for s in sequences:
            s.ids.append(rng.randrange(50))
            s.num_computed += 1
            if rng.random() < 0.2:
                s.pages[-1] = rng.randrange(100)
            if rng.random() < 0.3 and len(s.pages) < PAGES:
                s.pages.append(rng.randrange(100))
            if rng.random() < 0.05:
                s.pages = [rng.randrange(100)]
        inputs.fill(sequences)
        assert wrong(inputs, sequences) == []
