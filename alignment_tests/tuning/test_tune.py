"""The whole way from candidates to a table, acted out on the CPU: its reference stands for the GPU's tiles."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from minitransformer.ops import gpu, grouped_linear, linear
from minitransformer.tuning import machine, subject, tune
from minitransformer.tuning.judge import Candidate, Verdict
from minitransformer.tuning.table import Product

CPU, PRODUCT = torch.device("cpu"), Product("linear", 1, 64, 128)


@pytest.fixture
def acted(monkeypatch):
    """Our tiles are the CPU reference; of the libraries 'right' has the bits and 'split' adds two halves of K."""
    dense, grouped = linear.forward, grouped_linear.forward

    def split(a, b, out):
        half = a.shape[1] // 2
        parts = ((a[:, :half], b[:half]), (a[:, half:], b[half:]))
        return sum(dense(x.contiguous(), w.t().contiguous(), torch.float32) for x, w in parts).to(out)

    monkeypatch.setattr(gpu.linear, "forward", lambda x, w, out=torch.bfloat16, tile=None: dense(x, w, out))
    monkeypatch.setattr(gpu.grouped_linear, "forward", lambda x, w, plan, scale=None, tile=None: grouped(x, w, plan, scale))  # noqa: E501
    libraries = {"split": split, "right": lambda a, b, out: dense(a, b.t().contiguous(), out)}
    monkeypatch.setattr(gpu.library, "DENSE", libraries)
    monkeypatch.setattr(machine, "facts", lambda home: {"gpu": "none"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(subject, "medians_ms", lambda peers, replays: [float(calls[0]() is None) + 1.0 for calls in peers])  # noqa: E501


def test_a_table_is_made_and_holds(acted):
    weighted = Product("grouped_linear weighted", 16, 32, 64)
    noted = []
    made = tune.tune(CPU, [PRODUCT, weighted], rows=(1, 3), say=lambda line: None, note=noted.append)
    assert [(row.product, row.M) for row in made.rows] == [(PRODUCT, 1), (PRODUCT, 3), (weighted, 8), (weighted, 24)]
    for row in made.rows:
        assert row.library == ("right" if row.product == PRODUCT else None)
        assert set(row.refused) == ({"split"} if row.product == PRODUCT else set())
        assert tune.verify(row, CPU, seed=7) == []
    assert [(line["N"], line["M"]) for line in noted] == [(64, 1), (64, 3), (32, 8), (32, 24)]
    assert "right" in noted[0]["ms"] and set(noted[0]["refused"]) == {"split"}
    assert len(noted[0]["sources"]) == 12 and noted[0]["machine"].startswith("CPU, torch ")


def test_what_there_was_no_time_for_is_told(acted):
    said = []
    assert tune.tune(CPU, [PRODUCT], rows=(1, 3), say=said.append, seconds=-1).rows == []
    assert len(said) == 1 and said[0].startswith("out of time after -1 s: 2 rows were not begun, from linear 64 x 128")


def test_the_rows_where_a_library_has_the_bits_are_found_one_by_one(acted, monkeypatch):
    libraries = dict(gpu.library.DENSE)
    libraries["sometimes"] = lambda a, b, out: libraries["split" if a.shape[0] in (2, 5, 6) else "right"](a, b, out)
    monkeypatch.setattr(gpu.library, "DENSE", libraries)
    proven = tune.proven_rows(PRODUCT, "sometimes", range(1, 10), CPU, seed=1)
    assert [M for M in range(1, 12) if proven.holds(M)] == [1, 3, 4, 7, 8, 9]


def test_every_number_of_rows_at_which_a_library_runs_is_proven_and_a_sample_of_them_again(acted, monkeypatch):
    libraries = {"split": gpu.library.DENSE["split"], "right": gpu.library.DENSE["right"]}
    libraries["sometimes"] = lambda a, b, out: libraries["split" if a.shape[0] == 6 else "right"](a, b, out)
    monkeypatch.setattr(gpu.library, "DENSE", {"sometimes": libraries["sometimes"]})
    monkeypatch.setattr(subject.Subject, "clock", lambda *_: lambda named: [2.0 - bool(c.library) for c in named])
    made = tune.tune(CPU, [PRODUCT], rows=(1, 3, 12), say=lambda line: None)
    (proof,) = made.proven
    assert proof.rows == ((1, 5, 1), (7, 12, 1)) and made.runs(proof) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert tune.verify_proven(made, CPU, seed=3, most=8) == (8, 11, [])
    made.proven = [proof._replace(rows=((1, 12, 1),))]
    again, of, (wrong,) = tune.verify_proven(made, CPU, seed=3, most=12)
    assert (again, of) == (12, 12) and wrong.startswith("linear 64 x 128 bf16, 6 rows: sometimes: mixed: row 0, column")
    made.rows = [replace(row, library_ms=9.0) for row in made.rows]  # our tiles are faster
    made.__post_init__()
    assert tune.verify_proven(made, CPU, seed=3) == (0, 0, [])


@pytest.mark.parametrize("turn", [1, 20, 47, 64, 90, 100, 200])
def test_where_the_choice_changes_between_two_rows_there_is_another(acted, monkeypatch, turn):
    """The library is the faster one up to `turn` rows; the row of 100 serves from 17 on."""

    def clock(self, seed):
        return lambda named: [1.5 + (self.M > turn) if c.library else 2.0 for c in named]

    monkeypatch.setattr(subject.Subject, "clock", clock)
    row = tune.Row(PRODUCT, 100, (16, 16, 16, 4, 3), 2.0, "right", 1.5 + (100 > turn))
    more = tune.between(row, 16, CPU, seed=0)
    assert [one.by_library for one in more] == ([True] if 17 <= turn < 100 else [])
    assert all(turn - 8 < one.M <= turn for one in more)


def test_below_the_first_row_that_is_tuned_none_is_added(acted, monkeypatch):
    """A table that the new rows join has rows of its own there."""
    clock = lambda self, seed: lambda named: [1.5 + (self.M > 40) if c.library else 2.0 for c in named]  # noqa: E731
    monkeypatch.setattr(subject.Subject, "clock", clock)
    numbers = tune.numbers_of(PRODUCT, (100,))
    made = tune.tune(CPU, [PRODUCT], rows=(100,), say=lambda line: None)
    assert [row.M for row in made.rows] == numbers
    assert [row.M for row in tune.tune(CPU, [PRODUCT], rows=(8, 100), say=lambda line: None).rows][1] in range(32, 41)


def test_which_numbers_of_rows_are_tuned():
    assert tune.numbers_of(PRODUCT, (1, 8, 64, 1024)) == [1, 8, 63, 64, 1024]
    assert tune.numbers_of(PRODUCT._replace(N=1 << 22), (1, 64, 1024)) == [1, 63, 64]
    assert tune.numbers_of(PRODUCT._replace(op="grouped_linear", groups=4), (64, 1, 64)) == [8, 512]


def test_a_number_of_rows_that_is_asked_for_twice_is_tuned_once(acted, monkeypatch):
    """Two times of one M may disagree about the library; then nothing was left to prove, and the table was lost."""
    times = iter([1.0, 9.0] * 9)
    clock = lambda named: [2.0 if c.tile else next(times) for c in named]  # noqa: E731
    monkeypatch.setattr(subject.Subject, "clock", lambda *_: clock)
    made = tune.tune(CPU, [PRODUCT], rows=(3, 3), say=lambda line: None)
    assert [row.M for row in made.rows] == [3]


def test_a_library_that_turns_a_switch_must_be_faster_by_a_tenth():
    def chosen(tile, mm, unsplit):
        libraries = (Candidate(name, None, library=name) for name in ("torch.mm", "torch.mm unsplit"))
        named = Candidate("16", None, (16,)), *libraries
        found = [Verdict(c, ms=ms) for c, ms in zip(named, (tile, mm, unsplit), strict=True)]
        return tune.row_of(PRODUCT, 8, found).library

    assert chosen(1.0, 2.0, 0.95) == "torch.mm" and chosen(1.0, 2.0, 0.8) == "torch.mm unsplit"
    assert chosen(1.0, 0.9, 0.8) == "torch.mm" and chosen(1.0, None, 0.95) is None


def test_a_library_is_refused_at_its_first_use_with_the_element(acted):
    assert tune.refusal(PRODUCT, 4, "right", CPU) is None
    assert tune.refusal(PRODUCT, 4, "split", CPU).startswith("mixed: row 0, column ")
    assert tune.refusal(PRODUCT, 4, "no such", CPU) == "there is no such library product"


def test_a_wrong_reference_ends_the_proof(acted, monkeypatch):
    """The GPU's own tile is compared with the CPU before anything is compared with it."""
    (row,) = tune.tune(CPU, [PRODUCT], rows=(1,), say=lambda line: None).rows
    wrong = gpu.linear.forward
    monkeypatch.setattr(gpu.linear, "forward", lambda *args: -wrong(*args))
    with pytest.raises(RuntimeError, match="own tile is wrong: row 0, column 0"):
        tune.tune(CPU, [PRODUCT], rows=(1,), say=lambda line: None)
    (found,) = tune.verify(row, CPU, seed=0)  # for doctor a failed check
    assert "own tile is wrong: row 0, column 0" in found
