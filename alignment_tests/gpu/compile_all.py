"""Compiles every Triton kernel for sm_90a without a GPU: `python -m alignment_tests.gpu.compile_all [word ...]`.

Prints registers, spills and shared memory of each. A case is a kernel with the types of its arguments, as a launch in
minitransformer/ops/gpu would specialise it; the laws that its code must obey are in test_compiles.py.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from alignment_tests.gpu import backward_cases, fake_driver, quantised_cases
from alignment_tests.gpu.row_cases import rows
from minitransformer.ops.gpu import (
    attention,
    attention_decode,
    attention_tiles,
    device,
    grouped_linear,
    grouped_linear_backward,
    linear,
    pingpong,
    pingpong_weights,
)
from minitransformer.ops.gpu.tiles import Tile

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Case:
    """A kernel and what a launch fixes: run-time types in order (! means: perhaps no multiple of 16), constants."""

    name: str
    kernel: Any
    types: tuple[str, ...]
    constants: tuple
    warps: int
    stages: int
    flags: tuple = tuple(device.STRICT.items())

    def compile(self, target: GPUTarget = HOPPER):
        names = self.kernel.arg_names
        signature = {name: "constexpr" for name in names} | {
            name: kind.rstrip("!") for name, kind in zip(names, self.types, strict=False)
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(self.types)
            if not kind.endswith("!") and not kind.startswith(("tensordesc", "fp32"))
        }
        constants = dict(zip(names[len(self.types) :], self.constants, strict=True))
        source = (GluonASTSource if self.kernel.is_gluon() else ASTSource)(self.kernel, signature, constants, aligned)
        options = {"num_warps": self.warps, "num_stages": self.stages, **dict(self.flags)}
        with fake_driver.installed(target):  # a kernel may ask for which GPU it is compiled
            return triton.compile(source, target=target, options=options)


def _pingpong(name: str, tile: Tile, out: str, turned=False, deep=False, grouped=False, end=pingpong.PLAIN) -> Case:
    blocks = [tile.k, tile.m] if turned else [tile.m, tile.k], [tile.k, tile.n] if deep else [tile.n, tile.k]
    descs = (f"tensordesc<bf16{b},{gl.NVMMASharedLayout.get_default_for(b, gl.bfloat16)!r}>" for b in blocks)
    types = (*descs, out, "*i32", "*fp32", "*i64", "i32!", "i32!", "i32", "i32")
    flags = (*device.STRICT.items(), ("maxnreg", pingpong.REGISTERS))
    constants = (tile.stages, turned, deep, grouped, end.value)
    return Case(name, pingpong.pingpong_kernel, types, constants, 4, 1, flags)


def _linear() -> Iterator[Case]:
    for tile in (t for t in linear.CANDIDATES if not t.whole):  # CUDA C++: test_compiles.py
        for out in ("*bf16", "*fp32"):
            name, ints = f"linear {out} {tile}", ("i32!", "i32", "i32")
            if tile.pingpong:
                yield _pingpong(name, tile, out)
                for turned, deep in ((True, True), (False, True)) if out == "*bf16" else ():
                    yield _pingpong(f"linear {turned} {deep} {tile}", tile, out, turned, deep)
                yield _pingpong(f"linear continued {out} {tile}", tile, out, deep=True, end=pingpong.CONTINUED)
            elif tile.tma:
                descs = tuple(f"tensordesc<bf16[{rows}, {tile.k}]>" for rows in (tile.m, tile.n))
                constants, types = (tile.m, tile.n, tile.k, 132), (*descs, out, *ints)
                yield Case(name, linear.linear_tma_kernel, types, constants, tile.warps, tile.stages)
            else:
                types = ("*bf16", "*bf16", out, *ints)
                for early in (False, True) if tile.m <= 16 else (False,):
                    constants = (tile.m, tile.n, tile.k, tile.swap, True, early)
                    case = f"{name} early" if early else name
                    yield Case(case, linear.linear_kernel, types, constants, tile.warps, tile.stages)
    tile, types = linear.CANDIDATES[0], ("*bf16", "*bf16", "*bf16", "i32!", "i32!", "i32!")
    yield Case("linear ragged", linear.linear_kernel, types, (tile.m, tile.n, tile.k, True, False, False), 4, 4)


def _grouped_linear() -> Iterator[Case]:
    types = ("*bf16", "*bf16", "*bf16", "*i64", "*fp32", "*i64", "i32!", "i32!", "i32", "i32")
    for tile in grouped_linear.CANDIDATES:
        for weighted in (False, True):
            constants = (tile.m, tile.n, tile.k, tile.swap, True, 128, int(weighted), 4)
            name = f"grouped_linear {'weighted ' if weighted else ''}{tile}"
            if tile.pingpong:
                end = pingpong.WEIGHTED if weighted else pingpong.PLAIN
                yield _pingpong(name, tile, "*bf16", grouped=True, end=end)
                continue
            yield Case(name, grouped_linear.grouped_kernel, types, constants, tile.warps, tile.stages)


def _gradients() -> Iterator[Case]:
    """What backward_cases.py has not: the persistent products."""
    tile = grouped_linear_backward.DW
    blocks = [tile.k, tile.m], [tile.k, tile.n]
    descs = (f"tensordesc<bf16{b},{gl.NVMMASharedLayout.get_default_for(b, gl.bfloat16)!r}>" for b in blocks)
    types = (*descs, "*bf16", "*i64", "i32!", "i32", "i32")
    flags = (*device.STRICT.items(), ("maxnreg", pingpong.REGISTERS))
    yield Case(f"grouped_linear dW {tile}", pingpong_weights.weights_kernel, types, (tile.stages,), 4, 1, flags)


ATTENTION = (
    "*bf16", "*bf16", "*bf16", "*i64", "*i64", "*i32", "*bf16", "*fp32", "*fp32", "*fp32", "fp32", "i32!", "i32",
    "i32!", "i32",
)  # fmt: skip


def _attention() -> Iterator[Case]:
    chosen = {attention.choose(longest, 3, 48, flat) for longest in (1, 512) for flat in (False, True)}
    for schedule in (s for s in attention.CANDIDATES if isinstance(s, attention.Schedule)):
        for group, head, width in [(8, 128, 128), *([(3, 64, 64), (2, 48, 64)] if schedule in chosen else [])]:
            for kind, contiguous, split in (("paged", False, False), ("split", False, True), ("packed", True, False)):
                constants = (
                    group, head, width, schedule.rows, attention.KEY_TILE, attention.SEGMENT, contiguous, split,
                )  # fmt: skip
                name, kernel = f"attention {kind} {head} {schedule}", attention_tiles.attention_kernel
                yield Case(name, kernel, ATTENTION, constants, schedule.warps, schedule.stages)


def _attention_decode() -> Iterator[Case]:
    for schedule in (s for s in attention.CANDIDATES if isinstance(s, attention.Decode)):
        for group, head in ((8, 128), (3, 64)):
            name = f"attention {head} {schedule}"
            for split in (False, True):
                constants = (group, head, attention.KEY_TILE, attention.SEGMENT, schedule.tiles, split)
                split_name = f"{name}{' split' if split else ''}"
                yield Case(split_name, attention_decode.decode_kernel, ATTENTION, constants, schedule.tiles, 1)


def _fold() -> Iterator[Case]:
    types = ("*fp32", "*fp32", "*fp32", "*i64", "*bf16", "*fp32", "*fp32", "i32!", "i32")
    for head, width in ((256, 256), (48, 64)):
        yield Case(f"fold {head}", attention_tiles.fold_kernel, types, (head, width, attention.SEGMENT, 16), 1, 3)


def row_cases() -> list[Case]:
    every = (*rows(), *backward_cases.rows())
    flags = tuple(device.ROWS.items())
    return [Case(*row[:4], *(row[4:] or (4,)), stages=3, flags=flags) for row in every]  # four warps unless it says so


def tensor_core_cases() -> list[Case]:
    return [
        *_linear(), *_grouped_linear(), *_gradients(), *_attention(), *_attention_decode(), *_fold(),
        *(Case(*case) for case in (*backward_cases.products(), *quantised_cases.products())),
    ]  # fmt: skip


def cases() -> list[Case]:
    return [*tensor_core_cases(), *row_cases()]


def resources(compiled) -> str:
    """Registers, stack (spills) and shared memory, from the machine code."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", text).group(1)) for key in ("REG", "STACK"))
    return f"{registers:4d} registers {stack:5d} B stack {compiled.metadata.shared:7d} B shared"


def main(words: list[str]) -> None:
    for case in cases():
        if all(word in case.name for word in words):
            begin = time.perf_counter()
            compiled = case.compile()
            print(f"{time.perf_counter() - begin:5.1f} s  {resources(compiled)}  {case.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
