"""The learner's head on the GPU, logits in parts: the CPU's bits, those of logits made whole, and its memory."""

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu.memory import peak
from alignment_tests.gpu.values import agree
from alignment_tests.learner import test_scoring as parts
from minitransformer.learner import scoring
from minitransformer.learner.learner import Learner
from minitransformer.ops.linear import linear
from minitransformer.ops.logprob import logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
V, D = 151936, 2048


@pytest.mark.parametrize("name", parts.MODELS)
def test_the_parts_have_the_cpus_bits(name, monkeypatch):
    learner, packs, temperatures = parts.case(name)
    wants = [parts.results(parts.whole, learner, one, temperatures) for one in packs]
    learner, *_ = parts.case(name)
    learner.model.to("cuda")
    for tokens in (1, 5, 12, 1000):
        monkeypatch.setattr(scoring, "CHUNK_BYTES", 4 * learner.model.config.vocab_size * tokens)
        for one, want in zip(packs, wants, strict=True):
            got = parts.results(Learner._log_probs, learner, one.to("cuda"), temperatures)
            agree(list(got.values()), list(want.values()), f"parts of {tokens} tokens: {list(want)}")


def operands(L: int) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator("cuda").manual_seed(3)
    h, w = (torch.randn(n, D, generator=gen, device="cuda") for n in (L, V))
    ids = torch.randint(V, (L,), generator=gen, device="cuda")
    d = torch.randn(L, generator=gen, device="cuda")
    return h.bfloat16().requires_grad_(), (w * D**-0.5).bfloat16().requires_grad_(), ids, d


@pytest.mark.parametrize("L", [40, 999, 4096])
def test_at_the_real_widths(L, monkeypatch):
    """Bits of the logits made whole; the most memory is far from BF16 [L, V], less yet from FP32's."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 1 << 26)
    h, w, ids, d = operands(L)
    temperatures = torch.full((L,), 0.7, device="cuda")

    def run() -> list[torch.Tensor]:
        got = scoring.head(h, w, ids, temperatures)
        return [got, *torch.autograd.grad(got, (h, w), d)]

    most, dw = peak(run), 2 * V * D
    assert most < dw + 16 * L * D + 3 * scoring.CHUNK_BYTES, f"{most / 2**20:.0f} MiB"
    if L == 4096:
        assert most < 2 * L * V
    got, *grads = run()
    want = logprob(linear(h, w, torch.float32), ids, 0.7)
    for a, b in zip((got, *grads), (want, *torch.autograd.grad(want, (h, w), d)), strict=True):
        assert_bits_equal(a.detach(), b.detach(), f"{L} rows")


def test_the_parts_fit_into_what_is_free(monkeypatch):
    """Of 700 MiB that are free before the forward and again, beside dW, before the backward, no more is ever taken."""
    L, free = 4096, 700 << 20
    h, w, ids, d = operands(L)
    temperatures = torch.full((L,), 0.7, device="cuda")
    monkeypatch.setattr(scoring, "free_bytes", lambda device: free)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scoring.head(h, w, ids, temperatures), (h, w), d)

    most = peak(run)
    assert free // 4 < most - 2 * V * D < free, f"{most / 2**20:.0f} MiB"
