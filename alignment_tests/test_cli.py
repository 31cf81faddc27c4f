"""The command line: each command end to end on a tiny checkpoint, and one line for each kind of bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from minitransformer.alignment import align as align_module
from minitransformer.cli import main, parser

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 30, 31], [11]]
COMMANDS = ("align", "generate", "score", "trace", "compare", "sync", "quantize", "recipes", "describe", "doctor")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "model"
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))
    return path


@pytest.fixture
def run(capsys, model_dir, prompts, tmp_path):
    """run('align --json {out}/a.json') -> (status, stdout, stderr); {model}, {prompts} and {out} are filled in."""

    def call(line):
        capsys.readouterr()
        try:
            status = main(line.format(model=model_dir, prompts=prompts, out=tmp_path).split())
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_help_does_not_wait_for_torch():
    code = (
        "import sys\nfrom minitransformer.cli import main\n"
        "try: main(['{}', '--help'])\nexcept SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules and 'rich' not in sys.modules"
    )
    for command in COMMANDS:
        subprocess.run([sys.executable, "-c", code.format(command)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(run, command):
    status, out, _ = run(f"{command} --help")
    assert status == 0
    lines = re.findall(r"^  minitransformer (.*)$", out.split("example:")[1], re.MULTILINE)
    assert any(line.startswith(command) for line in lines)
    for line in lines:
        parser().parse_args(line.split())


@pytest.mark.parametrize("command", ["align", "generate", "trace"])
def test_help_says_the_ranges_of_sampling(run, command):
    text = " ".join(run(f"{command} --help")[1].split())
    assert "0 < P <= 1" in text and "1e-6 to 1e6, or 0 for greedy" in text and "requests are preempted" in text


def test_examples_name_the_checkpoint_that_the_readme_makes():
    root = Path(__file__).resolve().parent.parent
    for page in (root / "README.md", *(root / "examples").glob("*.py")):
        named = re.findall(r"(?:rl_step|make_demo_checkpoint)\.py.* (?:--model|--out) (\S+)", page.read_text())
        assert set(named) <= {"demo/checkpoint"}, page


def test_align_agrees_and_says_so(run, tmp_path):
    line = "align --model {model} --prompts {prompts} --max-new-tokens 5 --page-size 2 --chunk-size 4"
    status, out, err = run(line + " --max-batch-tokens 4 --no-contrast --json {out}/a.json")
    assert status == 0 and err == ""
    assert "EQUAL: 0 of " in out and out.isascii() and "\x1b" not in out
    assert re.search(r"^learner +15 +0 +0 +0 +0 +0.00 %$", out, re.MULTILINE)
    assert "not run: left out on request" in out
    assert max(map(len, out.split("stage ")[1].splitlines())) <= 100
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["equal"] and found["log_prob_gap"]["learner"]["tokens"] == 15
    assert sum(r["cached_tokens"] for r in found["requests"]) > 0
    assert {s["stage"] for s in found["stages"]} > {"embedding", "layers.2.combine", "log_prob"}
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_align_sees_a_difference(run, monkeypatch, tmp_path):
    class Other(align_module.Learner):
        def score(self, *args, **kwargs):
            scores = super().score(*args, **kwargs)
            scores[1].view(torch.int32)[2] ^= 1
            kwargs["trace"].note_log_probs(7, [1], [0.5])
            return scores

    monkeypatch.setattr(align_module, "Learner", Other)
    line = "align --model {model} --prompts {prompts} --max-new-tokens 5 --no-contrast --json {out}/a.json"
    status, out, _ = run(line)
    assert status == 1 and "DIFFERENT: " in out and "1 of 15 log-probs" in out
    assert json.loads((tmp_path / "a.json").read_text())["equal"] is False


def test_generate_score_trace_compare(run, tmp_path):
    """generate's log-probs are score's; the sampler's trace equals the learner's; a flipped bit is named."""
    common = "--model {model} --prompts {prompts} --max-new-tokens 4 --seed 3 --temperature 0.7"
    status, out, _ = run("generate " + common + " --json {out}/c.jsonl")
    assert status == 0 and out.startswith("[0] 1 2 3 4 5 6 7 8 9  (4 tokens, length")
    status, out, err = run("score --model {model} --input {out}/c.jsonl --temperature 0.7")
    assert status == 0 and err == ""
    generated = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    scored = [json.loads(line) for line in out.splitlines()]
    assert [g["log_probs"] for g in generated] == [s["log_probs"] for s in scored]
    assert [g["prompt_ids"] + g["token_ids"] for g in generated] == [s["ids"] for s in scored]

    assert run("trace " + common + " --out {out}/a.safetensors")[0] == 0
    assert run("trace --model {model} --input {out}/c.jsonl --temperature 0.7 --out {out}/b.safetensors")[0] == 0
    status, out, _ = run("compare {out}/a.safetensors {out}/b.safetensors --json {out}/r.json")
    assert status == 0 and "no element differs" in out
    assert json.loads((tmp_path / "r.json").read_text())["first_diverging_stage"] is None

    from minitransformer.alignment.trace import Trace

    trace = Trace.load(tmp_path / "b.safetensors")
    trace.row("layers.1.qkv", 1, 5).view(torch.int16)[0, 3] ^= 1
    trace.requests[2]["token_ids"][1] += 1
    trace.save(tmp_path / "b.safetensors")
    status, out, _ = run("compare {out}/a.safetensors {out}/b.safetensors")
    assert status == 1 and "first diverging stage: layers.1.qkv (1 of" in out
    assert "request 1, position 5, element 3:" in out and "request 2: the ids differ from position 2 on" in out


def test_score_takes_ids_whole_or_in_two_parts(run, tmp_path):
    (tmp_path / "s.jsonl").write_text('{"ids": [1, 2, 3]}\n\n{"prompt_ids": [1, 2], "token_ids": [3]}\n')
    status, out, _ = run("score --model {model} --input {out}/s.jsonl --json {out}/o.jsonl")
    assert status == 0 and out == ""
    whole, end = (json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines())
    assert whole["prompt_len"] == 1 and len(whole["log_probs"]) == 2 and end["log_probs"] == whole["log_probs"][1:]


def test_prompts_as_text(run, model_dir, tmp_path):
    """With a tokenizer in the checkpoint, text goes in and comes out."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.copytree(model_dir, tmp_path / "text")
    tokenizer.save(str(tmp_path / "text" / "tokenizer.json"))
    (tmp_path / "p.txt").write_text("w5 w6\nw7\n")
    line = "generate --model {out}/text --prompts {out}/p.txt --max-new-tokens 2 --temperature 0"
    status, out, _ = run(line)
    assert status == 0 and out.startswith("[0] 'w5 w6'  (2 tokens") and re.search(r"^w\d+ w\d+$", out, re.MULTILINE)
    (tmp_path / "s.jsonl").write_text('{"prompt": "w5 w6", "completion": "w7"}\n{"text": "w5 w6 w7"}\n')
    status, out, _ = run("score --model {out}/text --input {out}/s.jsonl")
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["ids"] == second["ids"] == [5, 6, 7] and first["log_probs"] == second["log_probs"][1:]


