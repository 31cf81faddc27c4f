"""by_tensor's handles between two processes of one GPU: what arrives, and what memory stays."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from minitransformer.plugins.sglang import send

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# A server that reads every line's tensors, prints their bytes and forgets them.
READER = """
import base64, io, sys, torch
from alignment_tests.gpu.test_send import bits
from alignment_tests.plugin.fake import Unpickler
from minitransformer.plugins.sglang.identity import gpu
from torch.multiprocessing import reductions

rebuild, gpus = reductions.rebuild_cuda_tensor, [gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
reductions.rebuild_cuda_tensor = lambda *a: rebuild(*a[:6], gpus.index(a[6]), *a[7:])  # as SGLang reads the GPU
for line in sys.stdin:
    for name, t in Unpickler(io.BytesIO(base64.b64decode(line))).load():
        print(name, t.dtype, list(t.shape), bits(t))
    del t
    print("end", flush=True)
"""


@contextmanager
def reading():
    """-> what such a server prints of a request's body."""
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(body) -> list[str]:
        reader.stdin.write(body["serialized_named_tensors"][0] + "\n")
        reader.stdin.flush()
        return list(iter(reader.stdout.readline, "end\n"))

    with reader:
        yield read
        reader.stdin.close()


def bits(t: torch.Tensor) -> str:
    return t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes().hex()


@pytest.mark.parametrize("same_gpu", [True, False])
def test_pieces_of_a_storage_arrive_again_and_again(same_gpu):
    """Of several types, not contiguous, on the CPU; then with other values in the same memory."""
    whole = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    scales = torch.randn(3, 32, device="cuda").to(torch.float8_e4m3fn)
    tensors = {
        "rows": whole[2:5], "row": whole[5], "turned": whole.t(), "scales": scales[1:], "scale": torch.tensor(0.5),
        "codes": torch.randint(0, 256, (4, 8), device="cuda", dtype=torch.uint8),
    }  # fmt: skip
    with reading() as read:
        for _ in range(3):
            with send.by_tensor(list(tensors.items()), same_gpu) as (_, body):
                for line, (name, t) in zip(read(body), tensors.items(), strict=True):
                    assert line == f"{name} {t.dtype} {list(t.shape)} {bits(t)}\n"
            whole.neg_()


@pytest.mark.parametrize("fetched", [0, 1, 2])
def test_memory_goes_with_its_tensors(fetched):
    """A quantised copy is made for each sync; the server may be gone, or be asked to load it twice."""
    before = torch.cuda.memory_allocated()
    with reading() as read:
        for n in range(6):
            copy = torch.full((1 << 16,), float(n), device="cuda")
            with send.by_tensor([("copy", copy)]) as (_, body):
                for _ in range(fetched):
                    assert len(read(body)) == 1
            del copy
            assert torch.cuda.memory_allocated() == before
    # Torch's file of counters is this process's; others run beside it.
    assert len(list(Path(send.SHARED_MEMORY).glob(f"torch_{os.getpid()}_*"))) <= 1
