"""report.py: what differs is never folded away, and text fits 100 columns, plain when piped."""

import io
import re

import pytest
from rich.console import Console

from minitransformer.alignment import report
from minitransformer.alignment.difference import StageResult
from minitransformer.alignment.gap import Gap
from minitransformer.alignment.trace import stage_names
from minitransformer.alignment.ulp import NAN_ULP

STAGES_OF_BF16 = [s for s in stage_names(30) if not s.endswith(("_codes", "_scales", "_outer"))]


def results(bad=(), absent=()):
    out = []
    for stage in STAGES_OF_BF16:
        if stage in absent:
            out.append(StageResult(stage, 0, 0, 0, 0, (), (), only_a=9))
        elif stage in bad:
            places, values = ((100, 1234, 151935), (100, 1234, 151936)), ((1.0, 1.0078125), (2.0, float("nan")))
            out.append(StageResult(stage, 290, 1_670_400, 12_345, NAN_ULP, places, values, only_b=32))
        else:
            out.append(StageResult(stage, 290, 53_452_800, 0, 0, (), (), only_b=32))
    return out


def text(rows, columns=report.STAGE_COLUMNS, terminal=False):
    file = io.StringIO()
    report.print_table(Console(file=file, width=100, force_terminal=terminal, no_color=True), columns, rows)
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) if terminal else file.getvalue()


def lines_of(rows, kind):
    return [row for row in rows if row[0] == kind]


def test_one_line_a_kind_when_all_is_equal():
    rows = report.stage_rows(results())
    assert len(rows) == 20 and all(row[-1] == "equal" for row in rows)
    assert lines_of(rows, "qkv")[0][:4] == ["qkv", "0-29", "8,700", "0/960"]
    assert [row[0] for row in rows[:3]] == ["embedding", "input_norm", "qkv"] and rows[-1][0] == "log_prob"


def test_differing_layers_have_their_own_lines():
    rows = lines_of(report.stage_rows(results(bad={"layers.3.qkv", "layers.17.qkv"})), "qkv")
    assert [row[1] for row in rows] == ["0-2,4-16,18-29", "3", "17"]
    assert rows[1][5:] == ["12,345", "NaN", "r100 p1234 e151935"]


def test_a_difference_that_spreads_does_not_flood_the_screen():
    rows = lines_of(report.stage_rows(results(bad={f"layers.{i}.o" for i in range(5, 30)})), "o")
    assert [row[1] for row in rows] == ["0-4", "5", "6-29"] and rows[2][5] == f"{24 * 12345:,}"


def test_a_stage_without_rows_is_never_called_equal():
    rows = lines_of(report.stage_rows(results(absent={"logits"})), "logits")
    assert rows[0][-1] == "NOT COMPARED" and rows[0][3] == "9/0"


def test_full_prints_every_layer():
    assert len(report.stage_rows(results(), full=True)) == len(STAGES_OF_BF16) == 484


@pytest.mark.parametrize("terminal", [False, True])
def test_fits_100_columns(terminal):
    bad = {f"layers.{i}.routing_weights" for i in range(0, 30, 2)} | {"logits"}
    out = text(report.stage_rows(results(bad)), terminal=terminal)
    assert max(map(len, out.splitlines())) <= 100 and "r100 p1234 e151935" in out
    gaps = [report.gap_row("learner", Gap(10**6, 0, 0, 0, 0, 0)), report.gap_row("transformers, BF16", "x" * 60)]
    assert max(map(len, text(gaps, report.GAP_COLUMNS, terminal).splitlines())) <= 100


def test_piped_text_is_plain():
    out = text(report.stage_rows(results(bad={"layers.3.qkv"})))
    assert out.isascii() and "\x1b" not in out
    assert (
        out.splitlines()[0].split() == "stage layers rows a/b only elements differing max ulp first difference".split()
    )


def test_the_row_of_a_gap():
    row = report.gap_row("transformers, BF16", Gap(112, 111, 0.3164, 0.0531, 0.00012, 0.0268))
    assert row == ["transformers, BF16", "112", "111", "0.316", "0.0531", "1.20e-04", "2.68 %"]
    assert "not run: not installed" in text([report.gap_row("transformers, BF16", "not installed")], report.GAP_COLUMNS)


def test_the_first_values_that_differ_are_named():
    lines = report.first_values(results(bad={"logits"})[-2], "sampler", "learner")
    assert lines[0] == "first diverging stage: logits (12,345 of 1,670,400 elements differ)"
    assert lines[1] == "  request 100, position 1234, element 151935:  sampler 1.0  learner 1.0078125"
