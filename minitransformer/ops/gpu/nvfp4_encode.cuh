// A block of 16 to NVFP4 (nvfp4/1), and SwiGLU of FP32 (swiglu/1); stands behind nvfp4.cuh.
//
// E2M1 in the FP32 adder. The codes 0 .. 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6, so with y = |x * enc| and sat(a) =
// min(max(a, 0), 1) the straight pieces between them are 4 sat(y/2) + 2 sat(y/2 - 1) + sat(y/2 - 2), 7 at the end. All
// three are exact (y/2 - 1 and y/2 - 2 lie within a factor of two of y/2 where they count) and one at most is no
// integer. Added one after another to 2^23 + 16 * other codes, whose neighbours are 1 apart, that one is rounded, once,
// to the nearest integer, ties to the even one: the spec's rounding, as ties of E2M1 go to even codes too. What is added
// to before is even. x 16 makes room for the next code; four codes, then the low halves of two sums are a word of eight.
//
// Compiled with: WIDE: x is FP32, else BF16; DECODE: what the product reads is made too.

typedef unsigned char u8;

#define WORDS (WIDE ? 16 : 8)  // of a block of x
#define MAGIC 8388608.0f
#define MOST 3.4028234663852886e38f
#define SIGNS 0x80008000u
#define ALL 0xFFFFFFFFu

struct Row {  // what a row's blocks need: s_enc / 6, s_dec, and its amax (-1 if that is not finite)
    float encode, decode, amax;
};

// min(max(y / 2 + c, 0), 1), one rounding.
__device__ __forceinline__ float ramp(float y, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, 0f3F000000, %2;" : "=f"(r) : "f"(y), "f"(c));
    return r;
}

// Non-negative FP32 -> E4M3 bits, nearest even, saturating at 448.
__device__ __forceinline__ u32 e4m3(float v) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(0.0f), "f"(v));
    return d;
}

// a & ~SIGNS, taken once: the compiler would mask each half again.
__device__ __forceinline__ u32 magnitudes(u32 a) {
    u32 d;
    asm("and.b32 %0, %1, 0x7FFF7FFF;" : "=r"(d) : "r"(a));
    return d;
}

// Magnitudes -> four codes, the first in the lowest of 16 bits.
__device__ __forceinline__ u32 four_codes(const float *a, float enc) {
    float sum = MAGIC;
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float y = __fmul_rn(a[i], enc);
        if (i < 3) sum = __fmaf_rn(sum, 16.0f, -15.0f * MAGIC);
        sum = __fmaf_rn(ramp(y, 0.0f), 4.0f, sum);
        sum = __fmaf_rn(ramp(y, -1.0f), 2.0f, sum);
        sum = __fadd_rn(sum, ramp(y, -2.0f));
    }
    return __float_as_uint(sum);
}

// Bit 15 and 31 of four words -> bit 3 of the eight nibbles; other bits are 0.
__device__ __forceinline__ u32 sign_nibbles(u32 a, u32 b, u32 c, u32 d) {
    u32 ab = __byte_perm(a, b, 0x7351), cd = __byte_perm(c, d, 0x7351);
    u32 even = __byte_perm(ab, cd, 0x5410) >> 4, odd = __byte_perm(ab, cd, 0x7632);
    return (even & 0x08080808) | (odd & 0x80808080);
}

// A row's amax -> what its blocks need, and s_dec.
__device__ __forceinline__ Row row_of(float amax) {
    float s_enc = fminf(__fdiv_rn(2688.0f, amax), MOST);
    if (amax == 0.0f || s_enc == 0.0f) s_enc = 1.0f;
    return {__fmul_rn(s_enc, 1.0f / 6.0f), __fdiv_rn(1.0f, s_enc), amax < MOST * 2.0f ? amax : -1.0f};
}

