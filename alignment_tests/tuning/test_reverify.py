"""The first use of a GPU under versions that were not verified: compared once, kept, or refused by name."""

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from alignment_tests.mutations import Mutation, assert_caught, patched
from minitransformer import devices
from minitransformer.cli import main
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.ops.gpu import device
from minitransformer.tuning import checks, machine, reverify, selfcheck, table
from minitransformer.tuning.selfcheck import Pair

HOME = torch.device("cuda", 0)
GOOD = torch.tensor([[1.0, 2.0]])
NEW = {"torch": "2.99.0"}


class Gpu:
    """A Hopper GPU that isn't there: its versions, and self-checks that say `got` of one operator."""

    def __init__(self, monkeypatch):
        self.versions, self.got, self.runs, self.capturing = dict(table.read(table.SHIPPED).machine), GOOD, 0, False
        monkeypatch.setattr(machine, "gpu", lambda home: self.versions)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda home=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(device, "check", lambda home: None)
        monkeypatch.setattr(reverify, "_all", lambda home: list(reverify.results(home)))
        monkeypatch.setattr(selfcheck, "CHECKS", {"rope": self.check, "router": lambda home: iter(())})

    def check(self, home):
        self.runs += 1
        before = home in device._verified
        device._admit("rope", home)  # the operator's own border
        assert (home in device._verified) == before
        yield Pair("first", [GOOD], [GOOD])
        if isinstance(self.got, Exception):
            raise self.got
        yield Pair("two rows", [self.got], [GOOD])

    def forget(self, **versions):
        """As a new process, in which other versions may be installed."""
        self.versions = self.versions | versions
        reverify._settled.clear(), device._verified.clear(), devices._refused.clear()
        reverify.unlike.cache_clear(), devices.unverified.cache_clear(), devices.allow_unverified(False)

    def use(self) -> list[str]:
        """Warnings of an operator's launch."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            device._admit("linear", HOME)
        return [str(w.message) for w in told]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Gpu(monkeypatch)
    made.forget()
    yield made
    made.forget()


def stamps(tmp_path):
    return list((tmp_path / "minitransformer" / "verified").glob("*"))


def test_on_verified_versions_nothing_runs(gpu, tmp_path):
    gpu.got = GOOD + 1
    assert gpu.use() == [] and gpu.runs == 0 and HOME in device._verified and not stamps(tmp_path)
    gpu.forget(environment="CUBLAS_WORKSPACE_CONFIG=:4096:8")  # of libraries: choice.py
    assert gpu.use() == [] and gpu.runs == 0


def test_on_others_every_operator_is_compared_once_and_that_is_kept(gpu, tmp_path):
    gpu.forget(**NEW)
    (told,) = gpu.use()
    assert "torch 2.99.0, the table has 2.11.0" in told and "compared with the CPU now" in told
    assert gpu.runs == 1 and HOME in device._verified and gpu.use() == [] and gpu.runs == 1
    (stamp,) = stamps(tmp_path)
    gpu.forget()
    assert gpu.use() == [] and gpu.runs == 1, "a new process honours the stamp"
    stamp.write_text(stamp.read_text()[:40])
    gpu.forget()
    assert len(gpu.use()) == 1 and gpu.runs == 2, "half a stamp is none"


def stale_stamps_are_none(gpu):
    for n, versions in enumerate(({"torch": "2.99.0"}, {"triton": "3.9"}, {"cuda": "1"}, {"gpu": "NVIDIA H100"}), 1):
        gpu.runs = 0
        gpu.forget(**versions)
        gpu.use()
        assert gpu.runs == 1, f"{versions} were not compared ({n})"


def test_another_driver_gets_the_same_machine_code(gpu):
    gpu.forget(driver="1")
    assert gpu.use() == [] and gpu.runs == 0


def test_a_stamp_of_other_versions_or_sources_is_none(gpu, monkeypatch):
    stale_stamps_are_none(gpu)
    monkeypatch.setattr(reverify, "sources", lambda: "of another day")
    gpu.forget()
    gpu.use()
    assert gpu.runs == 2


def wrong_bits_are_refused(gpu):
    gpu.forget(**NEW)
    gpu.got = torch.tensor([[1.0, 2.5]])
    why = r"linear: cuda:0: NVIDIA H200 has not the spec's bits .*torch 2.99.0.*: rope, two rows: row 0, column 1: "
    for _ in range(2):
        try:
            gpu.use()
        except UnsupportedDevice as error:
            assert re.match(why + r"0x40200000 where the spec says 0x40000000 .*--allow-unverified", str(error)), error
        else:
            raise AssertionError("an operator with other bits ran")
    assert gpu.runs == 1


def test_an_operator_with_other_bits_is_refused_by_name(gpu, tmp_path):
    wrong_bits_are_refused(gpu)
    assert not stamps(tmp_path) and HOME not in device._verified
    devices.allow_unverified()
    assert gpu.use() == [] and gpu.runs == 1
    assert "rope, two rows" in devices.unverified(HOME), "reports carry the sentence"
    gpu.forget()
    devices.allow_unverified()
    assert any(told.startswith("unverified: NVIDIA H200 has not") for told in gpu.use()) and gpu.runs == 2


def test_trusting_other_versions_is_caught(gpu):
    trusting = patched(machine, "differences", lambda here, there: [])
    assert_caught(Mutation("trusts all versions", "wrong bits", trusting, lambda: wrong_bits_are_refused(gpu)))


def test_a_refused_gpu_is_refused_by_name_of_the_device_too(gpu, monkeypatch):
    wrong_bits_are_refused(gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="rope, two rows.*use --device cpu, or --allow-unverified"):
        devices.resolve("cuda")


def test_what_does_not_run_is_refused_and_memory_is_no_finding(gpu):
    gpu.forget(**NEW)
    gpu.got = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(InputError, match="memory in the self-check of rope: .*; stop what else runs on this GPU"):
        gpu.use()
    gpu.got = AttributeError("module 'triton' has no attribute 'x'")
    with pytest.raises(UnsupportedDevice, match="rope, after 'first': AttributeError: module 'triton' has no"):
        gpu.use()
    assert gpu.runs == 2


def test_under_capture_nothing_is_compared_nor_trusted(gpu):
    gpu.forget(**NEW)
    gpu.capturing = True
    with pytest.raises(UnsupportedDevice, match="torch 2.99.0.*while a CUDA graph is captured; run an operator once"):
        gpu.use()
    assert gpu.runs == 0 and HOME not in device._verified
    gpu.capturing = False
    gpu.use()
    gpu.forget()
    gpu.capturing = True
    assert gpu.use() == [] and gpu.runs == 1, "a stamp serves a capture too"


def test_two_threads_wait_for_one_answer(gpu, monkeypatch):
    gpu.forget(**NEW)
    started, go, real = threading.Event(), threading.Event(), gpu.check

    def slow(home):
        started.set(), go.wait(10)
        yield from real(home)

    monkeypatch.setattr(selfcheck, "CHECKS", {"rope": slow})
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore")
        first = pool.submit(device._admit, "linear", HOME)
        assert started.wait(10)
        second = pool.submit(device._admit, "linear", HOME)
        assert not second.done()
        go.set()
        first.result(10), second.result(10)
    assert gpu.runs == 1


def test_a_cache_that_cannot_be_written_is_no_error(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        gpu.runs = 0
        gpu.forget(**NEW)
        assert len(gpu.use()) == 1 and gpu.runs == 1 and HOME in device._verified


@pytest.fixture
def doctor(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "facts", lambda home: gpu.versions)
    monkeypatch.setattr(checks, "_choices", lambda *args: iter(()))
    monkeypatch.setattr(checks, "_offline", lambda: checks.Check("kernels compile", "ok", ""))
    return lambda: main(["doctor", "--seed", "1"])


def test_doctor_has_a_row_for_each_operator(doctor, gpu, capsys, tmp_path):
    assert doctor() == 0
    out = capsys.readouterr().out
    assert "ok       rope: 4 outputs compared with the CPU's, none differs" in out and "versions" not in out
    assert not stamps(tmp_path), "verified versions need none"


def test_doctor_warns_of_other_versions_and_its_answer_is_kept(doctor, gpu, capsys, tmp_path):
    gpu.forget(**NEW)
    assert doctor() == 0
    out = capsys.readouterr().out
    assert "warning  versions: not those that were verified (torch 2.99.0, the table has 2.11.0" in out
    assert len(stamps(tmp_path)) == 1 and gpu.use() == [] and gpu.runs == 1
    gpu.got = -GOOD
    assert doctor() == 1
    out = capsys.readouterr().out
    assert "failed   rope: two rows: row 0, column 0: 0xbf800000 where the spec says 0x3f800000 (2 of 2" in out
    assert out.splitlines()[-1].startswith("1 of ") and not stamps(tmp_path), "an old stamp is taken away"
