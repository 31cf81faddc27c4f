// Packed NVFP4 weights and what the tensor core reads of them. Included by the kernels that multiply by such weights.
//
// Packed weight of one expert (pack.py): for 16 rows of W and 64 of its columns 576 bytes, 32 lanes x 4 words of codes
// and 8 x 2 words of block scales. Lane 4g + t holds rows g and g + 8; its word s holds the columns 16s + 2t, 2t + 1,
// 2t + 8 and 2t + 9: what it gives to step s of mma.m16n8k16, or of wgmma, whose four warps have 16 rows each.
//
// A word's four pairs (two neighbours of one row each) are a BF16 pair after one shift and a mask, or two: E2M1's
// exponent and mantissa stand in BF16's lowest exponent bits and highest mantissa bit, which is code * 2^-126,
// subnormal 0.5 included. A scale byte has 5 exponent and 3 mantissa bits; with exponent bits 0x7000 it is the BF16
// scale * 2^107. Their BF16 product is exact: w * 2^-19 with w = code * scale, which is normal (|w| >= 2^-10 or 0).
//
// Why 2^-19 may stay in (EXACT 0) for NVFP4 activations: both operands are 0 or multiples of 2^-10 below 2^12, so the
// products are multiples of 2^-39 below 2^5 after scaling. All exponents of a step lie above its floor of -133, an
// accumulator is 0 or at least 2^-64 and below 2^5 * K, hence normal: the step only compares exponents and truncates
// relative to the largest one, and 2^-19 moves all of them alike. The epilogue multiplies by 2^19, which is exact.
// Other activations may reach the floor, so for them (EXACT 1) each pair is multiplied by 2^19 first.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#include "blocks.cuh"

#define UNIT 576  // bytes of 16 rows x 64 columns
#define TRIPLE 0x01C001C0u
#define SIGN 0x80008000u

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Scales of rows g and g + 8 for step s of a unit, each twice.
__device__ __forceinline__ void scales_of(uint2 s, int step, u32 &low, u32 &high) {
    u32 word = step < 2 ? s.x : s.y, pair;
    if (step & 1) word = __byte_perm(word, word, 0x2301);  // the odd block's byte lies as the even one's does, turned by 8
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(0x0FF00FF0), "r"(0x70007000));  // & and |
    // Halves taken so become operand selectors of the product, not instructions.
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}"
        : "=r"(low), "=r"(high) : "r"(pair));
}

// One word -> the A registers of one step. SHORTER: two shifts by one product, sums of bits that leave the masked ones alone;
// a few per cent faster where one row of x is multiplied by what is decoded, slower beside many.
template <bool TWICE, bool SHORTER = false>
__device__ __forceinline__ void decode(u32 word, u32 low, u32 high, u32 (&a)[4]) {
    a[0] = mul2(word & (TRIPLE | SIGN), low);
    a[1] = mul2((word << 3) & (TRIPLE | SIGN), high);
    if (SHORTER) a[2] = mul2((word & 0x20072007u) * 68 & (TRIPLE | SIGN), low);
    else a[2] = mul2(((word << 6) & TRIPLE) | ((word << 2) & SIGN), low);
    a[3] = mul2(((word >> 3) & TRIPLE) | ((word << 1) & SIGN), high);
    if (TWICE) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = mul2(a[i], 0x49004900u);
    }
}

// volatile: asked for where it stands, before the chain, not where the epilogue needs it; not the read-only path,
// which a kernel that begins before its predecessor has ended may not take for what that one writes.
__device__ __forceinline__ float load_early(const float *at) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}
