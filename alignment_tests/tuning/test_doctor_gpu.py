"""`minitransformer doctor` and its --tune on a Hopper GPU that isn't there: operators, versions, exit status."""

import json
import re
import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from alignment_tests.learner.tiny import tiny_config
from alignment_tests.tuning.fake_gpu import GOOD, NEW
from minitransformer import devices
from minitransformer.ops.gpu import device
from minitransformer.tuning import checks, table


def stamps(tmp_path):
    return list((tmp_path / "minitransformer" / "verified").glob("*"))


def test_doctor_has_a_row_for_each_operator(doctor, gpu, capsys, tmp_path):
    assert doctor() == 0
    out = capsys.readouterr().out
    assert "ok       rope: 4 outputs compared with the CPU's, none differs" in out and "versions" not in out
    assert not stamps(tmp_path), "verified versions need none"


def test_doctor_warns_of_other_versions_and_its_answer_is_kept(doctor, gpu, capsys, tmp_path):
    gpu.forget(**NEW)
    assert doctor() == 0
    out = capsys.readouterr().out
    assert "warning  versions: not those that were verified (torch 2.99.0, the table has 2.11.0" in out
    assert len(stamps(tmp_path)) == 1 and gpu.use() == [] and gpu.runs == 1
    gpu.got = -GOOD
    assert doctor() == 1
    out = capsys.readouterr().out
    assert "failed   rope: two rows: row 0, column 0: 0xbf800000 where the spec says 0x3f800000 (2 of 2" in out
    assert out.splitlines()[-1].startswith("1 of ") and not stamps(tmp_path), "an old stamp is taken away"


def tuning(monkeypatch, gpu, say=lambda: None):
    """A tune.tune that launches one operator."""

    def tune_(home, **options):
        device._admit("linear", home)
        say()
        few = [table.Row(table.Product("linear", 1, 64, 128), 1, (16, 16, 16, 4, 3), 1.0)]
        return table.Table(gpu.versions, {}, few if options["seconds"] > 1 else [])

    monkeypatch.setattr("minitransformer.tuning.tune.tune", tune_)


def test_tune_on_a_gpu_with_other_bits_is_status_1_as_without(doctor, gpu, monkeypatch, capsys):
    """The operators are compared once, by doctor's own rows; tune proves its candidates itself."""
    tuning(monkeypatch, gpu)
    gpu.forget(**NEW)
    assert doctor("--tune") == 0 and gpu.runs == 1
    gpu.got = -GOOD
    gpu.forget()
    assert doctor("--tune") == doctor() == 1
    out, err = capsys.readouterr()
    assert out.count("failed   rope: two rows: row 0, column 0") == 2 and err == ""


def test_tune_whose_reference_is_wrong_writes_no_table(doctor, gpu, monkeypatch, capsys, tmp_path):
    from minitransformer.tuning.subject import WrongReference

    def wrong():
        raise WrongReference("linear: the GPU's own tile is wrong")

    tuning(monkeypatch, gpu, wrong)
    assert doctor("--tune") == 1
    out = capsys.readouterr().out
    assert "failed   tune: no table is written: linear: the GPU's own tile is wrong\n" in out
    assert out.splitlines()[-1].startswith("1 of ") and not list(tmp_path.rglob("tuning.json"))


def test_tune_without_time_leaves_the_table_that_is_there(doctor, gpu, monkeypatch, capsys):
    tuning(monkeypatch, gpu)
    table.Table({"gpu": "another"}, {}, []).write(table.user_path())
    before = table.user_path().read_bytes()
    assert doctor("--tune", "--seconds", "0.1") == 0
    assert "nothing was tuned" in capsys.readouterr().out and table.user_path().read_bytes() == before


def test_tune_on_a_gpu_that_is_no_hopper_is_bad_input(doctor, gpu, monkeypatch, capsys):
    tuning(monkeypatch, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda home=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda home=None: "A100")
    devices.unverified.cache_clear()
    assert doctor() == 0 and "absent   cuda:0: A100 has compute capability 8.0" in capsys.readouterr().out
    assert doctor("--tune") == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"error: --tune: A100 has .*; add --allow-unverified to tune it .*\n", err)
    assert doctor("--tune", "--allow-unverified") == 0


def test_tune_for_a_checkpoint_asks_for_its_products_and_keeps_the_others(doctor, gpu, monkeypatch, tmp_path):
    from minitransformer.tuning import tune

    def tune_(home, products, **options):
        return table.Table(gpu.versions, {}, [table.Row(p, 8, (16, 16, 16, 4, 3), 1.0) for p in products])

    monkeypatch.setattr(tune, "tune", tune_)
    monkeypatch.setattr(checks, "run", lambda *args: iter(()))
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert doctor("--tune") == doctor("--tune", "--model", str(tmp_path)) == 0
    found = [row.product for row in table.read(table.user_path()).rows]
    assert found == [*tune.PRODUCTS, *tune.products_of(config)]
    assert [p.N for p in tune.products_of(config)] == [128, 64, 8, 192, 64, 96, 64, 64]
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf() | {"quantization_config": {}}))
    assert doctor("--tune", "--model", str(tmp_path)) == 0
    assert doctor("--tune", "--model", str(tmp_path / "none")) == 2


def test_two_tunes_at_once_keep_both_rows(doctor, gpu, monkeypatch, tmp_path):
    from minitransformer.tuning.table import Product, Row

    gate, turn = threading.Barrier(2), iter((1, 3))

    def both(home, **options):
        row = Row(Product("linear", 1, 64, 128), next(turn), (16, 16, 16, 4, 3), 1.0)
        gate.wait(30)
        return table.Table(gpu.versions, {}, [row])

    read = table.read

    def slow(path):
        time.sleep(0.3 if path.name == "tuning.json" else 0)
        return read(path)

    monkeypatch.setattr("minitransformer.tuning.tune.tune", both)
    monkeypatch.setattr(table, "read", slow)
    monkeypatch.setattr(checks, "run", lambda *args: iter(()))
    table.Table(gpu.versions, {}, []).write(table.user_path())
    threads = [threading.Thread(target=doctor, args=("--tune",)) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [row.M for row in sorted(read(table.user_path()).rows, key=lambda row: row.M)] == [1, 3]
