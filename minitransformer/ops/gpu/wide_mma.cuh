// Products of four warps with both operands in shared memory, and what two blocks of a cluster share. Included by
// pair_product.cu, which defines BOX.

__device__ __forceinline__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

__device__ __forceinline__ void meet_pair() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void arrive_at(u64 *barrier, u32 block) {
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" :: "r"(address(barrier)), "r"(block) : "memory");
}

// What the first block of the pair has there, after meet_pair.
__device__ __forceinline__ int read_first(const int *at) {
    int value;
    asm volatile("{.reg .u32 its; mapa.shared::cluster.u32 its, %1, 0;\nld.shared::cluster.s32 %0, [its];}"
        : "=r"(value) : "r"(address(at)) : "memory");
    return value;
}

// For both blocks.
__device__ __forceinline__ void load_both(char *to, const TensorMap *map, int column, int row, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        :: "r"(address(to)), "l"(map), "r"(column), "r"(row), "r"(address(barrier)), "h"((u16)3) : "memory");
}

// A box of 64 rows of 128 bytes: 128-byte swizzle, 8 rows every 1024 bytes. Of an operand that is turned, the next 64
// elements are one box on. A block's own addresses hold its rank above the bits that count.
__device__ __forceinline__ u64 describe(const char *box) {
    return (u64)(1024 >> 4 | 1 << 30) << 32 | BOX >> 4 << 16 | address(box) >> 4 & 0x3FFF;
}

#include "operands.cuh"
#define MMA(n, list, outputs, a, b, more) if constexpr (N == n) asm volatile("{.reg .pred p;\n" \
    "setp.ne.b32 p, %" #more ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, %" #a ", %" #b \
    ", p, 1, 1, 1, 0;}" : outputs : "l"(columns), "l"(rows), "r"(add));

// d (64 columns of y x N rows) = 16 of the depth, + d if `add`. The columns' operand is turned.
template <int N>
__device__ __forceinline__ void product(float (&d)[64], u64 columns, u64 rows, int add) {
    MMA(16, A8, O8, 8, 9, 10)
    MMA(32, A16, O16, 16, 17, 18)
    MMA(48, A24, O24, 24, 25, 26)
    MMA(64, A32, O32, 32, 33, 34)
    MMA(80, A40, O40, 40, 41, 42)
    MMA(96, A48, O48, 48, 49, 50)
    MMA(104, A52, O52, 52, 53, 54)
    MMA(112, A56, O56, 56, 57, 58)
    MMA(120, A60, O60, 60, 61, 62)
    MMA(128, A64, O64, 64, 65, 66)
}
