"""nvfp4_experts.cu's own text on a CPU (warp.h, arithmetic.h): its PTX becomes calls, everything else stays as it is.

All blocks run at once and wait for each other's cells; the first one is late, and the second half of its 16 columns
once more. A piece is there when its copy returns.
"""

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host
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
# The start of an instruction's text -> the call that stands for it. A barrier counts the pieces that have come.
CALLS = ARITHMETIC | {
    "mbarrier.init": "*(u64 *)barrier = 0;",
    "{.reg .pred done": "while (((std::atomic_ref(*barrier) - 1) & 1) != parity) std::this_thread::yield();",
    "cp.async.bulk.shared": "memcpy(to, from, bytes), std::atomic_ref(*barrier)++;",
    "ld.global.f32": "v = *at;",
    "mma.sync.aligned.m16n8k16": "mma_m16n8k16(acc, a, {b0, b1});",
    "ldmatrix": "v = load_matrices(at);",
    "bar.sync %0, %1": "barrier_of(number, COUNT).arrive_and_wait();",
    "atom.relaxed": "now = std::atomic_ref(*begun)++; if (blockIdx.x == 0) pause(100);",
    "st.relaxed": "if (blockIdx.x == 0 && (size_t)cell / 2 % 16 >= 8) pause(20); *(volatile u16 *)cell = value;",
    "ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];": "v = load_cells(at);",
    "ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4 + 16];": "w = load_cells(at + 8);",
}
NOTHING = ("mbarrier.", "cp.async", "wgmma.", "fence.", "griddepcontrol", "{.reg", "ex2", "ld.", "bar.")
MORE = """
#include "arithmetic.h"
#include <map>
#include <mutex>
using std::max;
typedef unsigned short u16;
static std::map<std::tuple<int, int, int>, std::unique_ptr<std::barrier<>>> barriers;
static std::mutex guard;
static std::barrier<> &barrier_of(int number, int count) {
    std::lock_guard<std::mutex> lock(guard);
    auto &mine = barriers[{blockIdx.x, number, count}];
    if (!mine) mine = std::make_unique<std::barrier<>>(count);
    return *mine;
}
static void pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
static uint4 load_cells(const u16 *at) {
    static thread_local int waited = 0;
    uint4 v;
    bool empty = false;
    for (int i = 0; i < 8; i++) empty |= (((u16 *)&v)[i] = ((volatile const u16 *)at)[i]) == 0xFFFF;
    if (empty && waited++ < 1000) pause(1);
    else if (empty) v = {};  // nobody fills them: wrong, and seen to be
    return v;
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
        const float *down_scale, u16 *cells, u16 *out, u64 *begun, int *faults, int number) {
    barriers.clear();
    launch(blocks, threads, shared, [=] {
        experts(x, order, rows, bounds, weights, gate_up, gate_up_scale, down, down_scale, cells, out, begun, faults,
                number, 0, 1);
    }, blocks);
}
"""


def host_text(text: str) -> str:
    text = text.replace("pack(float low, float high)", "pack(float even, float odd)")  # one call for one instruction
    return cuda_host.translated(text, CALLS, ENTRY, NOTHING, '"warp.h"' + MORE)


def place(T: int, slots: int, F: int) -> tuple[Tensor, Tensor]:
    """As few_experts._place gives it at first: empty cells, a counter."""
    return torch.full((2, T * slots, F), -1, dtype=torch.int16), torch.zeros(1, dtype=torch.int64)


def forward(x: Tensor, plan, weights_TK: Tensor, gate_up, down, blocks: int, at, text=None, **changes: int):
    """As gpu.few_experts.forward by `blocks` blocks, on CPU tensors -> (out, faults). at: place's; changes: defines."""
    (T, D), slots, F = x.shape, plan.rows_TK.shape[1], gate_up[1].shape[1] // 2
    sizes = dict(few_experts.defines(T, slots, D, F, blocks)) | changes
    run = cuda_host.compiled(host_text(text or cuda.source_of(few_experts.SOURCE)), tuple(sizes.items())).run
    out, faults = torch.full_like(x, torch.nan), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    tensors = (x, plan.order_R, plan.rows_TK, plan.bounds_E1, weights_TK, *gate_up, *down, at[0], out, at[1], faults)
    run(blocks, 32 * sizes["WARPS"], sizes["SHARED"], *map(cuda_host.pointer, tensors), plan.num_experts)
    return out, faults
