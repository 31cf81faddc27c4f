"""Every report of a run that --allow-unverified let in says so: on the screen, in JSON, in trace files."""

import json

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from minitransformer import devices
from minitransformer.alignment.trace import Trace
from minitransformer.cli import main

WHY = "NVIDIA L4 has compute capability 8.9; no bits were compared on another GPU"
LINE = f"UNVERIFIED: {WHY}\n"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(line) -> its standard output, of commands whose device counts as one that was let in; {x} is {tmp}/x."""
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text('{"ids": [1, 2, 3]}\n{"ids": [4, 5]}\n')
    monkeypatch.setattr(devices, "unverified", lambda device: WHY)
    monkeypatch.setattr("minitransformer.plugins.sglang.sync.unverified", lambda device: WHY)
    monkeypatch.setattr(devices, "unverified_allowed", lambda: True)

    def call(line: str, status: int = 0) -> str:
        capsys.readouterr()
        words = line.split()
        words[1:1] = ["--model", str(tmp_path / "model")] if words[0] != "compare" else []
        assert main([word.format(tmp=tmp_path) for word in words]) == status
        out, err = capsys.readouterr()
        assert words[0] == "compare" or err.startswith(f"warning: unverified: {WHY}\n")
        return out

    return call


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_and_score_and_lines_that_say_so_are_scored_again(run, tmp_path):
    out = run("generate --prompts {tmp}/prompts --max-new-tokens 3 --json {tmp}/g.jsonl")
    assert out.startswith(LINE) and [item["unverified"] for item in lines_of(tmp_path / "g.jsonl")] == [WHY, WHY]
    out = run("score --input {tmp}/g.jsonl")
    assert [json.loads(line)["unverified"] for line in out.splitlines()] == [WHY, WHY]
    assert run("score --input {tmp}/g.jsonl --json {tmp}/s.jsonl") == ""
    assert [item["unverified"] for item in lines_of(tmp_path / "s.jsonl")] == [WHY, WHY]
    run("score --input {tmp}/s.jsonl")


def test_trace_and_compare(run, tmp_path, monkeypatch):
    out = run("trace --prompts {tmp}/prompts --max-new-tokens 3 --out {tmp}/a --stages logits")
    assert out.endswith(LINE) and out.count("\n") == 2
    assert Trace.load(tmp_path / "a").unverified == WHY
    monkeypatch.setattr(devices, "unverified", lambda device: None)
    Trace.load(tmp_path / "a").save(tmp_path / "again")
    assert Trace.load(tmp_path / "again").unverified == WHY
    assert main(f"trace --model {tmp_path}/model --prompts {tmp_path}/prompts --max-new-tokens 3 --stages logits "
                f"--out {tmp_path}/b".split()) == 0  # fmt: skip
    for pair, want in (("ab", [WHY, None]), ("ba", [None, WHY]), ("bb", [None, None])):
        out = run(f"compare {{tmp}}/{pair[0]} {{tmp}}/{pair[1]} --json {{tmp}}/c.json")
        found = json.loads((tmp_path / "c.json").read_text())
        assert found["equal"] and list(found["unverified"].values()) == want
        assert [line for line in out.splitlines() if line.startswith("UNVERIFIED")] == [
            f"UNVERIFIED: {tmp_path}/{one}: {WHY}" for one, why in zip(pair, want, strict=True) if why
        ]


def test_a_trace_that_says_it_with_control_characters_is_damaged(tmp_path, capsys):
    one = Trace()
    one.take("logits", one.keys.number([(0, 0)]), torch.zeros(1, 2))
    one.unverified = "\x1b[2J"
    one.save(tmp_path / "t")
    assert main(["compare", str(tmp_path / "t"), str(tmp_path / "t")]) == 2
    err = capsys.readouterr().err
    assert "a damaged trace (unverified is '" in err and "\x1b" not in err


def test_align_and_a_learner_elsewhere(run, tmp_path, monkeypatch):
    line = "align --prompts {tmp}/prompts --max-new-tokens 3 --no-contrast --stages logits --json {tmp}/a.json"
    assert f"\n{LINE}" in run(line) and json.loads((tmp_path / "a.json").read_text())["unverified"] == WHY
    monkeypatch.setattr(devices, "unverified", lambda device: None)
    assert main((line + f" --model {tmp_path}/model").format(tmp=tmp_path).split()) == 0
    assert json.loads((tmp_path / "a.json").read_text())["unverified"] is None


def test_sync(run, tmp_path):
    with Fake(tiny_model(1)) as server:
        assert LINE in run(f"sync --to {server.url} --json {{tmp}}/r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["unverified"] == WHY and report["equal"]


def test_the_learners_device_counts_where_it_is_another(monkeypatch):
    from minitransformer.cli import parser
    from minitransformer.commands import align

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "unverified", lambda device: WHY if device == gpu else None)
    monkeypatch.setattr(devices, "resolve", lambda name: gpu if name == "cuda" else torch.device(name))
    words = "align --model m --prompts p --learner-device"
    for name, want in (("cuda", WHY), ("cpu", None)):
        args = parser().parse_args([*words.split(), name])
        assert align._unverified(args, tiny_model()) == want
