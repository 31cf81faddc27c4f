"""nvfp4_experts.cu's own text on a CPU (warp.h, arithmetic.h): its PTX becomes calls, everything else stays as it is.

Blocks run one after another, so nobody waits where all meet: the kernel runs twice, the second time on all rows. A
piece is there when its copy returns. That a block reads only what another has shown is not checked.
"""

import torch
from torch import Tensor

from alignment_tests.gpu import emulated_product
from minitransformer.ops.gpu import cuda, few_experts

# Of nvfp4.cuh and nvfp4_encode.cuh.
ARITHMETIC = {
    "mul.bf16x2": "d = mul_bf16x2(a, b);",
    "lop3.b32": "pair = (word & 0x0FF00FF0) | 0x70007000;",
    "{.reg .b16": "low = (pair & 0xFFFF) * 0x10001, high = (pair >> 16) * 0x10001;",
    "fma.rn.sat.f32": "r = saturated_fma(y, 0.5f, c);",
    "cvt.rn.satfinite.e4m3x2.f32": "d = e4m3_code(v);",
    "and.b32": "d = a & 0x7FFF7FFF;",
    "cvt.rn.bf16x2": "pair = nearest_bf16(even) | (u32)nearest_bf16(odd) << 16;",
}
# The start of an instruction's text -> the call that stands for it. A barrier counts the copies that have ended.
CALLS = ARITHMETIC | {
    "mbarrier.init": "*(u64 *)barrier = 0;",
    "{.reg .pred done": "while (((std::atomic_ref(*barrier) - 1) & 1) != parity) std::this_thread::yield();",
    "cp.async.bulk.shared": "memcpy(to, from, bytes), std::atomic_ref(*barrier)++;",
    "cp.async.cg": "memcpy(to, from, 16);",
    "ld.global.f32": "v = *at;",
    "mma.sync.aligned.m16n8k16": "mma_m16n8k16(acc, a, {b0, b1});",
    "ldmatrix": "v = load_matrices(at);",
    "bar.sync %0, 64": "pair_barrier(warp / 2).arrive_and_wait();",
    "atom.acq_rel": "now = ~0ull;",
}
NOTHING = ("mbarrier.", "cp.async", "wgmma.", "fence.", "griddepcontrol", "{.reg", "ex2", "ld.", "bar.", "")
MORE = """
#include "arithmetic.h"
#include <map>
#include <mutex>
using std::max;
static std::map<int, std::unique_ptr<std::barrier<>>> pair_barriers;
static std::mutex guard;
static std::barrier<> &pair_barrier(int pair) {
    std::lock_guard<std::mutex> lock(guard);
    auto &mine = pair_barriers[pair];
    if (!mine) mine = std::make_unique<std::barrier<>>(64);
    return *mine;
}
static void atomicMax(unsigned *at, unsigned value) {
    std::atomic_ref<unsigned> cell(*at);
    for (unsigned old = cell; value > old && !cell.compare_exchange_weak(old, value);) {}
}
static int __popc(unsigned value) { return __builtin_popcount(value); }
"""
ENTRY = """
extern "C" void run(int blocks, int threads, int shared, const u16 *x, const i64 *order, const i64 *rows,
        const i64 *bounds, const float *weights, const char *gate_up, const float *gate_up_scale, const char *down,
        const float *down_scale, u16 *h, u16 *out, int *faults, int number) {
    for (int twice = 0; twice < 2; twice++)
        launch(blocks, threads, shared, [=] {
            experts(x, order, rows, bounds, weights, gate_up, gate_up_scale, down, down_scale, h, out, 0, faults,
                    number, 0, 1);
        });
}
"""


def host_text(text: str) -> str:
    calls = CALLS | dict.fromkeys(NOTHING, ";")
    text = text.replace("pack(float low, float high)", "pack(float even, float odd)")  # one call for one instruction
    text = text.replace("extern __shared__ __align__(128) char memory[];", "char *memory = block_memory;")
    text = text.replace("(u32)__cvta_generic_to_shared(p)", "(u32)((const char *)p - block_memory)")
    return emulated_product.host_text(text, calls, ENTRY).replace('#include "warp.h"', '#include "warp.h"' + MORE, 1)


def forward(folder, x: Tensor, plan, weights_TK: Tensor, gate_up, down, blocks: int, text=None, **changes: int):
    """As gpu.few_experts.forward by `blocks` blocks -> (out, faults), on CPU tensors. changes: to what is defined."""
    (T, D), slots, F = x.shape, plan.rows_TK.shape[1], gate_up[1].shape[1] // 2
    sizes = dict(few_experts.defines(T, slots, D, F, blocks)) | changes
    run = emulated_product.library(str(folder), host_text(text or cuda.source_of(few_experts.SOURCE)),
                                   tuple(sizes.items())).run  # fmt: skip
    h, out = torch.zeros(T * slots, F, dtype=torch.bfloat16), torch.full_like(x, torch.nan)
    faults = torch.full((2,), 2**31 - 1, dtype=torch.int32)
    tensors = (x, plan.order_R, plan.rows_TK, plan.bounds_E1, weights_TK, *gate_up, *down, h, out, faults)
    run(blocks, 32 * sizes["WARPS"], sizes["SHARED"], *map(emulated_product._at, tensors), plan.num_experts)
    return out, faults
