"""A GPU that is no Hopper is refused with the reason; allowed on purpose, every report says that."""

import pytest
import torch

from minitransformer import devices
from minitransformer.cli import main, parser
from minitransformer.errors import InputError, UnsupportedDevice

HOME = torch.device("cuda", 0)
WHY = "NVIDIA L4 has compute capability 8.9; the spec's accumulator, hopper-k16-f25, is that of 9.0"


@pytest.fixture
def l4(monkeypatch):
    """A machine with one GPU of another generation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")
    devices.unverified.cache_clear()
    yield
    devices.unverified.cache_clear()
    devices.allow_unverified(False)


def test_it_is_refused_with_the_reason_and_what_to_do(l4):
    pytest.importorskip("triton")
    with pytest.raises(InputError, match="--device cpu, or --allow-unverified") as caught:
        devices.resolve("cuda")
    assert WHY in str(caught.value)
    devices.allow_unverified()
    assert devices.resolve("cuda") == HOME and WHY in devices.unverified(HOME)


def test_an_operator_refuses_it_too(l4, monkeypatch):
    pytest.importorskip("triton")
    from minitransformer.ops.gpu import device

    x = torch.zeros(2, 4, dtype=torch.bfloat16)
    monkeypatch.setattr(device, "unverified", lambda home: devices.unverified(HOME))
    with pytest.raises(UnsupportedDevice, match="linear: cpu: NVIDIA L4 has .*--allow-unverified"):
        device.take("linear", x.device, torch.bfloat16, x)
    devices.allow_unverified()
    assert device.take("linear", x.device, torch.bfloat16, x)[0].shape == x.shape


def test_the_option_lets_it_in_and_says_so_on_stderr(l4, capsys):
    pytest.importorskip("triton")
    from minitransformer.commands import common

    args = parser().parse_args("score --model m --input x --device cuda --allow-unverified".split())
    assert common.device(args.device, args) == HOME
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: unverified: NVIDIA L4 has compute capability 8.9")
    args = parser().parse_args("score --model m --input x --device cuda".split())
    with pytest.raises(InputError):  # a second command of one process does not inherit it
        common.device(args.device, args)


COMMANDS = ("align --prompts p", "generate --prompts p", "score --input i", "sync --to u", "trace --prompts p --out o")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_a_device_has_the_option(command):
    name, rest = command.split(" ", 1)
    assert parser().parse_args(f"{name} --model m {rest} --allow-unverified".split()).allow_unverified


def test_doctor_names_it_and_does_not_fail(l4, capsys, monkeypatch, tmp_path):
    from minitransformer.tuning import machine

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # an old kernel must not hide that nothing compiles
    monkeypatch.setattr(machine, "facts", lambda home: {"gpu": "NVIDIA L4", "capability": "8.9"})
    assert main(["doctor"]) == 0
    assert f"absent   cuda:0: {WHY}" in capsys.readouterr().out


def test_a_hopper_gpu_and_the_cpu_need_nothing(monkeypatch):
    devices.unverified.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert devices.unverified(HOME) is None and devices.unverified(torch.device("cpu")) is None
    devices.unverified.cache_clear()
