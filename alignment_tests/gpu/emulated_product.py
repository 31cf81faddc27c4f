"""nvfp4_product.cu's own text on a CPU (warp.h): its PTX becomes calls, everything else is compiled as it stands."""

import math

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host
from minitransformer.ops.gpu import cuda
from minitransformer.ops.gpu.pack import UNIT_ROWS

SOURCE = "nvfp4_product.cu"
# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "mul.bf16x2": "d = mul_bf16x2(a, b);",
    "lop3.b32": "pair = (word & 0x0FF00FF0) | 0x70007000;",
    "{.reg .b16": "low = (pair & 0xFFFF) * 0x10001, high = (pair >> 16) * 0x10001;",
    "ld.global.nc.L1::no_allocate.L2::256B.v4": "memcpy(&v, unit, 16);",
    "ld.global.nc.L1::no_allocate.L2::256B.v2": "memcpy(&v, unit, 8);",
    "ld.global.f32": "v = *at;",
    "griddepcontrol": ";",
    "ldmatrix": "v = load_matrices(at);",
    "mma.sync.aligned.m16n8k16": "mma_m16n8k16(v, a, {b0, b1});",
    "cvt.rn.bf16": "bits = nearest_bf16(value);",
    "cp.async.cg": "memcpy(block_memory + to, x + (i64)(first + row) * K + k, 16);",
    "st.shared.v4": "memset(block_memory + to, 0, 16);",
    "cp.async.wait_all": ";",
}
ENTRIES = """
extern "C" void run_product(int blocks, int threads, int shared, const char *packed, const u16 *x,
        const float *row_scale, const float *weight_scale, const i64 *bounds, void *y, int experts, int N, int K) {
    launch(blocks, threads, shared, [=] { product(packed, x, row_scale, weight_scale, bounds, y, experts, N, K); });
}
"""


def product(schedule, x, scale_R, packed, scale_EN, bounds, out_dtype, text=None) -> Tensor:
    """As gpu.quantised_linear.packed_product, on CPU tensors."""
    (R, K), (E, N), rows = x.shape, scale_EN.shape, 8 * schedule.groups
    y = torch.full((R, N), torch.nan, dtype=out_dtype)
    groups = (R + min(E, R) * (rows - 1)) // rows
    blocks = groups * math.ceil(math.ceil(N / UNIT_ROWS) / (schedule.tiles * schedule.warps))
    defines = schedule.defines(scale_R is None, out_dtype == torch.float32)
    text = cuda_host.translated(text or cuda.source_of(SOURCE), CALLS, ENTRIES)
    tensors = map(cuda_host.pointer, (packed, x, scale_R, scale_EN, bounds, y))
    run = cuda_host.compiled(text, defines).run_product
    run(blocks, 32 * schedule.warps, schedule.shared(K), *tensors, E, N, K)
    return y
