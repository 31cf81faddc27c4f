"""`minitransformer doctor` on a machine without a GPU: what it says, and its exit status."""

import json

import pytest
import torch

from minitransformer.cli import main
from minitransformer.ops import mma
from minitransformer.tuning import checks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU can do")


def test_a_machine_without_a_gpu_is_no_failure(capsys, tmp_path):
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[-1] == "what this machine can run has the spec's bits"
    assert any(line.startswith("ok       chain on the CPU: 0 of 840 outputs differ") for line in lines)
    assert any(line.startswith("absent   gpu: ") and "every operator runs on the CPU" in line for line in lines)
    found = json.loads((tmp_path / "d.json").read_text())
    assert [check["name"] for check in found["checks"]] == [line[9:].split(":")[0] for line in lines[:-1]]
    assert {check["state"] for check in found["checks"]} <= set(checks.STATES)
    assert len(found["sources"]) == 12 and found["machine"].startswith("CPU, torch ") and found["date"] > "2026"


def test_a_wrong_bit_is_status_1(capsys, monkeypatch):
    real = mma.chain_bits

    def wrong(*args):
        out = real(*args)
        out.view("uint32")[2, 3] ^= 1
        return out

    monkeypatch.setattr(mma, "chain_bits", wrong)
    assert main(["doctor", "--seed", "3"]) == 1
    out = capsys.readouterr().out
    assert "failed   chain on the CPU: 1 of 840 outputs differ" in out and out.splitlines()[-1].startswith("1 of ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tune", "--tune needs an NVIDIA GPU"),
        ("--rows 0", "--rows 0: must be at least 1"),
        ("--rows x", "invalid int value"),
        ("--rows 1 16385", "--rows 16385: must be at most 16384"),
        ("--rows 1", "--rows is for --tune"),
        ("--model {tmp}", "--model is for --tune"),
        ("--seconds 5", "--seconds is for --tune"),
        ("--tune --seconds nan", "--seconds nan: must be above 0"),
        ("--seed -1", "--seed -1: must be 0 to"),
        ("--seed 9223372036854775808", "must be 0 to 2^63 - 1"),
        ("--json {tmp}", "is a directory"),
    ],
)
def test_bad_input_is_status_2(capsys, tmp_path, options, message):
    try:
        status = main(f"doctor {options}".format(tmp=tmp_path).split())
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and message in err


def test_where_no_table_can_be_written_nothing_is_tuned(capsys, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from minitransformer.tuning import tune

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minitransformer.devices.unverified", lambda home: None)
    monkeypatch.setattr(tune, "tune", lambda *args, **options: pytest.fail("tuned for nothing"))
    assert main(["doctor", "--tune"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and str(tmp_path / "file") in err and err.count("\n") == 1


def test_without_triton_kernels_are_absent(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **options):
        if name.split(".")[0] == "triton":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    check = checks._offline()
    assert check.state == "absent" and "Triton is not installed" in check.text


def test_what_it_says_of_sglang(monkeypatch):
    from minitransformer.errors import InputError
    from minitransformer.plugins.sglang import plugin

    def none():
        raise InputError("SGLang is not installed; `pip install` it")

    monkeypatch.setattr(plugin, "sglang_version", none)
    assert checks._sglang() == checks.Check("sglang", "absent", "SGLang is not installed; `pip install` it")
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.5.17")
    monkeypatch.setattr(plugin, "entry_points", lambda **which: [])
    found = checks._sglang()
    assert found.state == "warning" and "not installed, so SGLang can't find its plugin" in found.text
    monkeypatch.setattr(plugin, "entry_points", lambda **which: [which])
    assert checks._sglang() == checks.Check("sglang", "ok", "SGLang 0.5.17, as tested, and it finds our plugin")
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.5.18")
    found = checks._sglang()
    assert found.state == "warning" and "SGLang 0.5.18 is installed, 0.5.17 was tested" in found.text
