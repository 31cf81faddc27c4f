"""The backward products' kernels as compile_all.py wants them: types and constants of launches at real widths."""

from collections.abc import Iterator

from minitransformer.ops.gpu import attention_backward as attention
from minitransformer.ops.gpu import grouped_linear_backward as grouped
from minitransformer.ops.gpu import linear_backward as linear
from minitransformer.ops.gpu import sum_of_squares


def _desc(*block: int) -> str:
    return f"tensordesc<bf16[{', '.join(map(str, block))}]>"


def _linear() -> Iterator[tuple]:
    ints = ("i32!", "i32", "i32!", "i32", "i32")
    for name, turned, y, start in (
        ("dX", False, "*bf16", None), ("dW", True, "*bf16", None), ("dX begun", False, "*fp32", None),
        ("dX continued", False, "*fp32", "*fp32"), ("dX ended", False, "*bf16", "*fp32"),
    ):  # fmt: skip
        for tile in (t for t in linear.CANDIDATES if t.tma):  # the others are pingpong.py's: compile_all.py
            left = (tile.k, tile.m) if turned else (tile.m, tile.k)
            types = (_desc(*left), _desc(tile.k, tile.n), y, start or y, *ints)
            constants = (tile.m, tile.n, tile.k, 132, turned, True, start is not None)
            yield f"linear {name} {tile}", linear.product_kernel, types, constants, tile.warps, tile.stages
        tile, types = linear.PLAIN, ("*bf16", "*bf16", y, start or y, *("i32!",) * 5)
        constants = (tile.m, tile.n, tile.k, 132, turned, False, start is not None)
        yield f"linear {name} ragged", linear.product_kernel, types, constants, tile.warps, tile.stages


def _grouped() -> Iterator[tuple]:
    for tile in (*grouped.DX_CANDIDATES[:-1], grouped.PLAIN):
        copied = tile.tma
        pair = (_desc(tile.m, tile.k), _desc(1, tile.k, tile.n)) if copied else ("*bf16", "*bf16")
        types = (*pair, "*bf16", "*i64", "i32!", "i32!", "i32", "i32")
        constants = (tile.m, tile.n, tile.k, 128, copied)
        yield f"grouped dX {tile}", grouped.dx_kernel, types, constants, tile.warps, tile.stages
    for tile in (*grouped.WEIGHTED_CANDIDATES[:-1], grouped.PLAIN):
        copied = tile.tma
        pair = (_desc(tile.m, tile.k), _desc(1, tile.k, 128)) if copied else ("*bf16", "*bf16")
        types = (*pair, "*bf16", "*fp32", "*i64", "*bf16", "*fp32", "*i64", "i32!", "i32!", "i32", "i32")
        constants = (tile.m, tile.k, 128, copied)
        yield f"grouped weighted dX {tile}", grouped.weighted_dx_kernel, types, constants, tile.warps, tile.stages
    tile, types = grouped.PLAIN, ("*bf16", "*bf16", "*bf16", "*i64", "i32!", "i32", "i32")
    yield f"grouped dW {tile}", grouped.dw_kernel, types, (tile.m, tile.n, tile.k), tile.warps, tile.stages


def _attention() -> Iterator[tuple]:
    """At heads of 128 every schedule, at others those that are chosen."""
    ints = ("fp32", "fp32", "i32!", "i32!", "i32!")
    dkv, dq = zip(*map(attention.choose, (64, 512)), strict=True)
    for group, head, width in ((8, 128, 128), (3, 64, 64), (2, 48, 64)):
        for s in attention.DKV_CANDIDATES if head == 128 else sorted(set(dkv)):
            desc = _desc(s.walk, 1, width)
            types = (desc, desc, *("*bf16",) * 4, "*fp32", "*i32", "*bf16", "*bf16", *ints)
            constants = (group, head, width, s.own, s.walk)
            yield f"attention dKV {head} {s}", attention.dkv_kernel, types, constants, s.warps, s.stages
        for s in attention.DQ_CANDIDATES if head == 128 else sorted(set(dq)):
            desc = _desc(s.walk, 1, width)
            types = (desc, desc, *("*bf16",) * 4, "*fp32", "*i32", "*bf16", *ints)
            constants = (group, head, width, s.own, s.walk)
            yield f"attention dQ {head} {s}", attention.dq_kernel, types, constants, s.warps, s.stages


def products() -> Iterator[tuple]:
    """(name, kernel, types, constants, warps, stages)."""
    for source in (_linear, _grouped, _attention):
        for name, *rest in source():
            yield f"backward {name}", *rest


def rows() -> Iterator[tuple]:
    """(name, kernel, types, constants)."""
    for N, H in ((32, 128), (9, 64)):
        types = ("*bf16", "*bf16", "*fp32", "*fp32", "*fp32", "i32!")
        yield f"backward attention stats {H}", attention.stats_kernel, types, (N, H, 8)
    types = ("*bf16", "*fp32", "*i64", "*bf16", "i32!", "i32")
    yield "backward grouped scale", grouped.scale_kernel, types, (4, 1024)
    yield "backward squares", sum_of_squares.squares_kernel, ("*i64", "*i64", "*fp64"), (32,)
