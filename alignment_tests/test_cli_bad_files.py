"""The command line against hostile and odd files: one line and status 2, and outputs go where they were sent."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
from safetensors.torch import load_file

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.model.test_prompts import byte_tokenizer
from minitransformer.alignment.trace import Trace, stages_of
from minitransformer.cli import main
from minitransformer.sampler.sequence import Completion

DIGITS = "1" * 5000
DEEP = "[" * 100_000
PROMPT = '{"ids": [1, 2, 3]}\n'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "model"
    tiny_model(vocab_size=272).save_pretrained(path)
    byte_tokenizer(path)
    return path


@pytest.fixture
def run(capsys, model_dir, tmp_path):
    """run('score --json {out}/a.json') -> (status, stdout, stderr); {model} and {out} are filled in."""

    def call(line):
        capsys.readouterr()
        try:
            status = main(line.format(model=model_dir, out=tmp_path).split())
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def refused(run, line, *words):
    status, out, err = run(line)
    assert status == 2 and out == "", (status, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 600, err
    for word in words:
        assert word in err, err


GENERATE = "generate --model {model} --prompts {out}/p --max-new-tokens 1"
SCORE = "score --model {model} --input {out}/p"


@pytest.mark.parametrize(
    ("line", "content", "word"),
    [
        (GENERATE, f'{{"ids": [{DIGITS}]}}', "p:2: not valid JSON (an integer of thousands of digits)"),
        (GENERATE, f'{{"ids": {DEEP}', "p:2: not valid JSON (nested too deeply)"),
        (GENERATE, f'{{"ids": [{DIGITS[:4000]}]}}', "p:2: 111"),
        (GENERATE, '{"prompt": "a\\ud800"}', "p:2: U+D800 at character 1 is half of a surrogate pair"),
        (GENERATE, '{"ids": [1], "ids": [2]}', "p:2: the key 'ids' stands twice"),
        (SCORE, f'{{"ids": [1, {DIGITS}]}}', "p:2: not valid JSON"),
        (SCORE, f'{{"ids": {DEEP}', "p:2: not valid JSON"),
        (SCORE, '{"text": "\\udfffa"}', "p:2: text: U+DFFF at character 0"),
        (SCORE, '{"prompt": "a", "completion": "\\ud800"}', "p:2: completion: U+D800"),
        (SCORE, '{"ids": [1, 2], "temprature": 2}', "p:2: 'temprature' is not known beside ids"),
        (SCORE, '{"prompt": "a", "completion": "b", "ids": [1]}', "p:2: 'ids' is not known beside prompt"),
        (SCORE, '{"ids": [1, 2], "prompt_len": 2}', "p:2: 2 tokens"),
        (SCORE, '{"ids": [1, 2], "prompt_len": true}', "p:2: prompt_len = True"),
    ],
)
def test_bad_lines_are_named(run, tmp_path, line, content, word):
    (tmp_path / "p").write_text("\n" + content + "\n")
    refused(run, line + " --json {out}/new", word)
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize("content", [f'{{"vocab_size": {DIGITS}}}', '{"a": ' + DEEP])
def test_bad_config_is_named(run, tmp_path, content):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(content)
    (tmp_path / "p").write_text(PROMPT)
    refused(run, GENERATE.replace("{model}", "{out}/m"), "m/config.json: not valid JSON")


@pytest.mark.parametrize("options", [
    f"--page-size {10**12}", f"--page-size {10**30}", f"--page-size {10**4000}", f"--num-pages {10**12}",
    f"--num-pages {10**30} --page-size {10**12}", f"--page-size 1 --num-pages {10**9}",
])  # fmt: skip
def test_a_store_larger_than_the_memory_says_how_much_it_needs(run, tmp_path, options):
    (tmp_path / "p").write_text(PROMPT)
    refused(run, f"{GENERATE} {options}", "need", "for keys and values", "lower num_pages or page_size")


def test_sizes_without_a_cost_may_be_large(run, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    big = 10**30
    assert run(f"{GENERATE} --chunk-size {big} --max-batch-tokens {big} --max-sequences {big}")[0] == 0


def test_byte_order_marks_are_not_part_of_the_text(run, tmp_path):
    for name, mark in (("p", b""), ("q", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"hello\n")
    plain, marked = run(GENERATE), run(GENERATE.replace("/p", "/q"))
    assert plain == marked and plain[0] == 0
    (tmp_path / "p").write_bytes(b'\xef\xbb\xbf{"ids": [1, 2]}\n')
    assert run(SCORE)[0] == run(GENERATE)[0] == 0


def test_tokenizer_that_is_a_directory_or_a_broken_link(run, model_dir, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    shutil.copytree(model_dir, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    file.unlink()
    file.mkdir()
    refused(run, GENERATE.replace("{model}", "{out}/m"), "tokenizer.json: is not a file")
    file.rmdir()
    file.symlink_to("nowhere")
    refused(run, GENERATE.replace("{model}", "{out}/m"), "tokenizer.json: is not a file")


@pytest.mark.parametrize("value", ["1e-30", "1e7", "nan", "-1"])
def test_score_refuses_the_temperatures_that_sampling_refuses(run, tmp_path, value):
    (tmp_path / "p").write_text(PROMPT)
    refused(run, f"{SCORE} --temperature {value}", "temperature is")


def test_score_reads_what_generate_and_score_write(run, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    assert run(GENERATE + " --json {out}/g")[0] == 0
    assert json.loads((tmp_path / "g").read_text()).keys() == {field.name for field in fields(Completion)}
    status, first, _ = run("score --model {model} --input {out}/g")
    assert status == 0
    (tmp_path / "s").write_text(first)
    assert run("score --model {model} --input {out}/s") == (0, first, "")


def test_stages_that_this_model_lacks(run, model_dir, tmp_path):
    """Layer 1 is dense, and a BF16 recipe quantises nothing."""
    (tmp_path / "p").write_text(PROMPT)
    for stage in ("layers.1.router_logits", "layers.1.combine", "layers.0.gate_up_codes"):
        for command in ("align --no-contrast", "trace --out {out}/new"):
            line = command + " --model {model} --prompts {out}/p --stages " + stage
            refused(run, line, f"--stages {stage}: no such stage in this model")


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_per_token", "w4a16", "w4a8_mxfp8"])
def test_stages_of_a_model_are_those_that_it_traces(recipe):
    from minitransformer.recipe import RECIPES
    from minitransformer.sampler.sampler import Sampler

    if recipe not in RECIPES:
        recipe = next(name for name, r in RECIPES.items() if r.activations == "mxfp8")
    model, trace = tiny_model(), Trace()
    model.set_recipe(recipe)
    Sampler(model).generate([[1, 2, 3]], trace=trace)
    assert trace.stages == stages_of(model.config, model.recipe)


OPTIONS = (
    "max-new-tokens 16", "seed 0", "top-k 0", "top-p 1", "page-size 16", "num-pages 9", "chunk-size 64",
    "max-batch-tokens 512", "max-sequences 64", "no-prefix-cache", "no-cuda-graphs",
)  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_trace_of_the_learner_refuses_what_only_sampling_uses(run, tmp_path, option):
    """Also when the value given is the default."""
    (tmp_path / "p").write_text(PROMPT)
    line = "trace --model {model} --input {out}/p --out {out}/t --"
    refused(run, line + option, f"--{option.split()[0]} is for --prompts")
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize(
    "command", ["compare {out}/t {out}/t --json {out}/t", "compare {out}/t {out}/t --json {out}/l"]
)
def test_an_output_that_is_an_input_is_refused(run, tmp_path, command):
    (tmp_path / "p").write_text(PROMPT)
    assert run("trace --model {model} --input {out}/p --out {out}/t")[0] == 0
    (tmp_path / "l").symlink_to("t")
    before = (tmp_path / "t").read_bytes()
    refused(run, command, "is also an input")
    for line in (GENERATE + " --json {out}/p", SCORE + " --json {out}/p", SCORE + " --json {model}/config.json"):
        refused(run, line, "is also an input")
    refused(run, "trace --model {model} --prompts {out}/p --out {out}/p", "is also an input")
    assert (tmp_path / "t").read_bytes() == before and (tmp_path / "p").read_text() == PROMPT


def test_outputs_follow_links_and_keep_pipes(run, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    os.mkfifo(tmp_path / "pipe")
    read = {}
    for name, line in {"scores": SCORE + " --json", "trace": "trace --model {model} --input {out}/p --out"}.items():
        assert run(line + " {out}/link")[0] == 0
        assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "there") == ["file"]
        reader = threading.Thread(target=lambda name=name: read.update({name: (tmp_path / "pipe").read_bytes()}))
        reader.start()
        assert run(line + " {out}/pipe")[0] == 0
        reader.join()
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
        if name == "scores":
            assert read[name] == (tmp_path / "there" / "file").read_bytes()
    (tmp_path / "again").write_bytes(read["trace"])
    ours, theirs = load_file(tmp_path / "again"), load_file(tmp_path / "there" / "file")
    assert ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)


def test_standard_output_as_a_file_keeps_what_is_there(model_dir, tmp_path):
    """/dev/stdout that goes to a file: neither replaced nor cut off."""
    (tmp_path / "p").write_text(PROMPT)
    with open(tmp_path / "log", "w") as log:
        log.write("before\n")
        log.flush()
        command = [sys.executable, "-m", "minitransformer.cli", *GENERATE.format(model=model_dir, out=tmp_path).split()]
        subprocess.run([*command, "--json", "/dev/stdout"], check=True, stdout=log)
    first, table, *_, last = (tmp_path / "log").read_text().splitlines()
    assert first == "before" and table.startswith("[0] ") and json.loads(last)["prompt_ids"] == [1, 2, 3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_device_is_named(run, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    status, _, err = run(GENERATE + " --json /dev/full")
    assert status == 2 and err == "error: /dev/full: cannot be written (No space left on device)\n"


def test_traces_have_the_mode_of_other_files(run, tmp_path):
    (tmp_path / "p").write_text(PROMPT)
    before = os.umask(0o022)
    try:
        assert run("trace --model {model} --input {out}/p --out {out}/t")[0] == 0
        assert run(SCORE + " --json {out}/s")[0] == 0
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ts"] == [0o644, 0o644]


def test_memory_that_the_machine_lacks_is_one_line(run, tmp_path, monkeypatch):
    (tmp_path / "p").write_text(PROMPT)
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")):
        monkeypatch.setattr("minitransformer.learner.learner.Learner.score", lambda *a, error=error: _raise(error))
        refused(run, SCORE, "not enough memory")
    monkeypatch.setattr("minitransformer.learner.learner.Learner.score", lambda *a: _raise(RuntimeError("a fault")))
    status, _, err = run(SCORE)
    assert status == 70 and err.endswith("RuntimeError: a fault\n")


def _raise(error):
    raise error
