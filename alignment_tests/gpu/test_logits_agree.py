"""The law of the GPU where whole rows of logits are read, log-probs and draws: any number of rows, and all columns."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.test_rows_agree import ROWS
from alignment_tests.gpu.values import agree
from minitransformer.ops import gpu, logprob, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
MORE_ROWS = (*ROWS, 9, 17, 32, 33, 65, 256)  # where draws take other blocks, or sort a second set of rows
KINDS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.0, 0, 1.0), (1.3, 0, 0.9), (0.8, 200, 0.95), (0.7, 40, 1.0)]


def logits(T: int, V: int, seed: int) -> torch.Tensor:
    """FP32 [T, V], each row another; some rounded to many equal logits, some far apart, some half of -infinity."""
    base = inputs.normal(seed, 7, V, scale=4.0)
    x = torch.stack([base[t % 7].roll(3 * t) for t in range(T)])
    x[2::9], x[4::9] = x[2::9].round(), x[4::9] * 1e4
    x[6::9, 1 : V // 2 + 1] = -torch.inf
    return x


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V", [1, 97, 5003, 151936])
def test_logprob_for_every_number_of_rows(V, temperature):
    x, ids, dout = logits(257, V, 1), inputs.integers(2, V, 257), inputs.normal(3, 257)
    ids[6::9] = 0  # a finite logit
    want = logprob.forward(x, ids, temperature)
    back = logprob.backward(dout, x, ids, temperature, want[1])
    x, ids, dout = x.cuda(), ids.cuda(), dout.cuda()
    for T in ROWS:
        got = logprob.forward(x[:T], ids[:T], temperature)
        agree(got, [y[:T] for y in want], f"{T} rows")
        agree([logprob.backward(dout[:T], x[:T], ids[:T], temperature, got[1])], [back[:T]], f"{T} rows back")


@pytest.mark.parametrize("T", [65535, 65536, 131075])
def test_logprob_of_more_rows_than_a_grid_has(T):
    """A grid's second axis ends at 65,535 rows; the maxima of the rest are further launches."""
    x, ids, dout = inputs.normal(4, T, 5, scale=4.0), inputs.integers(5, 5, T), inputs.normal(6, T)
    want = logprob.forward(x, ids, 0.7)
    back = logprob.backward(dout, x, ids, 0.7, want[1])
    got = logprob.forward(x.cuda(), ids.cuda(), 0.7)
    agree(got, want, "forward")
    agree([logprob.backward(dout.cuda(), x.cuda(), ids.cuda(), 0.7, got[1])], [back], "backward")


@pytest.mark.parametrize(("V", "kinds"), [(96, KINDS), (5003, KINDS), (151936, KINDS[:3])])
def test_draws_for_every_number_of_rows(V, kinds):
    x = logits(257, V, 7)
    draws = [gpu.sample.Draw((1 << 63) + i, 3 * i, *(k := kinds[i % len(kinds)]), k[0] or 1.0) for i in range(257)]
    ids = [sample.sample(row, *d[:5]) for row, d in zip(x, draws, strict=True)]
    scores = [logprob.logprob(x[i : i + 1], torch.tensor([ids[i]]), d[5]).item() for i, d in enumerate(draws)]
    want, x = list(zip(ids, scores, strict=True)), x.cuda()
    for L in MORE_ROWS:
        got = gpu.sample.draw(x[:L], draws[:L])
        assert got == want[:L], (L, next(i for i in range(L) if got[i] != want[i]))
