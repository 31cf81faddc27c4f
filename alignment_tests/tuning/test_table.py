"""The table: readable, whole or absent, and never trusted beyond what was proven."""

import json
import os

import pytest

from minitransformer.errors import InputError
from minitransformer.tuning import machine, table
from minitransformer.tuning.table import Product, Proven, Row, Table

TILE, OTHER = (64, 64, 64, 4, 6, 0, 0, 0), (16, 32, 256, 4, 4, 0, 0, 0)
QKV, HEAD = Product("linear", 1, 5120, 2048), Product("linear", 1, 151936, 2048, "fp32")
EXPERTS = Product("grouped_linear weighted", 128, 2048, 768)
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "580.1"}


def made() -> Table:
    rows = [
        Row(QKV, 16, TILE, 0.02, "torch.mm", 0.03, {"torch.mm unsplit": "special: row 0, column 1: 0x7fff ..."}),
        Row(QKV, 128, OTHER, 0.02, "torch.mm", 0.01),
        Row(HEAD, 1, TILE, 0.1),
        Row(EXPERTS, 8, OTHER, 0.5),
    ]
    return Table(MACHINE, {"chain": "c/1"}, rows, [Proven(QKV, "torch.mm", ((33, 100, 1), (128, 1024, 64)))])


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "tuning.json"
    made().write(path)
    again = table.read(path)
    assert again == Table(MACHINE, {"chain": "c/1"}, made().rows, made().proven, path)
    assert os.listdir(path.parent) == ["tuning.json"]


def test_a_row_is_a_line():
    lines = made().text().splitlines()
    assert sum('"product"' in line for line in lines) == 5 and json.loads(made().text())["format"] == table.FORMAT
    assert any("NVIDIA H200" in line for line in lines)


@pytest.mark.parametrize(("M", "tile"), [(1, TILE), (16, TILE), (17, OTHER), (128, OTHER), (100000, OTHER)])
def test_the_row_of_the_next_larger_number_of_rows_serves(M, tile):
    assert made().choice(QKV, M).tile == tile
    assert made().choice(Product("linear", 1, 5120, 2049), M) is None


@pytest.mark.parametrize("M", [32, 33, 100, 101, 128, 192, 193, 1088])
def test_a_library_is_chosen_only_where_it_was_proven(M):
    choice = made().choice(QKV, M)
    assert (choice.library, choice.proven) == (("torch.mm", True) if M in (33, 100, 128, 192) else (None, False))
    assert choice.tile == OTHER  # so there is always one of our own


def test_a_slower_library_is_not_chosen():
    assert made().choice(QKV, 16).library is None


def test_an_update_keeps_what_it_does_not_replace():
    new = Table(MACHINE, {"chain": "c/1"}, [Row(QKV, 16, OTHER, 0.01)], [Proven(QKV, "torch.mm", ((1, 1, 1),))])
    both = made().updated(new)
    assert both.choice(QKV, 16).tile == OTHER and both.choice(HEAD, 1).tile == TILE
    assert both.choice(QKV, 128).library == "torch.mm"  # the newer run did not try it
    new.rows.append(Row(QKV, 40, OTHER, 0.01, "torch.mm", 0.001))
    both = made().updated(Table(MACHINE, {"chain": "c/1"}, new.rows, new.proven))
    assert both.choice(QKV, 40).library is None and both.proven[0].rows == ((41, 100, 1), (128, 1024, 64))


def test_a_tune_of_many_rows_takes_no_library_from_few():
    """It tried the library nowhere, since its own row chooses a tile; row 128 of the old ones still chooses it."""
    new = Table(MACHINE, {"chain": "c/1"}, [Row(QKV, 16384, TILE, 0.5, "torch.mm", 0.6)])
    both = made().updated(new)
    assert both.choice(QKV, 64).library == "torch.mm" and both.choice(QKV, 16384).tile == TILE


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    made().write(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError):
        Table(MACHINE, {}, [], []).write(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["tuning.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"format": 99}, "format 99"),
        (lambda c: {k: v for k, v in c.items() if k != "rows"}, "KeyError"),
        (lambda c: c | {"rows": [{"product": {"op": "linear"}, "M": 1}]}, "TypeError"),
        (lambda c: c | {"rows": [c["rows"][0] | {"M": 0}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": "large"}]}, "ValueError"),
        (lambda c: c | {"rows": [c["rows"][0] | {"speed": 1}]}, "speed"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": [64]}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": [0, 64, 64, 4, 6]}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": [48, 64, 64, 4, 6]}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": [64, 64, 64, 4, 6, 2]}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile": [*TILE, 0, 0, 0]}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"tile_ms": None}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"library_ms": "fast"}]}, "bad row"),
        (lambda c: c | {"rows": [c["rows"][0] | {"library": 5}]}, "bad row"),
        (lambda c: c | {"proven": [c["proven"][0] | {"rows": [[1, 9, 0]]}]}, "a step below 1"),
        (lambda c: [c], "TypeError"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, change, message):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(change(json.loads(made().text()))))
    with pytest.raises(InputError, match="tune again") as caught:
        table.read(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_the_users_table_comes_first_and_a_broken_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped.json")
    made().write(tmp_path / "shipped.json")
    made().write(table.user_path())
    assert [one.path for one in table.tables()] == [table.user_path(), tmp_path / "shipped.json"]
    table.user_path().write_text("{")
    with pytest.warns(RuntimeWarning, match="tuning.json.*it is not used"):
        assert [one.path for one in table.tables()] == [tmp_path / "shipped.json"]


def test_a_user_without_a_home_or_with_anothers_has_the_shipped_table(tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(table.Path, "home", homeless)
    assert [one.path for one in table.tables()] == [table.SHIPPED]
    with pytest.raises(InputError, match="set XDG_CACHE_HOME"):
        table.user_path()

    def closed(self, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(table.Path, "home", lambda: tmp_path / "root")
    monkeypatch.setattr(table.Path, "stat", closed)
    assert [one.path for one in table.tables()] == [table.SHIPPED]


def test_another_version_is_another_machine():
    assert machine.differences(MACHINE, dict(MACHINE)) == []
    found = machine.differences(MACHINE | {"torch": "2.12.0", "environment": "X=1"}, MACHINE)
    assert found == ["torch 2.12.0, the table has 2.11.0", "environment X=1, the table has none"]


def test_the_table_that_is_shipped():
    pytest.importorskip("triton")
    from minitransformer.ops.gpu import grouped_linear, library, linear, tiles

    shipped = table.read(table.SHIPPED)
    assert shipped.machine["gpu"] == "NVIDIA H200" and shipped.spec == machine.specs()
    candidates = {*linear.CANDIDATES, *grouped_linear.CANDIDATES}
    for row in shipped.rows:
        assert tiles.Tile(*row.tile) in candidates, f"{row.product}: a tile that no candidate has"
        assert row.library in {None, *library.DENSE, *library.GROUPED}
    for proven in shipped.proven:
        assert proven.rows and proven.library in {*library.DENSE, *library.GROUPED}
