"""Too little memory: the error says how much was needed, for what, and what to do."""

import pytest
import torch

from minitransformer.devices import naming_memory
from minitransformer.errors import InputError
from minitransformer.ops import linear

CUDA = "CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of 139.72 GiB."
CPU = "[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."


@pytest.mark.parametrize(("text", "amount"), [(CUDA, "37.09 GiB"), (CPU, "99 bytes")])
def test_the_amount_and_the_operator_are_named(monkeypatch, text, amount):
    def full(*args, **options):
        raise torch.OutOfMemoryError(text)

    monkeypatch.setattr(linear, "chain_bits", full)
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(InputError) as caught, naming_memory("a pack of up to 64 tokens", "lower max_tokens_per_pack"):
        linear.forward(x, x)
    want = f"out of GPU memory in a pack of up to 64 tokens: {amount} more were needed in linear; lower max_tokens"
    assert str(caught.value).startswith(want)


def test_an_error_that_says_nothing_is_told_all_the_same():
    with pytest.raises(InputError, match="more was needed than there is; buy less"), naming_memory("x", "buy less"):
        raise torch.OutOfMemoryError("no")


@pytest.mark.parametrize(
    ("free", "ours", "said"),
    [
        ("11.75 MiB", "21.50 GiB", ", while other processes hold 118.2 of the GPU's 139.72 GiB (an SGLang engine: "),
        ("1.00 GiB", "138.50 GiB", ""), ("512 bytes", "139.00 GiB", ""),
    ],
)  # fmt: skip
def test_what_other_processes_hold_is_told(free, ours, said):
    text = f"{CUDA[:-1]} of which {free} is free. Process 7 has 1.00 GiB memory in use. Including non-PyTorch memory, "
    text += f"this process has {ours} memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch"
    with pytest.raises(InputError) as caught, naming_memory("packs", "lower max_tokens_per_pack"):
        raise torch.OutOfMemoryError(text)
    assert f"37.09 GiB more were needed{said}" in str(caught.value)
    assert ("other processes" in str(caught.value)) == bool(said)
