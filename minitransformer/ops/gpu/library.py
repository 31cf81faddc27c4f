"""Products of PyTorch's libraries, which have the chain's bits where they do not split K: used only where proven.

What a library computes follows more than the shape: the operands' layout and alignment, PyTorch's switches, versions.
The key of a proof (tuning/machine.py) and the conditions here cover these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minitransformer.ops.gpu import choice, launch
from minitransformer.tuning.table import Product

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ALIGNED = 256  # bytes; what a fresh tensor has, and what the proofs ran on


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(a, b) if out_dtype == a.dtype else torch.mm(a, b, out_dtype=out_dtype)


@contextmanager
def _unsplit() -> Iterator[None]:
    """cublasLt, and no split of K."""
    if launch.watching() is not None:
        launch.watching().refuse("torch.mm unsplit")
    library = torch.backends.cuda.preferred_blas_library()
    matmul = torch.backends.cuda.matmul
    reduced = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction = reduced


def _mm_unsplit(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    with _unsplit():
        return _mm(a, b, out_dtype)


def _grouped(x_RK: Tensor, w_EKN: Tensor, bounds_E1: Tensor) -> Tensor:
    return torch._grouped_mm(x_RK, w_EKN, offs=bounds_E1[1:].to(torch.int32))


DENSE: dict[str, Callable] = {"torch.mm": _mm, "torch.mm unsplit": _mm_unsplit}
GROUPED: dict[str, Callable] = {"torch._grouped_mm": _grouped}


def layout(x: Tensor) -> str | None:
    """'n' if the rows lie one after another, 't' if the columns do."""
    return "n" if x.is_contiguous() else "t" if x.t().is_contiguous() else None


def op_of(a_MK: Tensor, b_KN: Tensor) -> str:
    layouts = f"{layout(a_MK)}{layout(b_KN)}"
    return "linear" if layouts == "nt" else f"mm {layouts}"


def aligned(*tensors: Tensor) -> bool:
    return all(x.data_ptr() % ALIGNED == 0 for x in tensors)


def mm(a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor | None:
    """a b by the library that the table names for this shape and layout; None where none is proven and fastest.

    BF16 operands on one GPU, each contiguous or the transpose of such a matrix -> [M, N] BF16 or FP32.
    """
    (M, K), N = a_MK.shape, b_KN.shape[1]
    found = choice.of(a_MK.device, Product(op_of(a_MK, b_KN), 1, N, K, NAMES[out_dtype]), M)
    if found.library is None or not aligned(a_MK, b_KN):
        return None
    return DENSE[found.library](a_MK, b_KN, out_dtype)
