"""What docs/sglang.md says of the laws on an H200 is what was written there, and nothing in it differs."""

from pathlib import Path

from alignment_tests.plugin import h200_table

PAGE = (Path(__file__).resolve().parents[2] / "docs/sglang.md").read_text("utf-8")
FILES = h200_table.LAWS, h200_table.CPU_LAWS, h200_table.STOCK, h200_table.GSM8K


def test_the_page_says_what_the_results_say():
    laws, cpu, stock, gsm8k = map(h200_table.read, FILES)
    tables = [h200_table.laws_table(laws), h200_table.laws_table(cpu), h200_table.syncs_table(laws)]
    tables += [h200_table.prefill_table(stock), h200_table.stock_table(stock), h200_table.gsm8k_table(gsm8k)]
    for table in tables:
        lines = list(table)
        assert len(lines) > 2
        assert [line for line in lines if line not in PAGE] == []


def test_nothing_differs():
    laws, cpu, stock, gsm8k = map(h200_table.read, FILES)
    rows = laws + cpu + gsm8k + [row for row in stock if "law" in row]
    kinds = ("differing", "learner_differing", "unlike_stages")
    assert [row for row in rows if any(row.get(kind) for kind in kinds)] == []
    ours = [row for row in laws if row.get("in_process") and "route" in row]
    assert ours and not [
        row for row in ours if row["decode_differing"] or (row["moved"] > 0) == (row["weights"] == "equal")
    ]
    assert [row for row in rows if not row.get("verdict", "EQUAL").startswith("EQUAL")] == []
    assert all(row["of"] > 0 for row in rows if "law" in row)
    assert {row["device"] for row in laws} == {"NVIDIA H200"}


def test_a_difference_is_shown():
    row = {"engine": "tiny-bf16-graphs", "law": "two runs", "differing": 1, "of": 2}
    long = row | {"law": "long: two runs", "differing": 0, "engine": "tiny-bf16-graphs"}
    assert list(h200_table.laws_table([row, long]))[2].split(" | ")[1:4] == ["BF16", "1 of 2 differ", "2"]
    twin = row | {"engine": "tiny-bf16-graphs-bare-chunk16-tight", "differing": 0}
    assert list(h200_table.laws_table([row, twin]))[2].split(" | ")[5] == "2"
