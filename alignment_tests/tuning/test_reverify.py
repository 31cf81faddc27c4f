"""The first use of a GPU under versions that were not verified: compared once, kept, or refused by name."""

import contextlib
import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's modules need Triton")

from alignment_tests.mutations import Mutation, assert_caught, patched
from alignment_tests.tuning.fake_gpu import GOOD, HOME, NEW
from minitransformer import devices
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.files import holding
from minitransformer.ops.gpu import device
from minitransformer.tuning import machine, reverify, selfcheck


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


def test_a_warning_that_is_an_error_comes_after_the_comparison_and_once(gpu):
    gpu.forget(**NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="compared with the CPU now"):
            device._admit("linear", HOME)
        assert gpu.runs == 1
        device._admit("linear", HOME)
    assert gpu.runs == 1 and HOME in device._verified


def test_the_checks_run_in_a_thread_of_their_own(gpu, monkeypatch):
    gpu.forget(**NEW)
    threads = []
    monkeypatch.setattr(reverify, "_all", lambda home: threads.append(threading.get_ident()) or [])
    gpu.use()
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_an_inner_check_leaves_the_outer_mark(gpu):
    gpu.forget(**NEW)
    with reverify.unasked():
        assert len(list(reverify.results(HOME))) == 2
        assert not reverify.first_use(HOME), "a first use inside of doctor's checks"


def test_a_kernel_that_refuses_a_good_row_is_wrong(gpu, monkeypatch):
    def check(home):
        raise ValueError("row 3: a NaN")

    monkeypatch.setattr(device, "check", check)
    assert [result.wrong for result in reverify.results(HOME)] == [
        "after 'two rows': ValueError: row 3: a NaN", "ValueError: row 3: a NaN"
    ]  # fmt: skip


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


def another_process_compares(gpu, agrees: bool = True) -> int:
    """How often this one compared then: it came while the other was at it."""
    gpu.forget(**NEW)
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, gpu.runs = reverify.stamp_path(HOME), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with holding(path.with_suffix(".lock")) as theirs:
            assert theirs
            ours = pool.submit(device._admit, "linear", HOME)
            time.sleep(0.3)
            if agrees:
                reverify.keep(HOME, [])
        ours.result(30)
    assert HOME in device._verified and {p.suffix for p in path.parent.iterdir()} == {".json"}
    return gpu.runs


def test_of_many_processes_one_compares(gpu):
    assert another_process_compares(gpu) == 0


def test_what_another_process_found_wrong_is_compared_here(gpu):
    assert another_process_compares(gpu, agrees=False) == 1


def test_waiting_has_an_end(gpu, monkeypatch):
    monkeypatch.setattr(reverify, "PATIENCE", 0.1)
    assert another_process_compares(gpu) == 1


def test_a_process_that_does_not_wait_is_caught(gpu):
    hurried = patched(reverify, "holding", lambda lock, seconds: contextlib.nullcontext(True))

    def check():
        assert another_process_compares(gpu) == 0

    assert_caught(Mutation("nobody waits", "one process compares", hurried, check))


def test_a_cache_that_cannot_be_written_is_no_error(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        gpu.runs = 0
        gpu.forget(**NEW)
        assert len(gpu.use()) == 1 and gpu.runs == 1 and HOME in device._verified
