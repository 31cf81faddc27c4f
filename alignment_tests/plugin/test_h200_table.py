"""What the pages of docs/ say of SGLang on an H200 is what was written there, and nothing in it differs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment_tests.plugin import h200_laws, h200_table
from alignment_tests.plugin.laws import Count
from benchmarks import sglang_speed
from minitransformer.errors import InputError

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, SUMMARY = ((DOCS / name).read_text("utf-8") for name in ("sglang_results.md", "sglang.md"))
FILES = h200_table.LAWS, h200_table.CPU_LAWS, h200_table.STOCK, h200_table.GSM8K


def test_the_page_says_what_the_results_say():
    laws, cpu, stock, gsm8k = map(h200_table.read, FILES)
    tables = [h200_table.laws_table(laws), h200_table.laws_table(cpu), h200_table.syncs_table(laws)]
    tables += [h200_table.graphs_table(h200_table.read(h200_table.GRAPHS))]
    tables += [h200_table.prefill_table(stock), h200_table.stock_table(stock), h200_table.gsm8k_table(gsm8k)]
    for table in tables:
        lines = list(table)
        assert len(lines) > 2
        assert [line for line in lines if line not in PAGE] == []


def test_the_pages_say_how_fast_the_runs_were():
    lines = sglang_speed.table(h200_table.RESULTS / "h200_sglang.json")
    assert any("/ stock" in line for line in lines)
    assert [line for line in lines if (line not in PAGE or line not in SUMMARY) and "---" not in line] == []
    ratios = [x for line in lines if line.startswith("| **ours BF16 / st") for x in line.strip(" |").split(" | ")[1:]]
    row = next(line for line in (DOCS / "performance.md").read_text("utf-8").splitlines() if "SGLang with our" in line)
    assert ratios == re.findall(r"\d\.\d\d(?! in)", row), row
    lines = sglang_speed.earlier(sorted(h200_table.RESULTS.glob("h200_sglang_[0-9]*.json")))
    assert len(lines) > 3 and [line for line in lines if line not in PAGE] == []


def test_the_engines_that_were_measured_held_their_laws():
    checks = json.loads((h200_table.RESULTS / "h200_sglang.json").read_text())["checks"]
    assert {row["engine"] for row in checks} == {"wide-bf16-graphs", "wide-nvfp4-graphs"}
    assert all(row["differing"] == 0 < min(row["of"], row["prefills_from_graphs"]) for row in checks)


def test_nothing_differs():
    laws, cpu, stock, gsm8k = map(h200_table.read, FILES)
    rows = laws + cpu + gsm8k + h200_table.read(h200_table.GRAPHS) + [row for row in stock if "law" in row]
    kinds = ("differing", "learner_differing", "unlike_stages")
    assert [row for row in rows if any(row.get(kind) for kind in kinds)] == []
    ours = [row for row in laws if row.get("in_process") and "route" in row]
    assert ours and not [
        row for row in ours if row["decode_differing"] or (row["moved"] > 0) == (row["weights"] == "equal")
    ]
    assert [row for row in rows if not row.get("verdict", "EQUAL").startswith("EQUAL")] == []
    assert all(row["of"] > 0 for row in rows if "law" in row)
    assert {row["device"] for row in laws} == {"NVIDIA H200"}


def test_prefill_graphs():
    numbers = sum(row["of"] for row in h200_table.read(h200_table.GRAPHS) if "law" in row)
    assert f"0 of {numbers:,} numbers differ" in PAGE and f"0 of {numbers:,} numbers" in SUMMARY


def test_engines_of_other_weights_are_not_compared(monkeypatch):
    """What an engine says before its weights are there would count as differing."""
    here, there = (SimpleNamespace(checksums=lambda found=found: found) for found in ({"a": "1"}, {"a": "2"}))
    monkeypatch.setattr(h200_laws, "connect", lambda args, name: (there, ""))
    with pytest.raises(InputError, match="tiny-bf16 holds other weights in 1 tensors; run its own laws first"):
        h200_laws.of_the_same_weights(here, None, "tiny-bf16")
    assert h200_laws.of_the_same_weights(there, None, "tiny-bf16") is there


@pytest.mark.parametrize(
    ("name", "cpu", "replayed", "wrong"),
    [
        ("tiny-bf16-graphs-chunk64", False, 3, 0), ("tiny-bf16-graphs-chunk64", False, 0, 1),
        ("tiny-bf16-default-chunk64", False, 0, 1), ("tiny-bf16-chunk64", False, 0, 0),
        ("tiny-bf16-graphs-chunk64", True, 0, 0),
    ],
)  # fmt: skip
def test_laws_of_graphs_that_did_not_run_show_nothing(monkeypatch, tmp_path, name, cpu, replayed, wrong):
    """Whatever SGLang's own warm-up has run before the laws."""
    said = {"prefills_from_graphs": 5 if replayed or wrong else None}

    def law():
        if replayed:
            said["prefills_from_graphs"] += replayed
        return Count(0, 1)

    engine = SimpleNamespace(identity=lambda: said), "cuda graph: True\nminiTransformer is live: spec"
    monkeypatch.setattr(h200_laws, "connect", lambda args, name: engine)
    monkeypatch.setattr(h200_laws, "of_the_same_weights", lambda *_: None)
    monkeypatch.setattr(h200_laws, "of_a_variant", lambda *_: {"a law": law})
    args = SimpleNamespace(cpu=cpu, long=[], only="*", json=tmp_path / "rows.jsonl")
    assert h200_laws.table(args, name, None) == wrong
    rows = h200_table.read(args.json)
    assert [row.get("prefills_from_graphs") for row in rows] == [None, replayed]
    assert rows[1]["decode_steps_from_graphs"] == 1


def test_a_difference_is_shown():
    row = {"engine": "tiny-bf16-graphs", "law": "two runs", "differing": 1, "of": 2}
    long = row | {"law": "long: two runs", "differing": 0, "engine": "tiny-bf16-graphs"}
    assert list(h200_table.laws_table([row, long]))[2].split(" | ")[1:4] == ["BF16", "1 of 2 differ", "2"]
    twin = row | {"engine": "tiny-bf16-graphs-bare-chunk16-tight", "differing": 0}
    assert list(h200_table.laws_table([row, twin]))[2].split(" | ")[5] == "2"
