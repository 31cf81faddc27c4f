"""Paths that are empty, and files and folders that two runs write at once."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.model.checkpoints import hf_config, hf_tensors, refused, write
from minitransformer.checkpoint_files import replacing_directory
from minitransformer.cli import main, parser
from minitransformer.errors import InputError
from minitransformer.files import holding, write_text
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.quantise import quantise
from minitransformer.plugins.sglang.send import by_disk
from minitransformer.recipe import get


def commands():
    return next(action for action in parser()._actions if action.dest == "run" or action.choices).choices


PATHS = [
    (name, action)
    for name, command in commands().items()
    for action in command._actions
    if action.metavar in ("FILE", "DIR", "A", "B")
]


def test_all_path_options_are_looked_at():
    found = {f"{name} {action.dest}" for name, action in PATHS}
    assert {"align model", "trace out", "sync directory", "quantize out", "compare b", "doctor json"} <= found


@pytest.mark.parametrize(("name", "action"), PATHS, ids=lambda x: getattr(x, "dest", x))
def test_an_empty_path_of_any_command_is_refused(name, action, capsys):
    words = [f"{action.option_strings[0]}="] if action.option_strings else {"a": ["", "x"], "b": ["x", ""]}[action.dest]
    with pytest.raises(SystemExit) as stop:
        main([name, *words])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    named = action.option_strings[0] if action.option_strings else action.metavar
    assert err.startswith(f"error: argument {named}: an empty path; name a file or a folder")


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = {name: os.stat(name).st_ino for name in os.listdir()}
    for call in (
        lambda: Qwen3MoeForCausalLM.from_pretrained(""),
        lambda: model.save_pretrained(""),
        lambda: quantise("", tmp_path / "out", get("nvfp4_per_token")),
        lambda: quantise(tmp_path / "here", "", get("nvfp4_per_token")),
        lambda: Learner(model).save(""),
        lambda: Learner(model).load(""),
        lambda: by_disk([], model.config, "").__enter__(),
    ):
        with pytest.raises(InputError, match="^an empty path; name a file or a folder"):
            call()
    for folder in (".", "/", tmp_path):
        with pytest.raises(InputError, match="is a directory; name a file"):
            Learner(model).save(folder)
    assert {name: os.stat(name).st_ino for name in os.listdir()} == before and os.listdir(tmp_path) == ["here"]


def the_second_of_two_is_refused(directory) -> None:
    """From its first byte on, and nothing of it is left; what the first writes is whole."""
    source, out = write(directory / "source", hf_config(), hf_tensors(hf_config())), directory / "new" / "out"
    with replacing_directory(out, ()) as new:
        (new / "first").write_text("1")
        refused(lambda: quantise(source, out, get("nvfp4_per_token")), "out: another run is writing it")
        (new / "last").write_text("2")
    assert os.listdir(directory / "new") == ["out"] and sorted(os.listdir(out)) == ["first", "last"]


def test_the_second_of_two_is_refused(tmp_path):
    the_second_of_two_is_refused(tmp_path)


def test_of_many_runs_at_once_one_is_done(tmp_path, capsys):
    source = write(tmp_path / "source", hf_config(), hf_tensors(hf_config()))
    begin = threading.Barrier(4)

    def one(_):
        begin.wait()
        try:
            return len(quantise(source, tmp_path / "out", get("nvfp4_per_token")))
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4)))
    others = [said for said in found if isinstance(said, str)]
    assert len(others) == 3 and sorted(os.listdir(tmp_path)) == ["out", "source"]
    assert all("another run is writing it" in said or "choose another place" in said for said in others), others
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out")


def test_a_rename_that_fails_gives_back_what_was_there(tmp_path, monkeypatch):
    """The old directory has made way by then; it must not stay under a hidden name."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("before")
    rename = Path.rename

    def fails(path, target):
        if ".new-" in path.name:
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(InputError, match="cannot be written.*nothing was changed"):
        with replacing_directory(tmp_path / "out", ["config.json"]) as new:
            (new / "config.json").write_text("after")
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "config.json").read_text() == "before"


@pytest.mark.parametrize("there", [False, True])
def test_what_comes_meanwhile_is_not_lost(tmp_path, there):
    model, out = tiny_model(), tmp_path / "out"
    if there:
        model.save_pretrained(out)
    with pytest.raises(InputError, match=r"not just a checkpoint \(notes\)"):
        with replacing_directory(out, ["config.json", "*.safetensors"]) as new:
            (new / "config.json").write_text("{}")
            out.mkdir(exist_ok=True)
            (out / "notes").write_text("mine")
    assert os.listdir(tmp_path) == ["out"] and (out / "notes").read_text() == "mine"


def test_files_of_two_runs_at_once_are_whole(tmp_path):
    texts = [letter * 300_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            list(pool.map(lambda text: write_text(tmp_path / "f", text), texts))
            assert (tmp_path / "f").read_text() in texts and os.listdir(tmp_path) == ["f"]


HOLD = """
import sys, time
from pathlib import Path
from minitransformer.files import holding
with holding(Path(sys.argv[1])) as alone:
    print(alone, flush=True)
    time.sleep(60)
"""


def test_a_lock_goes_with_its_process(tmp_path):
    """Also with one that is killed, and leaves the file."""
    lock = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with holding(lock) as alone, holding(lock, 0.2) as late:
            assert not alone and not late
        assert lock.exists()
        threading.Timer(0.3, os.kill, [process.pid, signal.SIGKILL]).start()
        with holding(lock, 30) as alone:
            assert alone and process.wait() == -signal.SIGKILL
    assert not lock.exists()


def test_a_lock_that_was_taken_away_is_nobodys(tmp_path, monkeypatch):
    """Opened before its holder removed it, locked after that: another file stands there by then, or none."""
    from minitransformer import files

    lock, real = tmp_path / "lock", files.fcntl.flock

    def late(file, how):
        monkeypatch.setattr(files.fcntl, "flock", real)
        lock.unlink()
        real(file, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with holding(lock) as alone:
        assert not alone
    with holding(lock, 1) as alone, holding(lock) as second:
        assert alone and not second


def test_where_there_are_no_locks_everybody_writes(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("minitransformer.files.fcntl.flock", none)
    with replacing_directory(tmp_path / "out", ()) as new:
        (new / "a").write_text("1")
    assert os.listdir(tmp_path) == ["out"]


def test_the_lock_file_of_another_user_can_be_held(tmp_path, monkeypatch):
    """What a killed run of theirs left: a file that this user may only read."""
    lock, real = tmp_path / "lock", os.open
    lock.touch(0o644)

    def mine_to_read(path, flags, *mode):
        if os.fspath(path) == str(lock) and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr("minitransformer.files.os.open", mine_to_read)
    with holding(lock) as alone, holding(lock) as second:
        assert alone and not second


@pytest.mark.parametrize("length", [200, 201, 240, 255])
def test_names_as_long_as_file_systems_take_them(tmp_path, length):
    name = "n" * length
    Learner(tiny_model()).save(tmp_path / name)
    write_text(tmp_path / name, "x")
    (tmp_path / name).unlink()
    with replacing_directory(tmp_path / name, ()) as new:
        (new / "a").write_text("1")
    assert os.listdir(tmp_path) == [name]
