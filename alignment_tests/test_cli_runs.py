"""What a run on the command line says about itself: its seeds, its temperature, rows that it computed again."""

import json

import pytest

from alignment_tests.alignment.test_align import Flipping
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.test_cli import PROMPTS
from minitransformer.cli import main


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "model"
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture
def run(capsys, model_dir, tmp_path):
    """run('align ...') -> (status, stdout, stderr); {model}, {prompts} and {out} are filled in."""
    (tmp_path / "prompts").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))

    def call(line):
        capsys.readouterr()
        status = main(line.format(model=model_dir, prompts=tmp_path / "prompts", out=tmp_path).split())
        return status, *capsys.readouterr()

    return call


def test_each_request_has_a_seed_of_its_own(run, tmp_path):
    """Equal prompts are drawn apart, and request 1 of seed 3 is request 0 of seed 4."""
    (tmp_path / "p").write_text('{"ids": [1, 2, 3]}\n' * 2)
    tokens = {}
    for seed in (3, 4):
        assert run(f"generate --model {{model}} --prompts {{out}}/p --seed {seed} --json {{out}}/c")[0] == 0
        tokens[seed] = [json.loads(line)["token_ids"] for line in (tmp_path / "c").read_text().splitlines()]
    assert tokens[3][0] != tokens[3][1] == tokens[4][0]


@pytest.mark.parametrize("command", ["align --no-contrast --json", "trace --out"])
def test_rows_with_other_bits_when_computed_again_are_told(run, monkeypatch, tmp_path, command):
    monkeypatch.setattr("minitransformer.alignment.trace.Trace", Flipping)
    monkeypatch.setattr("minitransformer.alignment.align.Trace", Flipping)
    crowded = "--page-size 4 --chunk-size 8 --max-batch-tokens 16 --max-sequences 3 --num-pages 9 --max-new-tokens 16"
    status, out, err = run(f"{command} {{out}}/file --model {{model}} --prompts {{prompts}} {crowded}")
    assert status == 1
    if command.startswith("trace"):
        assert err.startswith("error: stage layers.1.o: rows that the sampler computed again have other bits")
        assert not (tmp_path / "file").exists()
    else:
        assert "computed again with other bits: layers.1.o" in out and "1 stages of the sampler itself" in out
        assert json.loads((tmp_path / "file").read_text())["equal"] is False


def test_scoring_at_another_temperature_than_was_sampled_at_is_told(run, tmp_path):
    """Its log-probs differ from those in the file, for no fault of either engine."""
    sampling = "generate --model {model} --prompts {prompts} --max-new-tokens 2 --json {out}/c.jsonl --temperature "
    for sampled, scored, told in (("0.7", "1", True), ("1", "0.7", True), ("0", "1", False), ("1", "0", False)):
        assert run(sampling + sampled)[0] == 0
        for command in ("score --json {out}/s.jsonl", "trace --out {out}/t.safetensors"):
            status, _, err = run(command + " --model {model} --input {out}/c.jsonl --temperature " + scored)
            said = f"c.jsonl:1: its log-probs are of the 'softmax of logits / {sampled}"
            assert status == 0 and (said in err and f"--temperature {scored}" in err if told else not err)


def test_a_sequence_longer_than_a_pack_is_scored_and_traced(capsys, tmp_path):
    tiny_model(max_positions=1200, num_layers=1, sparse_layers=(False,)).save_pretrained(tmp_path / "m")
    (tmp_path / "s").write_text(json.dumps({"ids": [i % 96 for i in range(1100)]}))
    assert main(f"score --model {tmp_path}/m --input {tmp_path}/s".split()) == 0
    assert len(json.loads(capsys.readouterr().out)["log_probs"]) == 1099
    assert main(f"trace --model {tmp_path}/m --input {tmp_path}/s --stages logits --out {tmp_path}/t".split()) == 0
