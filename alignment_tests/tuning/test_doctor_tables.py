"""`minitransformer doctor` and the tables of choices, on a machine that seems to have a Hopper GPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from minitransformer.cli import main
from minitransformer.ops import gpu, linear
from minitransformer.tuning import checks, machine, reverify, table, tune
from minitransformer.tuning.table import Product, Proven, Row, Table

ROWS = [Row(Product("linear", 1, 64, 128), M, (16, 16, 16, 4, 3), 1.0, "mm", 0.5) for M in (1, 3)]


@pytest.fixture
def doctor(monkeypatch, tmp_path, capsys):
    """doctor(table, status) -> the lines about tables. The GPU is this CPU, whose library 'mm' is `library`."""
    facts = machine.specs()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(checks, "unverified", lambda home: None)
    monkeypatch.setattr(machine, "facts", lambda home: {"gpu": "NVIDIA H200", "torch": "2.11.0"})
    monkeypatch.setattr(machine, "specs", lambda: facts)
    for name in ("_cpu", "_offline", "_sglang"):  # what they find has its own tests
        monkeypatch.setattr(checks, name, lambda *seed: checks.Check("other", "ok", "") if not seed else [])
    monkeypatch.setattr(checks, "_operators", lambda home: [])
    monkeypatch.setattr(reverify, "unlike", lambda home: None)
    verify, verify_proven, cpu = tune.verify, tune.verify_proven, torch.device("cpu")
    monkeypatch.setattr(tune, "verify", lambda row, home, seed: verify(row, cpu, seed))
    monkeypatch.setattr(tune, "verify_proven", lambda one, home, seed: verify_proven(one, cpu, seed, 4))
    forward = linear.forward
    monkeypatch.setattr(gpu.linear, "forward", lambda x, w, out=torch.bfloat16, tile=None: forward(x, w, out))
    monkeypatch.setattr(gpu.library, "DENSE", {"mm": lambda a, b, out: forward(a, b.t().contiguous(), out)})
    monkeypatch.setattr(table, "paths", lambda: [tmp_path / "tuning.json"])

    def call(one: Table, status: int) -> list[str]:
        one.write(tmp_path / "tuning.json")
        capsys.readouterr()
        assert main(["doctor", "--seed", "1", "--json", str(tmp_path / "d.json")]) == status
        found = json.loads((tmp_path / "d.json").read_text())["checks"]
        assert [check["state"] for check in found if check["name"] == "cuda:0"] == ["ok"]
        return [line for line in capsys.readouterr().out.splitlines() if " table: " in line or "checks" in line]

    return call


def made(**changes) -> Table:
    proven = [Proven(ROWS[0].product, "mm", ((1, 3, 1),))]
    return Table({"gpu": "NVIDIA H200", "torch": "2.11.0"} | changes, machine.specs(), ROWS, proven)


def test_a_table_of_this_machine_holds(doctor):
    (line,) = doctor(made(), 0)
    assert line.startswith("ok       table: ") and "2 rows, the tile and the library of each compared" in line
    assert line.endswith("; libraries also at 3 of the 3 numbers of rows at which they run")


def test_a_row_whose_library_has_not_the_bits_is_status_1(doctor, monkeypatch):
    right = gpu.library.DENSE["mm"]
    wrong = {"mm": lambda a, b, out: (-1 if len(a) == 3 else 1) * right(a, b, out)}
    monkeypatch.setattr(gpu.library, "DENSE", wrong)
    line, last = doctor(made(), 1)
    assert line.startswith("failed   table: ") and "row 0, column 0" in line and "linear 64 x 128" in line
    assert last == "1 of 4 checks failed"


def test_a_proven_number_of_rows_without_the_bits_is_status_1(doctor, monkeypatch):
    """Between the table's rows: 2, which the proof lists and the row of 3 serves."""
    right = gpu.library.DENSE["mm"]
    wrong = {"mm": lambda a, b, out: (-1 if len(a) == 2 else 1) * right(a, b, out)}
    monkeypatch.setattr(gpu.library, "DENSE", wrong)
    line, last = doctor(made(), 1)
    assert line.startswith("failed   table: ") and "linear 64 x 128 bf16, 2 rows: mm: mixed: row 0, column 0" in line
    assert last == "1 of 4 checks failed"


def test_a_wrong_tile_is_status_1(doctor, monkeypatch):
    right = gpu.linear.forward
    monkeypatch.setattr(gpu.linear, "forward", lambda x, w, out=torch.bfloat16, tile=None: -right(x, w, out))
    line, last = doctor(made(), 1)
    assert line.startswith("failed   table: ") and last == "1 of 4 checks failed"


def test_a_table_of_another_machine_is_a_warning_and_compared_all_the_same(doctor):
    warning, line = doctor(made(gpu="NVIDIA H100", torch="2.9.0"), 0)
    assert warning.startswith("warning  table: ") and "is of another machine: " in warning
    assert "NVIDIA H100" in warning and "2.9.0" in warning and line.startswith("ok       table: ")


def test_a_table_that_cannot_be_read_is_status_1(doctor, monkeypatch):
    monkeypatch.setattr(table, "FORMAT", 0)
    one = made()
    monkeypatch.setattr(Table, "write", lambda self, path: path.write_text("[]"))
    line, last = doctor(one, 1)
    assert line.startswith("failed   table: ") and last == "1 of 4 checks failed"
