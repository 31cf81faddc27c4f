"""Devices by name: what can't run is refused in one line, and what memory was for is said."""

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from minitransformer import devices
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.layout import parameter_bytes


def test_the_cpu_is_the_default():
    assert devices.resolve("cpu") == torch.device("cpu") == tiny_model().device
    assert devices.resolve("cpu:0") == devices.resolve(torch.device("cpu", 0)) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "'gpu' is not known; choose cpu, cuda or cuda:N"), ("mps", "'mps': the operators run on cpu and cuda"),
     ("", "'' is not known"), ("cuda:-1", "'cuda:-1' is not known"), ("cuda:99999999999", "'cuda:9+' is not known"),
     ("cpu:3", "'cpu:3': there is one, cpu"), ("cpu:256", "'cpu:256': there is one")],
)  # fmt: skip
def test_a_device_that_is_not_there(name, message):
    with pytest.raises(InputError, match=message):
        devices.resolve(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(InputError, match=r"'cuda:1': (this build of torch has no CUDA|torch finds no NVIDIA GPU)"):
        devices.resolve("cuda:1")


@pytest.mark.parametrize(
    ("count", "capability", "message"),
    [(1, (9, 0), "there are 1 GPUs, cuda:0 to cuda:0"), (2, (8, 0), "A100 has compute capability 8.0; the spec's acc"),
     (2, (9, 0), None)],
)  # fmt: skip
def test_gpus_that_are_there(monkeypatch, count, capability, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    monkeypatch.setattr(devices, "find_spec", lambda name: True)
    devices.unverified.cache_clear()
    monkeypatch.setattr(devices, "unverified", devices.unverified.__wrapped__)
    if message is None:
        assert devices.resolve("cuda:1") == torch.device("cuda", 1)
        assert devices.resolve("cuda") == torch.device("cuda", 0)
        for beyond in ("cuda:99", "cuda:128", "cuda:256"):  # torch's own index of the last is 0
            with pytest.raises(InputError, match=f"'{beyond}': there are 2 GPUs, cuda:0 to cuda:1"):
                devices.resolve(beyond)
        return
    with pytest.raises(InputError, match=message):
        devices.resolve("cuda:1")


def test_weights_that_do_not_fit_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(devices, "free_bytes", lambda device: 1 << 30)
    with pytest.raises(InputError, match=r"the weights: 2.0 GiB are needed on cpu, 1.0 GiB are free"):
        with devices.room_on(torch.device("cpu"), 1 << 31, "the weights"):
            raise AssertionError("entered")
    model = tiny_model()
    assert parameter_bytes(model.config) == sum(2 * p.numel() for p in model.parameters())


def test_out_of_memory_says_for_what(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.25 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("minitransformer.learner.scoring.log_probs", full)
    with pytest.raises(InputError, match=r"out of GPU memory in packs of 64 tokens: 20.25 GiB more .*lower max_tok"):
        Learner(tiny_model(), max_tokens_per_pack=64).score([[1, 2, 3]], [1])
