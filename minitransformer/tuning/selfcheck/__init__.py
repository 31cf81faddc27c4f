"""Every operator on small adversarial inputs, on the CPU and on a GPU, forward and backward.

What `doctor` compares, and the first use of a GPU under versions that were not verified (tuning/reverify.py). Meant for
one machine in a minute or two; what a release is held to is alignment_tests/gpu.

    cases.py      inputs, and one case on both sides
    products.py   linear, grouped_linear, attention
    quantised.py  NVFP4, MXFP8, products with 4-bit weights, whole experts
    rows.py       what works row by row, draws, the norm of the gradients
"""

from minitransformer.tuning.selfcheck import products, quantised, rows
from minitransformer.tuning.selfcheck.cases import CHECKS, Pair

__all__ = ["CHECKS", "Pair", "products", "quantised", "rows"]
