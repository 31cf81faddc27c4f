"""nvfp4_many.cu's own text on a CPU (warpgroup.h), as emulated_prefill.py has attention's."""

import ctypes
import re

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host, emulated_experts, emulated_prefill
from minitransformer.ops.gpu import cuda, many_rows
from minitransformer.ops.gpu.pack import UNIT_WORDS

CALLS = emulated_prefill.CALLS | emulated_experts.ARITHMETIC | {
    "ld.global.f32": "v = *at;",
}
PRODUCT = """
template <int N, int M> void multiply(float (&d)[M], const u32 (&a)[4], u64 rows, int add) {
    wgmma((float (&)[N / 2])d, a, rows, add, false);
}
"""
ENTRY = """
extern "C" void run(int blocks, int shared, const TensorMap *x, const TensorMap *w, const float *row_scale,
        const float *weight_scale, const int *schedule, void *y, int bound, int experts, int N, int K) {
    launch(blocks, 384, shared, [=] {
        gridDim.x = blocks;
        many(*x, *w, row_scale, weight_scale, schedule, y, bound, experts, N, K);
    });
}
"""


def host_text(text: str) -> str:
    text = re.sub(r"// Lists of a product's registers.*?\n}\n", PRODUCT, text, flags=re.S)
    text = text.replace("pack(float low, float high)", "pack(float even, float odd)")  # one call for one instruction
    return cuda_host.translated(text, CALLS, ENTRY, (*emulated_prefill.NOTHING, "ldmatrix"), '"warpgroup.h"')


def schedule_of(bounds: list[int], most: int, step: int) -> tuple[Tensor, int]:
    """As ops/gpu/schedule.py makes it."""
    cells = []
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        count, base = -(-(end - begin) // most), len(cells)
        rows = -(-(end - begin) // max(count, 1) // step) * step
        cells += [(e, first, min(first + rows, end), base, count) for first in range(begin, end, rows or 1)]
    bound = len(cells) + 2
    return torch.tensor([*cells, (0,) * 5, (0,) * 5, (len(cells), 0, 0, 0, 0)], dtype=torch.int32), bound


def product(schedule, x, scale_R, packed, scale_EN, plan, out_dtype, swiglu=False, blocks=2, text=None):
    """As gpu.many_rows.product by `blocks` blocks, on CPU tensors -> y."""
    (R, K), (E, N) = x.shape, scale_EN.shape
    out = many_rows.SWIGLU if swiglu else many_rows.FP32 if out_dtype == torch.float32 else many_rows.BF16
    y = torch.full((R, N // 2 if swiglu else N), torch.nan, dtype=out_dtype)
    tiles, bound = schedule_of(plan.bounds_E1.tolist(), schedule.rows, many_rows.STEP)
    words = packed.view(-1, packed.shape[2] * UNIT_WORDS)
    maps = [(ctypes.c_uint64 * 16)(t.data_ptr(), *t.shape, *block, t.element_size())
            for t, block in ((x, (schedule.rows // 4, 64)), (words, (4 if swiglu else 8, UNIT_WORDS)))]  # fmt: skip
    text = host_text(text or cuda.source_of(many_rows.SOURCE))
    run = cuda_host.compiled(text, schedule.defines(scale_R is None, out)).run
    run(blocks, schedule.shared(out), *maps, *map(cuda_host.pointer, (scale_R, scale_EN, tiles, y)), bound, E, N, K)
    return y
