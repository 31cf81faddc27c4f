"""The product kernels of 4-bit experts as compile_all.py wants them; the quantisers are in row_cases.py."""

from collections.abc import Iterator

from minitransformer.ops.gpu import quantised_linear


def products() -> Iterator[tuple]:
    """(name, kernel, types, constants, warps, stages) of quantised_linear.py's Triton kernel."""
    for tile in quantised_linear.CANDIDATES:
        for out in ("*bf16", "*fp32"):
            for scaled in (False, True):
                types = ("*bf16", "*bf16", out, "*i64", "*fp32", "*fp32", "i32!", "i32!", "i32", "i32")
                constants = (tile.m, tile.n, tile.k, tile.swap, True, 128, scaled, 4)
                name = f"quantised_linear {out} {'scaled ' if scaled else ''}{tile}"
                yield name, quantised_linear.scaled_kernel, types, constants, tile.warps, tile.stages
