"""What a graph of prefills reads (plugins/sglang/prefill_graphs.py) is the batch, padded: its rows keep their bits.

Without a GPU nothing is captured: the model runs on the sequences that the graph's kernels would find in its tensors.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its package chooses attention's kernel")

import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.plugin import engines, laws
from minitransformer.batch import Batch
from minitransformer.ops.attention import KEY_TILE
from minitransformer.plugins.sglang import prefill_graphs
from minitransformer.plugins.sglang.prefill_graphs import KEYS, REQUESTS, SPARE_ROW, PrefillGraphs
from minitransformer.sampler.cache import KVCache

PAGE, PAGES = 16, 80
OURS = PAGE * 61  # from this row on padding's are written here, and no batch's
SIZES = (128, 256)


class Eager(PrefillGraphs):
    """Replays run the model on the host's reading of the graph's tensors."""

    def _capture(self, size):
        rows = torch.empty(size, self.model.config.hidden_size, dtype=torch.bfloat16)
        replay = lambda: rows.copy_(self.model.hidden(self.read(size), self.pool, self.note))  # noqa: E731
        self.graphs[size] = SimpleNamespace(replay=replay), rows

    def read(self, size: int) -> Batch:
        batch, numbers = self.batch(size), self.numbers.tolist()
        # Kernels see no more of the host's numbers than how much room keys need, and that their rows are a table's.
        assert sum(-(-n // KEY_TILE) for n in batch.kv_lens) * KEY_TILE == KEYS, "room for keys differs"
        assert batch.__dict__["_contiguous"] is False, "the rows' order differs"
        bounds, starts = numbers[: REQUESTS + 2], numbers[REQUESTS + 2 :]
        there = [s for s, (a, b) in enumerate(pairwise(bounds)) if a < b]
        ends = [int(batch.positions_T[bounds[s + 1] - 1]) + 1 for s in there]
        spans = [range(starts[s], starts[s] + -(-n // KEY_TILE) * KEY_TILE) for s, n in zip(there, ends, strict=True)]
        assert all(a.stop <= b.start for a, b in pairwise(spans)) and spans[-1].stop <= KEYS, spans
        rows_SL = batch.key_rows_SL[there, : max(ends)].clone()
        for row_L, n in zip(rows_SL, ends, strict=True):
            row_L[n:] = -1
        tokens, padding = bounds[-2], torch.arange(size - bounds[-2])
        assert batch.store_rows_T[tokens:].eq(SPARE_ROW).all(), "padding's rows differ"
        assert batch.key_rows_SL[-1].eq(SPARE_ROW).all(), "padding's keys differ"
        assert batch.positions_T[tokens:].equal(padding), "padding's positions differ"
        assert batch.ids_T[tokens:].equal(batch.ids_T[padding % tokens]), "padding's ids differ"
        spare = batch.store_rows_T.clone()  # the CPU takes no row for two tokens
        spare[tokens:] = OURS + padding
        return Batch(
            batch.ids_T, batch.positions_T, (0, *[bounds[s + 1] for s in there]), tuple(ends), rows_SL, spare, None,
            tuple(range(len(there))), batch.num_store_rows,
        )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return engines.tiny(max_positions=400)


def caches(model) -> list[KVCache]:
    """Two of the same values, of which row 0 is nobody's."""
    made = [KVCache(model.config, PAGES, PAGE) for _ in range(2)]
    for i, tensors in enumerate(zip(made[0].k + made[0].v, made[1].k + made[1].v, strict=True)):
        values = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(i)).bfloat16()
        for tensor in tensors:
            tensor.copy_(values)
    return made


