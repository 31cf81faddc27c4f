"""The law of the GPU for a thread that has called nothing of CUDA before, autograd's own say: the same bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from alignment_tests import inputs
from minitransformer.batch import Batch
from minitransformer.ops import attention, linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is launched"),
]


def products(rows: int):
    x, w = inputs.bf16(1, rows, 512).cuda(), inputs.bf16(2, 384, 512).cuda()
    return lambda: linear.forward(x, w)


def attend(tokens: int):
    batch = Batch.packed([[0] * tokens]).to("cuda")
    q, k, v = (inputs.bf16(3 + i, tokens, heads, 128).cuda() for i, heads in enumerate((8, 2, 2)))
    return lambda: attention.forward(q, k, v, batch)[0]


@pytest.mark.parametrize("make, size", [(products, 1), (products, 16), (products, 300), (attend, 1), (attend, 300)])
def test_a_fresh_thread(make, size, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # would be a call of CUDA's
    call = make(size)
    call()  # compiled, loaded, and its tensors' memory is in torch's cache
    want = call().cpu()
    with ThreadPoolExecutor(1) as fresh:
        got = fresh.submit(call).result().cpu()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