// One block: magnitudes -> two words of codes (signs included), the scale's bits; top its largest magnitude.
__device__ __forceinline__ u32 encode(const float (&a)[16], const u32 (&pairs)[8], float top, Row row, u32 (&codes)[2],
                                      u32 (&decoded)[8]) {
    u32 d = e4m3(fminf(__fmul_rn(top, row.encode), MOST));
    float scale = __fmul_rn(__uint_as_float(d << 20), 1.329227995784916e36f);  // exponent bias 7 to 127: 2^120
    float enc = fminf(__frcp_rn(__fmul_rn(scale, row.decode)), MOST);
    u32 two_scales = __byte_perm(__float_as_uint(scale), 0, 0x3232);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 low = four_codes(a + 8 * h, enc), high = four_codes(a + 8 * h + 4, enc);
        const u32 *p = pairs + 4 * h;
        codes[h] = __byte_perm(low, high, 0x5410) | sign_nibbles(p[0], p[1], p[2], p[3]);
#if DECODE
#pragma unroll
        for (int q = 0; q < 2; q++) {  // a nibble picks a byte of its value in BF16
            u32 four = q ? high : low;
            u32 upper = __byte_perm(0x3F3F3F00, 0x40404040, four), lower = __byte_perm(0xC0800000, 0xC0804000, four);
            u32 *out = decoded + 4 * h + 2 * q;
            out[0] = mul2(__byte_perm(lower, upper, 0x5140) | (p[2 * q] & SIGNS), two_scales);
            out[1] = mul2(__byte_perm(lower, upper, 0x7362) | (p[2 * q + 1] & SIGNS), two_scales);
        }
#endif
    }
    return d;
}

// The words of a block of x -> magnitudes, pairs with the signs in bit 15 and 31, and the largest magnitude.
__device__ __forceinline__ float split(const u32 (&word)[WORDS], float (&a)[16], u32 (&pairs)[8]) {
    u32 top = 0;
#if WIDE
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 magnitude = word[i] & 0x7FFFFFFF;
        top = max(top, magnitude);
        a[i] = __uint_as_float(magnitude);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = __byte_perm(word[2 * i], word[2 * i + 1], 0x7632);
    return __uint_as_float(top);
#else
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 magnitude = magnitudes(word[i]);
        top = __vmaxu2(top, magnitude);
        a[2 * i] = __uint_as_float(magnitude << 16), a[2 * i + 1] = __uint_as_float(magnitude & 0xFFFF0000);
        pairs[i] = word[i];
    }
    return __uint_as_float(max(top << 16, top & 0xFFFF0000));
#endif
}

// exp2_32 and silu_32 of rounding.py.
__device__ __forceinline__ float exp2_32(float x) {
    float t = __fadd_rn(x, 12582912.0f), f = __fsub_rn(x, __fsub_rn(t, 12582912.0f));
    float q = __fmaf_rn(f, 0x1.416b52p-13f, 0x1.5f082ep-10f);
    q = __fmaf_rn(f, q, 0x1.3b2de0p-7f);
    q = __fmaf_rn(f, q, 0x1.c6af7cp-5f);
    q = __fmaf_rn(f, q, 0x1.ebfbdcp-3f);
    q = __fmaf_rn(f, q, 0x1.62e430p-1f);
    float y = __uint_as_float(__float_as_uint(__fmaf_rn(f, q, 1.0f)) + (__float_as_uint(t) << 23));
    y = x < -126.0f ? 0.0f : x >= 128.0f ? __uint_as_float(0x7F800000) : y;
    return x == x ? y : x;
}

__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(exp2_32(__fmul_rn(gate, -0x1.715476p+0f)), 1.0f)), up);
}

// Two BF16, nearest even; a NaN becomes 0x7fc0.
__device__ __forceinline__ u32 pair_of(float even, float odd) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    if (even != even) pair = (pair & 0xFFFF0000) | 0x7FC0;
    return odd == odd ? pair : (pair & 0xFFFF) | 0x7FC00000;
}