def batch_of(new: list[int], starts: list[int]) -> Batch:
    """Pages in random order, from page 1 on, below those of padding."""
    order = (1 + torch.randperm(60, generator=torch.Generator().manual_seed(sum(new)))).tolist()
    tables = []
    for n, start in zip(new, starts, strict=True):
        count = -(-(n + start) // PAGE)
        tables.append(order[:count])
        order = order[count:]
    return Batch.paged(laws.prompts(new, engines.VOCAB), starts, tables, PAGE)


BATCHES = {
    "alone": ([90], [0]), "one token": ([1], [0]), "a chunk behind a prefix": ([33], [150]),
    "a whole graph": ([128], [0]),
    "the next size": ([129], [3]), "several": ([40, 1, 64], [0, 77, 16]),
    "all places": ([9] * REQUESTS, [5] * REQUESTS),
}  # fmt: skip


@pytest.fixture
def graphs(model, monkeypatch):
    monkeypatch.setattr(prefill_graphs, "takes", lambda config: True)
    return lambda cache: Eager(model, cache, PAGE * PAGES, SIZES)


@torch.no_grad()
def test_as_many_keys_as_a_graph_takes(monkeypatch):
    """And one tile more."""
    monkeypatch.setattr(prefill_graphs, "takes", lambda config: True)
    made, theirs = engines.tiny(max_positions=1100), []
    rows = PAGE * 640
    for _ in range(2):
        cache = KVCache(made.config, 640, PAGE)
        for i, tensor in enumerate(cache.k + cache.v):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
        theirs.append(cache)
    full = Batch.paged(
        laws.prompts([16] * REQUESTS, engines.VOCAB), [1000] * REQUESTS,
        (1 + torch.arange(64 * REQUESTS)).view(REQUESTS, 64).flip(0, 1).tolist(), PAGE,
    )  # fmt: skip
    graphs = Eager(made, theirs[0], rows, (128,))
    assert REQUESTS * 16 == 128 and REQUESTS * 1024 == KEYS
    assert_bits_equal(graphs.run(full), made.hidden(full, theirs[1]), "a full graph")
    for a, b in zip(theirs[0].k + theirs[0].v, theirs[1].k + theirs[1].v, strict=True):
        assert_bits_equal(a, b, "the cache")
    assert graphs.run(replace(full, kv_lens=(1025, *full.kv_lens[1:]))) is None and graphs.replays == 1


@torch.no_grad()
def test_rows_of_a_padded_batch_keep_their_bits(model, graphs):
    """One after another, so that each finds what the one before has left."""
    ours, theirs = caches(model)
    made = graphs(ours)
    for name, (new, starts) in BATCHES.items():
        batch = batch_of(new, starts)
        got, want = made.run(batch), model.hidden(batch, theirs)
        assert_bits_equal(got, want, name)
        for i, (a, b) in enumerate(zip(ours.k + ours.v, theirs.k + theirs.v, strict=True)):
            assert_bits_equal(a[:OURS], b[:OURS], f"{name}: cache {i}")
    made.run(batch_of([70], [0]))
    assert_bits_equal(got, want, "after another run")
    assert made.replays == len(BATCHES) + 1


def test_what_no_graph_takes_runs_as_it_is(model, graphs, monkeypatch):
    made = graphs(caches(model)[0])
    for new, starts in (([257], [0]), ([1] * (REQUESTS + 1), [0] * (REQUESTS + 1))):
        assert made.run(batch_of(new, starts)) is None
    assert made.replays == 0
    full = batch_of([10, 10], [0, 0])
    assert made.size_for(full) == 128
    monkeypatch.setattr(prefill_graphs, "KEYS", 3 * KEY_TILE)  # two tiles of padding
    assert made.size_for(full) is None


def test_sizes_that_the_kernel_or_the_context_does_not_take_are_left_out(model, graphs, monkeypatch):
    made = graphs(caches(model)[0])
    assert made.sizes == list(SIZES)
    assert Eager(model, made.pool, PAGE * PAGES, (KEY_TILE, 300, 300, 512)).sizes == [300]
    assert [Eager(model, made.pool, rows, (128,)).sizes for rows in (128, 129)] == [[], [128]]
    monkeypatch.setattr(prefill_graphs, "takes", lambda config: False)
    assert Eager(model, made.pool, PAGE * PAGES).sizes == []


def test_one_that_fails_takes_no_other_along(model, graphs, monkeypatch, caplog):
    capture = Eager._capture

    def no_room(self, size):
        if size > 128:
            raise torch.OutOfMemoryError("of 2.00 GiB")
        capture(self, size)

    monkeypatch.setattr(Eager, "_capture", no_room)
    made = graphs(caches(model)[0])
    assert made.sizes == [128] and "prefills of 256 tokens" in caplog.text
    assert made.run(batch_of([129], [0])) is None


MUTATIONS = {
    "another row of the pool": lambda to, t: to.key_rows_SL[0, 0].add_(1),
    "ids of the batch before": lambda to, t: to.ids_T[t // 2 : t].fill_(3),
    "padding in another's rows": lambda to, t: to.store_rows_T[t:].fill_(40),
    "padding's keys from another's rows": lambda to, t: to.key_rows_SL[-1].fill_(40),
    "positions of the batch before": lambda to, t: to.positions_T[t:].add_(1),
    "padding of the batch before": lambda to, t: to.ids_T[t:].fill_(3),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_in_what_is_filled_is_seen(model, graphs, monkeypatch, name):
    ours, theirs = caches(model)
    fill, batch = PrefillGraphs.fill, batch_of([33], [150])

    def wrong(self, one, size):
        fill(self, one, size)
        MUTATIONS[name](self.inputs, one.cu_seqlens[-1])

    monkeypatch.setattr(PrefillGraphs, "fill", wrong)
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(graphs(ours).run(batch), model.hidden(batch, theirs), name)
