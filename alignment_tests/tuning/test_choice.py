"""At run time a library is used only where the table and the machine allow it; else it is proven first, or left."""

import warnings

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from alignment_tests.mutations import Mutation, assert_caught, patched
from alignment_tests.tuning.test_table import MACHINE, OTHER, QKV, made
from minitransformer.ops.gpu import choice, library
from minitransformer.ops.gpu.tiles import Tile
from minitransformer.tuning import machine, table, tune

HOME = torch.device("cuda", 0)


@pytest.fixture
def here(monkeypatch):
    """A GPU that is the table's, in name; here.machine may be changed."""

    class Here:
        machine, capturing, proofs, refused = dict(MACHINE), False, [], None

    def refusal(product, M, name, home):
        Here.proofs.append((product, M, name))
        return Here.refused

    Here.proofs = []
    monkeypatch.setattr(machine, "facts", lambda home: Here.machine)
    monkeypatch.setattr(machine, "specs", lambda: {"chain": "c/1"})
    monkeypatch.setattr(machine, "blas_settings", lambda: tuple(sorted(Here.machine.items())))
    monkeypatch.setattr(table, "tables", lambda: [made()])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Here.capturing)
    monkeypatch.setattr(tune, "refusal", refusal)
    choice.forget(), choice._warn.cache_clear()
    yield Here
    choice.forget(), choice._warn.cache_clear()


def test_a_proven_library_of_this_machine_is_used_at_once(here):
    found = choice.of(HOME, QKV, 128)
    assert found.library == "torch.mm" and found.proven and here.proofs == []
    assert choice.of(HOME, QKV, 129).library is None and choice.of(HOME, QKV, 129).tile == OTHER
    assert choice.of(HOME, QKV._replace(N=7), 1) == choice.NOTHING


def stale_is_proven_again(here):
    here.machine = MACHINE | {"torch": "2.12.0"}
    choice.forget(), here.proofs.clear(), choice._warn.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = choice.of(HOME, QKV, 128)
    assert here.proofs == [(QKV, 128, "torch.mm")], "used without a proof"
    assert found.proven and found.library == "torch.mm"
    assert [str(w.message) for w in told if "torch 2.12.0, the table has 2.11.0" in str(w.message)]


def test_a_table_of_other_versions_is_proven_at_the_first_use_with_a_warning(here):
    stale_is_proven_again(here)
    choice.of(HOME, QKV, 128)
    assert len(here.proofs) == 1  # once a process


def test_a_table_of_this_machine_comes_before_the_users_old_one(here, monkeypatch):
    old = made()
    old.machine = MACHINE | {"torch": "2.10.0"}
    monkeypatch.setattr(table, "tables", lambda: [old, made()])
    assert choice.of(HOME, QKV, 128).proven and here.proofs == []


def test_trusting_a_stale_table_is_caught(here):
    trusting = patched(machine, "differences", lambda here, there: [])
    assert_caught(Mutation("a stale key is trusted", "proven again", trusting, lambda: stale_is_proven_again(here)))


@pytest.mark.filterwarnings("ignore:.* was measured elsewhere")
def test_a_library_that_fails_here_is_not_used_and_named(here):
    here.machine, here.refused = MACHINE | {"driver": "590"}, "mixed: row 0, column 3: 0x1 where ..."
    with pytest.warns(RuntimeWarning, match="torch.mm is not used for linear 5120 x 2048 .*: mixed: row 0"):
        found = choice.of(HOME, QKV, 128)
    assert found.library is None and found.tile == OTHER
    assert choice.of(HOME, QKV, 128).library is None and len(here.proofs) == 1


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_proven_under_graph_capture(here):
    here.machine, here.capturing = MACHINE | {"driver": "590"}, True
    assert choice.of(HOME, QKV, 128) == table.Choice(OTHER) and here.proofs == []
    here.capturing = False
    assert choice.of(HOME, QKV, 128).library == "torch.mm" and len(here.proofs) == 1
    here.capturing = True
    assert choice.of(HOME, QKV, 128).library == "torch.mm"


@pytest.mark.filterwarnings("ignore")
def test_a_switch_that_is_turned_later_is_seen(here):
    assert choice.of(HOME, QKV, 128).library == "torch.mm" and here.proofs == []
    here.machine = MACHINE | {"blas": "(cublaslt, ...)"}
    choice.of(HOME, QKV, 128)
    assert len(here.proofs) == 1


def test_a_library_of_another_version_is_not_looked_for(here, monkeypatch):
    monkeypatch.setattr(library, "DENSE", {})
    assert choice.of(HOME, QKV, 128) == table.Choice(OTHER) and here.proofs == []


def test_the_copy_engine_gets_no_rows_that_it_cannot_read():
    engine = table.Choice(tuple(Tile(128, 128, 64, 4, 4, tma=True)))
    whole = torch.zeros(16, 64, dtype=torch.bfloat16)
    assert choice.tile(engine, whole) == Tile(128, 128, 64, 4, 4, tma=True)
    assert choice.tile(engine, whole.view(-1)[4:-60].view(-1, 64)) is None
    assert choice.tile(engine, torch.zeros(4, 12, dtype=torch.bfloat16)) is None
    assert choice.tile(table.Choice(), whole) is None


def test_the_layout_is_part_of_the_key():
    a, b = torch.zeros(4, 8), torch.zeros(8, 6)
    assert library.op_of(a, b) == "mm nn" and library.op_of(a, torch.zeros(6, 8).t()) == "linear"
    assert library.op_of(torch.zeros(8, 4).t(), b) == "mm tn"
    assert library.op_of(torch.zeros(4, 16)[:, ::2], b) == "mm Nonen"  # which no table has
