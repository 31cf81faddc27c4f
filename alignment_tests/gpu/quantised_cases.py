"""The product kernels of 4-bit experts as compile_all.py wants them; the quantisers are in row_cases.py."""

from collections.abc import Iterator

from triton.experimental.gluon import language as gl

from minitransformer.ops.gpu import device, grouped_linear, pingpong, pingpong_packed, quantised_linear


def products() -> Iterator[tuple]:
    """(name, kernel, types, constants, warps, stages, flags) of quantised_linear.py's Triton kernels."""
    for tile in quantised_linear.MANY_CANDIDATES:
        blocks = ("bf16", [tile.m, tile.k]), ("i32", [tile.n // 16, 128]), ("i32", [tile.n // 16, 16])
        kinds = {"bf16": gl.bfloat16, "i32": gl.int32}
        layouts = (gl.NVMMASharedLayout.get_default_for(block, kinds[kind]) for kind, block in blocks)
        descs = [f"tensordesc<{kind}{block},{layout!r}>" for (kind, block), layout in zip(blocks, layouts, strict=True)]
        flags = (*device.STRICT.items(), ("maxnreg", pingpong.REGISTERS))
        for out, exact in (("*bf16", True), ("*bf16", False), ("*fp32", True), ("*fp32", False)):
            types = (*descs, out, "*i32", "*fp32", "*fp32", "i32!", "i32!", "i32", "i32")
            name, kernel = f"quantised_linear packed {out} {exact} {tile}", pingpong_packed.packed_kernel
            yield name, kernel, types, (tile.stages, exact), 4, 1, flags
    for tile in {grouped_linear.choose(128 * average, 128, 2048): None for average in (1, 16, 64, 512)}:
        for out in ("*bf16", "*fp32"):
            types = ("*bf16", "*bf16", out, "*i64", "*fp32", "*fp32", "i32!", "i32!", "i32", "i32")
            constants = (tile.m, tile.n, tile.k, tile.swap, True, 128, pingpong.SCALED.value, 4)
            name, kernel = f"quantised_linear {out} {tile}", grouped_linear.grouped_kernel
            yield name, kernel, types, constants, tile.warps, tile.stages
