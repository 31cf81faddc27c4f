"""A GPU that is not there (fake_gpu.py), and `minitransformer doctor` on it."""

import pytest
import torch


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    from alignment_tests.tuning import fake_gpu  # needs Triton

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = fake_gpu.Gpu(monkeypatch)
    made.forget()
    yield made
    made.forget()


@pytest.fixture
def doctor(gpu, monkeypatch):
    from minitransformer.cli import main
    from minitransformer.tuning import checks, machine

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "facts", lambda home: gpu.versions)
    monkeypatch.setattr(checks, "_choices", lambda *args: iter(()))
    monkeypatch.setattr(checks, "_offline", lambda: checks.Check("kernels compile", "ok", ""))
    return lambda *more: main(["doctor", "--seed", "1", *more])
