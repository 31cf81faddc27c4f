"""Known answers of the products' gradients: sha256 of the bits on hashed inputs, the H200's and every CPU's.

    python -m alignment_tests.goldens.gradients          writes gradients.json (only after a change of spec)
    python -m alignment_tests.goldens.gradients --print  prints the hashes of this machine's kernels as JSON
"""

import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from alignment_tests import inputs
from alignment_tests.goldens import main
from minitransformer.batch import Batch
from minitransformer.ops import attention, dispatch, grouped_linear, linear

FILE = Path(__file__).with_name("gradients.json")


def _linear(device: str, T: int, N: int, K: int) -> list[Tensor]:
    operands = inputs.bf16(1, T, N), inputs.bf16(2, T, K), inputs.bf16(3, N, K)
    return list(linear.backward(*(x.to(device) for x in operands)))


def _grouped(device: str, weighted: bool) -> list[Tensor]:
    T, E, K, N, D = 70, 16, 4, 192, 576
    plan = dispatch.plan(inputs.integers(4, E, T, K), E).to(device)
    operands = inputs.bf16(5, T * K, N), inputs.bf16(6, T * K, D), inputs.bf16(7, E, N, D)
    weights = inputs.normal(8, T, K).abs().to(device) if weighted else None
    got = grouped_linear.backward(*(x.to(device) for x in operands), plan, weights)
    return [x for x in got if x is not None]


def _attention(device: str, N: int, G: int, H: int) -> list[Tensor]:
    lengths = [1, 64, 130, 33]
    T = sum(lengths)
    do, q, k, v = (inputs.bf16(9 + i, T, heads, H).to(device) for i, heads in enumerate((N, N, G, G)))
    batch = Batch.packed([[0] * n for n in lengths]).to(device)
    return list(attention.backward(do, q, k, v, *attention.forward(q, k, v, batch), batch))


CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "linear 576": lambda d: _linear(d, 130, 320, 576),
    "linear 768": lambda d: _linear(d, 257, 768, 200),
    "grouped": lambda d: _grouped(d, False),
    "grouped weighted": lambda d: _grouped(d, True),
    "attention 64": lambda d: _attention(d, 6, 2, 64),
    "attention 128": lambda d: _attention(d, 8, 1, 128),
}


if __name__ == "__main__":
    main(CASES, FILE, "cuda" if "--cuda" in sys.argv else "cpu")
