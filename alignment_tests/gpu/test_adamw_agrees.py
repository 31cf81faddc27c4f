"""The law of the GPU for AdamW: the CPU reference's bits, NaN included."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.values import BF16, VALUES, agree
from minitransformer.ops import adamw

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
LENGTHS = (1, 2, 3, 5, 8, 31, 64, 129, 257)


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("kind", [*VALUES, "any bits"])
def test_adamw(kind, reached):
    """In place, of any length, from an odd address too. A NaN is one NaN, so all bits are compared."""
    n = 70001
    if kind == "any bits":
        operands = [inputs.f32_of_any_bits(seed, n) for seed in range(4)]
    else:
        operands = [VALUES[kind](seed, n).float() * 1.0009765625 for seed in range(4)]
    operands[3] = operands[3].abs()  # squares' mean; NaN in a few
    state = [torch.zeros(n, dtype=BF16), *operands]
    for t, clip in ((1, 1.0), (2, 0.37), (10**6, 1e-20)):
        now = adamw.scalars(t, 1e-3, (0.9, 0.999), 1e-8, 0.1, clip)
        for count, first in ((n, 0), (n - 1, 1), *((count, 0) for count in LENGTHS), (1023, 3), (1024, 0), (1025, 16)):
            want, got = ([x[first : first + count].clone() for x in state] for _ in range(2))
            got = [torch.cat([x[:first], x]).cuda()[first:] for x in got]
            for each in (want, got):
                adamw.adamw(each[0], each[1] if reached else None, *each[2:], now)
            agree(got, want, f"{count} from {first}, update {t}")
        adamw.adamw(state[0], state[1] if reached else None, *state[2:], now)


@pytest.mark.parametrize("reached", [True, False])
def test_takes_no_memory(reached):
    n = 1 << 20
    state = [torch.zeros(n, dtype=BF16, device="cuda"), *(inputs.normal(seed, n).abs().cuda() for seed in range(4))]
    now = adamw.scalars(1, 1e-3, (0.9, 0.999), 1e-8, 0.1)
    for _ in range(2):  # the first call compiles
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        adamw.adamw(state[0], state[1] if reached else None, *state[2:], now)
    assert torch.cuda.max_memory_allocated() == before
