"""Requests that fail on the command line: the others are good and kept, stderr names the line, the exit status is 1.
Files that can't be written: one line, and what stood there still does.
"""

import json
import os
import resource

import pytest

from alignment_tests.sampler.test_bad_rows import BAD, GOOD, PLACES, exploding_model
from minitransformer.alignment.trace import Trace
from minitransformer.cli import main

SAID = PLACES[0, "router"][1]


def prepare(directory) -> str:
    """A model, three prompts of which the second fails on line 3, the good ones alone, a bad one alone."""
    exploding_model("bf16", 0, "router").save_pretrained(directory / "m")
    prompts = [json.dumps({"ids": ids}) for ids in (GOOD[0], [20, BAD], GOOD[2])]
    (directory / "p").write_text("\n".join(["", *prompts]))
    (directory / "good").write_text("\n".join(prompts[::2]))
    (directory / "bad").write_text(prompts[1])
    return f"--model {directory}/m --recipe nvfp4_per_token --max-new-tokens 4 --temperature 0"


def test_generate_writes_the_good_ones_and_reports_the_others(tmp_path, capsys):
    options = prepare(tmp_path)

    def run(name: str) -> tuple[int, list[dict], str]:
        line = f"generate {options} --prompts {tmp_path}/{name} --json {tmp_path}/out"
        status = main(line.split())
        return status, [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()], capsys.readouterr()

    status, lines, (out, err) = run("p")
    assert status == 1
    assert err == f"error: {tmp_path}/p:3: request 1: position 1, {SAID}\n"
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"] and "error" in out
    assert main(f"score --model {tmp_path}/m --input {tmp_path}/out".split()) == 2
    assert f"{tmp_path}/out:2: this request failed when it was generated" in capsys.readouterr().err
    want_status, want, _ = run("good")
    assert want_status == 0
    for got, line in zip(lines[::2], want, strict=True):
        assert got["token_ids"] == line["token_ids"] and got["log_probs"] == line["log_probs"]


def align_compares_the_others(directory) -> None:
    line = f"align {prepare(directory)} --no-contrast --json {directory}/out --prompts {directory}/"
    assert main((line + "p").split()) == 1
    found = json.loads((directory / "out").read_text())
    assert found["equal"] and found["log_prob_gap"]["learner"]["tokens"] == 8
    assert [request["error"] is None for request in found["requests"]] == [True, False, True]
    assert main((line + "good").split()) == 0
    alone = json.loads((directory / "out").read_text())
    rows = {stage["stage"]: stage["rows"] for stage in alone["stages"]}
    assert {stage["stage"]: stage["rows"] for stage in found["stages"]} == rows


def test_align_compares_the_others_and_reports_it(tmp_path, capsys):
    align_compares_the_others(tmp_path)
    out, err = capsys.readouterr()
    assert err == f"error: {tmp_path}/p:3: request 1: position 1, {SAID}\n"
    verdicts = [text for text in out.splitlines() if text.startswith("EQUAL: 0 of ")]
    assert len(verdicts) == 2 and verdicts[0].endswith("8 log-probs; 1 of 3 requests failed and are not compared")


def test_nothing_but_failures_is_nothing_to_compare(tmp_path, capsys):
    line = f"align {prepare(tmp_path)} --no-contrast --json {tmp_path}/out --prompts {tmp_path}/bad"
    assert main(line.split()) == 2
    assert f"{tmp_path}/bad:1: the prompt: request 0: position 1, {SAID}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_trace_writes_the_others_and_what_the_failed_one_had(tmp_path, capsys):
    line = f"trace {prepare(tmp_path)} --out {tmp_path}/out --prompts {tmp_path}/"
    assert main((line + "p").split()) == 1
    out, err = capsys.readouterr()
    assert out.endswith(" rows of 3 requests, 0.1 MiB\n") or "of 3 requests" in out
    assert err == f"error: {tmp_path}/p:3: request 1: position 1, {SAID}\n"
    trace = Trace.load(tmp_path / "out")
    assert trace.row("layers.0.post_norm", 1, 1) is not None and trace.row("layers.0.combine", 1, 1) is None
    assert trace.row("logits", 2, 0) is not None and trace.requests[1]["token_ids"] == []


@pytest.mark.parametrize("command", ["trace --input {0}/s --out", "score --input {0}/s --json"])
@pytest.mark.parametrize("ids, words", [([20, BAD, 1], f", position 1, {SAID}"), ([1] * 97, ": 97 tokens exceed")])
def test_a_sequence_that_fails_is_named_by_its_line(tmp_path, capsys, command, ids, words):
    exploding_model("bf16", 0, "router").save_pretrained(tmp_path / "m")
    (tmp_path / "s").write_text("\n".join(["", json.dumps({"ids": GOOD[0]}), "", json.dumps({"ids": ids})]))
    assert main(f"{command.format(tmp_path)} {tmp_path}/out --model {tmp_path}/m".split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/s:4: the sequence{words}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["trace --input {0}/s --out", "score --input {0}/s --json"])
def test_a_full_disk_is_one_line_and_keeps_what_is_there(tmp_path, capsys, command):
    exploding_model("bf16", 0, "router").save_pretrained(tmp_path / "m")
    (tmp_path / "s").write_text(json.dumps({"ids": GOOD[0] * 9}))
    (tmp_path / "out").write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # bytes, of any file: the error is that of a full disk
    try:
        assert main(f"{command.format(tmp_path)} {tmp_path}/out --model {tmp_path}/m".split()) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path}/out: cannot be written (") and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["m", "out", "s"] and (tmp_path / "out").read_text() == "before"


@pytest.mark.parametrize("name", ["a" * 255, "\u00e9" * 127])
@pytest.mark.parametrize("command", ["trace --input {0}/s --out", "score --input {0}/s --json"])
def test_the_longest_names_that_a_file_can_have(tmp_path, command, name):
    """What a file is called until it is whole must not be longer."""
    exploding_model("bf16", 0, "router").save_pretrained(tmp_path / "m")
    (tmp_path / "s").write_text(json.dumps({"ids": GOOD[0]}))
    assert main(f"{command.format(tmp_path)} {tmp_path}/{name} --model {tmp_path}/m".split()) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(["m", "s", name])
