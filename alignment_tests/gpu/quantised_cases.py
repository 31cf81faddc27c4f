"""The product kernels of 4-bit experts as compile_all.py wants them; the quantisers are in row_cases.py."""

from collections.abc import Iterator

from minitransformer.ops.gpu import grouped_linear, pingpong


def products() -> Iterator[tuple]:
    """(name, kernel, types, constants, warps, stages, flags) of quantised_linear.py's Triton kernels."""
    for tile in {grouped_linear.choose(128 * average, 128, 2048): None for average in (1, 16, 64, 512)}:
        for out in ("*bf16", "*fp32"):
            types = ("*bf16", "*bf16", out, "*i64", "*fp32", "*fp32", "i32!", "i32!", "i32", "i32")
            constants = (tile.m, tile.n, tile.k, tile.swap, True, 128, pingpong.SCALED.value, 4)
            name, kernel = f"quantised_linear {out} {tile}", grouped_linear.grouped_kernel
            yield name, kernel, types, constants, tile.warps, tile.stages