ALIGN = "align --model {model} --prompts {prompts} --no-contrast --json {out}/new.json"
BAD = [
    ("align --model {model} --prompts {prompts} --device gpu", "device 'gpu' is not known; choose cpu, cuda or cuda:N"),
    ("align --model {model} --prompts {prompts} --learner-device mps", "device 'mps': the operators run on cpu and"),
    ("", "arguments are required"),
    ("dance", "invalid choice: 'dance'"),
    ("align --model {model}", "--prompts"),
    (ALIGN + " --max-new-tokens many", "invalid int value: 'many'"),
    (ALIGN + " --max-new-tokens 0", "max_new_tokens is 0"),
    (ALIGN + " --temperature -1", "temperature"),
    (ALIGN + " --temperature nan", "temperature"),
    (ALIGN + " --top-p 0", "top_p is 0.0"),
    (ALIGN + " --top-k -2", "top_k is -2"),
    (ALIGN + " --seed -1", "seed"),
    (ALIGN + " --page-size 0", "page_size is 0"),
    (ALIGN + " --num-pages 1 --page-size 2", "pages"),
    (ALIGN + " --stages layers.9.qkv", "--stages layers.9.qkv: no such stage"),
    (ALIGN + " --stages layers.1.router_logits", "--stages layers.1.router_logits: no such stage in this model"),
    (ALIGN.replace("{prompts}", "{out}/none"), "none: cannot be read"),
    (ALIGN.replace("{prompts}", "{out}/empty"), "empty: holds no prompt"),
    (ALIGN.replace("{prompts}", "{out}/text"), "text:1: the checkpoint has no tokenizer.json"),
    (ALIGN.replace("{prompts}", "{out}/outside"), "outside:1: 96 is not an id"),
    (ALIGN.replace("{prompts}", "{out}/long"), "long:2: the prompt has 97 tokens"),
    (ALIGN.replace("{model}", "{out}"), "config.json"),
    (ALIGN.replace("{model}", "{out}/none"), "none: no such directory"),
    (ALIGN.replace("{out}/new.json", "{out}/none/new.json"), "is not a directory that can be written"),
    (ALIGN.replace("{out}/new.json", "{out}"), "is a directory"),
    ("score --model {model} --input {out}/text --json {out}/new.json", "text:1: not valid JSON"),
    ("score --model {model} --input {out}/one --json {out}/new.json", "one:1: 1 tokens"),
    ("score --model {model} --input {out}/bool --json {out}/new.json", "bool:1: ids must be a list of ids"),
    ("score --model {model} --input {out}/list --json {out}/new.json", "list:1: expected"),
    ("score --model {model} --input {out}/empty --json {out}/new.json", "empty: holds no line"),
    ("score --model {model} --input {out}/two --temperature -1 --json {out}/new.json", "temperature"),
    ("trace --model {model} --out {out}/new.safetensors", "--prompts --input"),
    ("trace --model {model} --prompts {prompts} --input {prompts} --out {out}/new", "not allowed with"),
    ("trace --model {model} --prompts {prompts} --stages lgits --out {out}/new.safetensors", "no such stage"),
    ("compare {out}/text {out}/text", "not a readable safetensors"),
    ("compare {out}/none {out}/text", "none: no such trace file"),
    ("compare {model}/model.safetensors {out}/text", "not a trace"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_input_is_one_line_status_2_and_nothing_written(run, tmp_path, line, message):
    files = {
        "empty": "\n", "text": "hello\n", "outside": '{"ids": [96]}\n', "long": f'\n{{"ids": {[1] * 97}}}\n',
        "one": '{"ids": [1]}\n', "two": '{"ids": [1, 2]}\n', "bool": '{"ids": [true, 2]}\n', "list": "[1, 2]\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    before = sorted(os.listdir(tmp_path))
    status, out, err = run(line)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert sorted(os.listdir(tmp_path)) == before


def test_traces_with_nothing_in_common_are_refused(run, tmp_path):
    common = "trace --model {model} --prompts {prompts} --max-new-tokens 1 --out {out}/"
    run(common + "a --stages logits")
    run(common + "b --stages embedding")
    status, out, err = run("compare {out}/a {out}/b")
    assert status == 2 and "nothing was compared" in err and out == ""


def test_status_of_the_installed_command(model_dir, tmp_path):
    """The module as a program: the status reaches the shell."""
    done = subprocess.run(
        [sys.executable, "-m", "minitransformer.cli", "compare", "x", "y"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: x: no such trace file")
