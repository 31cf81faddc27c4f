"""What draws and tabulates the benchmarks reads the results that are committed, and names a line that is none."""

import argparse
import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment_tests.plugin.laws import Count
from minitransformer.errors import InputError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*gpu_ops.jsonl"))


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_committed_results_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot = module("plot")
    plot.main([*map(str, RESULTS), "--out", str(tmp_path)])
    assert {"dense.svg", "dense_fixed.svg", "grouped.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_a_ratio_is_their_time_over_ours(tmp_path):
    row = {"bench": "dense", "shape": "qkv", "M": 8, "ms": 2.0, "torch_ms": 3.0, "fixed_ms": 5.0}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"torch_ms": 4.0}) + "\n")
    assert module("plot").read([file]) == {"dense": {"qkv": {8: 2.0}}, "dense_fixed": {"qkv": {8: 2.5}}}
    file.write_text(json.dumps(row) + "\n{}\n")
    with pytest.raises(ValueError, match="a.jsonl:2: not a row"):
        module("plot").read([file])


def test_the_floors_of_a_table():
    tables = module("tables")
    row = {"shape": "qkv", "M": 8, "ms": 0.01, "torch_ms": 0.009, "tb_s": 2.15, "tflops": 79.0}
    assert tables.floors(row) == pytest.approx((0.005, 0.001))
    assert tables.table([row])[-1] == "| qkv | 8 | 0.0100 | 0.0050 | 0.0010 | 2.00 | 0.0090 | 0.90 |"
    # K and V of 2 sequences, queries and outputs: 2 (4 x 1000 + 32) 128 elements, twice, of 2 bytes at 4.3 TB/s.
    decode = {"bench": "decode", "M": "2 x 1000", "ms": 0.01}
    assert tables.floors(decode) == pytest.approx((4128768e-9 / 4.3, 4 * 32 * 128 * 2000 * 1e-9 / 790))
    assert tables.experts_hit(1) == 8 and 127 < tables.experts_hit(100) < 128


def test_every_table_of_the_page_has_the_numbers_of_the_committed_results(monkeypatch):
    """The headline too; how it is told that they have not: a number of the page, then one of the results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    page = module("page")
    text = page.PAGE.read_text(encoding="utf-8")
    notes = page.NOTES.read_text(encoding="utf-8")
    assert page.renewed(text) == (text, []) and page.renewed(notes, page.TABLES_OF[page.NOTES]) == (notes, [])
    assert sorted(re.findall(r"^<!-- (.+) -->$", text + notes, re.M)) == sorted(page.TABLES)
    reached = re.search(r"\| goal \| reached \|\n.*\n.* (\d\.\d\d), least ", text)
    spoilt = text[: reached.start(1)] + "9.99" + text[reached.end(1) :]
    assert page.renewed(spoilt) == (text, ["headline"])
    made = importlib.import_module("page_tables")
    read = made.read
    monkeypatch.setattr(made, "read", lambda name: [row | {"torch_ms": 7.0} if row.get("shape") == "decode" else row
                                                    for row in read(name)])  # fmt: skip
    assert page.renewed(text)[1] == ["headline", "decode"]


def test_a_result_without_its_table_or_a_table_without_its_mark_is_told(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    page = module("page")
    text = page.PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- laws -->"):
        page.renewed(text.replace("<!-- laws -->", ""))
    (tmp_path / "h200_test_gpu.txt").write_text("new_law: holds everywhere   1 of 1\n")
    made = importlib.import_module("page_tables")
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="test_new_law"):
        made.laws([])


def test_the_table_of_laws_has_every_file_that_runs_on_a_gpu():
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    files = (BENCHMARKS.parent / "alignment_tests" / "gpu").glob("test_*.py")
    named = [path.stem for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    assert len(named) > 15 and not [name for name in named if f"`{name}`" not in text]


def test_what_the_page_says_of_the_self_checks_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    page, made = module("page"), importlib.import_module("page_tables")
    each, first = (made.rows(bench, "h200_selfchecks.jsonl") for bench in ("self-check", "first use"))
    outputs, seconds = (sum(row[key] for row in each) for key in ("outputs", "seconds"))
    cold, stamped = (row["seconds"] for row in first)
    said = f"{outputs / 1e6:.1f} million numbers: {seconds:.1f} s with compiled kernels, {cold:.0f} s "
    text = page.PAGE.read_text(encoding="utf-8")
    assert said in text and f"a process asks {stamped:.1f} s" in text


def test_no_committed_row_has_wrong_bits(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    made, counted = importlib.import_module("page_tables"), 0
    for path in (p for p in sorted(made.RESULTS.glob("h200_*.json*")) if "sglang" not in p.name):
        for row in made.read(path.name):
            wrong = row.get("wrong", row.get("differing", row.get("bits", {}).get("differing", 0)))
            counts = wrong.values() if isinstance(wrong, dict) else [wrong]
            assert not any(counts), f"{path.name}: {row}"
            counted += len(counts) and ("wrong" in row or "differing" in row)
    assert counted > 200


def test_runs_of_servers_are_kept_and_compared(tmp_path):
    speed, of = (
        module("sglang_speed"),
        {"machine": "M", "layers": 2, "input": 4, "output": 8, "file": tmp_path / "a.json"},
    )
    for engine, seconds in (("wide-bf16-graphs", 1.0), ("wide-bf16-graphs", 2.0), ("wide-own-graphs", 3.0)):
        row = {"engine": engine, "gpu": "0", "batch": 2, "seconds": seconds, "first_seconds": 0.5}
        speed.add(argparse.Namespace(**of), "runs", row)
    table = [line for line in speed.table(of["file"]) if "**" in line or line.startswith(("| mini", "| fast"))]
    assert table[0] == "| miniTransformer, BF16 | 12 |"  # the mean of 16 and 8 tokens a second
    assert table[1:3] == ["| **ours BF16 / stock** | 2.25 |", "| fastest run / slowest of one engine, at most | 2.00 |"]
    with pytest.raises(InputError, match="another layers"):
        speed.add(argparse.Namespace(**of | {"layers": 3}), "runs", row)
    assert len(json.loads(of["file"].read_text())["runs"]) == 3


def test_an_engine_that_differs_from_itself_is_not_measured(tmp_path, monkeypatch):
    speed, said = module("sglang_speed"), iter(range(9))
    client = SimpleNamespace(identity=lambda: {"prefills_from_graphs": next(said)})
    monkeypatch.setattr(speed, "connect", lambda args, name: (client, ""))
    monkeypatch.setattr(speed, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(speed.laws, "alone_equals_batch", lambda *_: Count(0, 5))
    args = dict(machine="M", layers=2, input=4, output=8, gpu="0", batches=[2], repeats=1, file=tmp_path / "a.json")
    args = argparse.Namespace(names=["wide-bf16-graphs", "wide-own-graphs"], **args)
    for differing in (1, 0):
        monkeypatch.setattr(speed.laws, "decode_equals_rescoring", lambda *_, n=differing: Count(n, 4))
        assert speed.run(args) == differing
    found = json.loads(args.file.read_text())
    assert found["checks"] == [
        {"engine": "wide-bf16-graphs", "differing": n, "of": 9, "prefills_from_graphs": 1} for n in (1, 0)
    ]
    assert [row["engine"] for row in found["runs"]] == ["wide-own-graphs", "wide-bf16-graphs", "wide-own-graphs"]
