// Products of four warps with the first operand in registers and up to 192 rows of the second. Included by nvfp4_many.cu.

#include "operands.cuh"
#define MMA(n, half, a0, a1, a2, a3, b, more) if constexpr (N == n) asm volatile("{.reg .pred p;\n" \
    "setp.ne.b32 p, %" #more ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" A##half "}, {%" #a0 ", %" #a1 \
    ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 0;}" \
    : O##half : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));

// d (64 x N) = a (64 x 16) times 16 columns of N rows, + d if `add`.
template <int N, int M>
__device__ __forceinline__ void multiply(float (&d)[M], const u32 (&a)[4], u64 rows, int add) {
    static_assert(N % 16 == 0 && N <= 2 * M, "registers");
    MMA(16, 8, 8, 9, 10, 11, 12, 13)
    MMA(32, 16, 16, 17, 18, 19, 20, 21)
    MMA(48, 24, 24, 25, 26, 27, 28, 29)
    MMA(64, 32, 32, 33, 34, 35, 36, 37)
    MMA(80, 40, 40, 41, 42, 43, 44, 45)
    MMA(96, 48, 48, 49, 50, 51, 52, 53)
    MMA(112, 56, 56, 57, 58, 59, 60, 61)
    MMA(128, 64, 64, 65, 66, 67, 68, 69)
    MMA(144, 72, 72, 73, 74, 75, 76, 77)
    MMA(160, 80, 80, 81, 82, 83, 84, 85)
    MMA(176, 88, 88, 89, 90, 91, 92, 93)
    MMA(192, 96, 96, 97, 98, 99, 100, 101)
}
