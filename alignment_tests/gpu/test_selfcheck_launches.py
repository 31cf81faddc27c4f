"""The GPU's side of every self-check, without a GPU: kernels compile and launch, outputs are of the right kind."""

import contextlib
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to launch")

import torch

from alignment_tests.gpu import fake_driver
from minitransformer.ops.gpu import choice, cuda, device, launch
from minitransformer.tuning import selfcheck
from minitransformer.tuning.selfcheck import cases

pytestmark = [
    pytest.mark.slow,  # some 140 kernels
    pytest.mark.skipif(torch.cuda.is_available(), reason="a fake driver's launchers would stay"),
]
HOME = torch.device("cuda", 0)
BY_VALUE = {"sample", "gradient norm"}  # the host reads what a kernel wrote


@contextlib.contextmanager
def pretending(launched: list):
    """Tensors of the CPU pass for a GPU's: nothing reads or writes them."""
    replaced = (
        (torch.Tensor, "is_cuda", True), (torch.Tensor, "pin_memory", lambda x: x),
        (torch.cuda, "current_device", lambda: None), (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_stream", lambda *home: SimpleNamespace(cuda_stream=7)),
        (torch.cuda, "synchronize", lambda *home: None), (device, "multiprocessors", lambda home: 132),
        (choice, "of", lambda home, product, M: choice.NOTHING), (cases, "moved", lambda x, home: x),
        (cuda, "kernel", lambda home, file, name, defines, shared=0: (file, name, defines)),
        (cuda, "launch", lambda function, *rest, **how: launched.append(function)),
        (cuda, "at_once", lambda *what: 1), (device, "unverified", lambda home: None),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def _forget_launchers() -> None:
    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("minitransformer.ops.gpu") else ():
            if isinstance(getattr(kernel, "run", None), launch.Quick):
                kernel.run.known.clear(), kernel.device_caches.clear()


@pytest.fixture(scope="module")
def fake():
    with fake_driver.installed() as driver:
        _forget_launchers()
        yield driver
        _forget_launchers()


@pytest.mark.parametrize("name", [name for name in selfcheck.CHECKS if name not in BY_VALUE])
def test_the_kernels_of_a_check_are_launched(name, fake, monkeypatch):
    real, launched = cases.on_gpu, []

    def on_gpu(run, operands, home):
        with pretending(launched):
            return real(run, operands, home)

    monkeypatch.setattr(cases, "on_gpu", on_gpu)
    for what, got, want in selfcheck.CHECKS[name](HOME):
        assert launched or fake.launches, f"{what}: nothing ran"
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want], what
        launched.clear(), fake.launches.clear()
