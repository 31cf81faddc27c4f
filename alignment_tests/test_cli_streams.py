"""Standard streams that are closed, full, or whose reader goes away: what was computed is not lost, and the exit
status does not say that something differs."""

import json
import os
import subprocess
import sys

import pytest

from alignment_tests.learner.tiny import tiny_model
from minitransformer.cli import main
from minitransformer.commands import common
from minitransformer.errors import InputError

# Buffered, as for users: what a failed write leaves in the buffer is tried again at exit.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PROMPTS = 400  # whose lines are more than a pipe holds
COMMANDS = {
    "generate": "generate --model {0}/m --prompts {0}/p --max-new-tokens 1 --json {0}/out",
    "align": "align --model {0}/m --prompts {0}/few --no-contrast --full --json {0}/out",
    "compare": "compare {0}/trace {0}/trace --full --json {0}/out",
    "quantize": "quantize --model {0}/m --out {0}/q --json {0}/out",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams")
    tiny_model(num_layers=2, sparse_layers=(True, True)).save_pretrained(path / "m")
    (path / "few").write_text('{"ids": [1, 2, 3]}\n')
    (path / "p").write_text('{"ids": [1, 2, 3]}\n' * PROMPTS)
    command("trace --model {0}/m --prompts {0}/few --out {0}/trace", path, stdout=subprocess.DEVNULL)
    return path


def command(line: str, folder, **streams) -> subprocess.CompletedProcess:
    words = line.format(folder).split()
    return subprocess.run(
        [sys.executable, "-m", "minitransformer.cli", *words], timeout=300, env=ENVIRONMENT, **streams
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away_takes_no_result_along(folder, name):
    """As with `| head -1`: the file is there and whole, and 141 is neither "differs" (1) nor "bad input" (2)."""
    (folder / "out").unlink(missing_ok=True)
    words = COMMANDS[name].format(folder).split()
    run = [sys.executable, "-m", "minitransformer.cli", *words]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        process.stdout.close()
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (141, b"")
    text = (folder / "out").read_text()
    lines = [json.loads(line) for line in text.splitlines()] if name == "generate" else [json.loads(text)]
    assert len(lines) == (PROMPTS if name == "generate" else 1)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
@pytest.mark.parametrize("line, status", [("compare {0}/trace {0}/trace", 0), ("compare {0}/trace {0}/none", 2)])
def test_closed_streams_change_no_exit_status(folder, closed, line, status):
    words = [sys.executable, "-m", "minitransformer.cli", *line.format(folder).split()]
    done = subprocess.run(f"{' '.join(words)} {closed}", shell=True, capture_output=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == status
    assert done.stdout == b"" or status == 0, "an error went to standard output, because stderr is closed"


@pytest.mark.parametrize("line", ["compare {0}/trace {0}/none", "align --model {0}/none --prompts {0}/few"])
def test_an_error_that_nobody_can_read_is_bad_input_all_the_same(folder, line):
    with open("/dev/full", "w") as full:
        assert command(line, folder, stderr=full).returncode == 2
    read, write = os.pipe()
    os.close(read)
    try:
        assert command(line, folder, stderr=write).returncode == 2
    finally:
        os.close(write)


def test_a_full_standard_output_is_told(folder):
    with open("/dev/full", "w") as full:
        done = command("recipes", folder, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, b"error: No space left on device\n")


def test_a_warning_that_nobody_can_read_costs_no_result(folder):
    (folder / "cold").write_text('{"prompt_ids": [1, 2], "token_ids": [3], "log_prob_of": "temperature 0.5"}\n')
    line = "score --model {0}/m --input {0}/cold"
    told = command(line, folder, capture_output=True)
    assert told.stderr.startswith(b"warning: ")
    with open("/dev/full", "w") as full:
        done = command(line, folder, stderr=full, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, told.stdout)


def test_a_fault_of_the_program_is_not_a_difference(monkeypatch, capsys):
    """Nor is one that only speaks of memory a lack of it."""
    for error in (ZeroDivisionError(), RuntimeError("unsupported memory format")):

        def fails(args, error=error):
            raise error

        monkeypatch.setattr("minitransformer.commands.recipes.run", fails)
        assert main(["recipes"]) == 70
        assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


def test_a_command_with_progress_runs_without_stderr(folder):
    words = f"{sys.executable} -m minitransformer.cli score --model {folder}/m --input {folder}/few 2>&-"
    done = subprocess.run(words, shell=True, capture_output=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0 and len(json.loads(done.stdout)["log_probs"]) == 2


def test_a_file_that_cannot_be_written_leaves_the_screen(tmp_path):
    shown = []
    with pytest.raises(InputError, match="cannot be written"):
        common.report(tmp_path / "none" / "file", "text", lambda: shown.append(1))
    assert shown == [1]
