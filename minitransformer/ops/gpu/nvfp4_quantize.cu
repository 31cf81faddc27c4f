// nvfp4/1 on Hopper (ops/nvfp4.py has the spec): a thread quantises a block of 16, so nothing of a block is done twice.
//
// E2M1 in the FP32 adder. The codes 0 .. 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6, so with y = |x * enc| and sat(a) =
// min(max(a, 0), 1) the straight pieces between them are 4 sat(y/2) + 2 sat(y/2 - 1) + sat(y/2 - 2), 7 at the end. All
// three are exact (y/2 - 1 and y/2 - 2 lie within a factor of two of y/2 where they count) and one at most is no
// integer. Added one after another to 2^23 + 16 * other codes, whose neighbours are 1 apart, that one is rounded, once,
// to the nearest integer, ties to the even one: the spec's rounding, as ties of E2M1 go to even codes too. What is added
// to before is even. x 16 makes room for the next code; four codes, then the low halves of two sums are a word of eight.
//
// Compiled with: K; THREADS; for `quantize` WIDE: x is FP32, else BF16; DECODE: the BF16 operand too; STEPS: blocks a
// thread; for `produce` GATHER: a row is a token's, else SwiGLU's; KEEP: y, codes and scales too, not the operand alone.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define SPAN (THREADS * STEPS)
#define PER_ROW (K / 16)
#define ROWS ((SPAN + PER_ROW - 2) / PER_ROW + 1)  // that SPAN blocks in a row can touch
#define WORDS (WIDE ? 16 : 8)                      // of a block of x
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

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
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

// Each 32 bytes of `decoded` as whole sectors: two lanes exchange halves of their two blocks.
__device__ __forceinline__ void exchange(u32 (&d)[8]) {
    bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 got = __shfl_xor_sync(ALL, odd ? d[i] : d[4 + i], 1);
        d[i] = odd ? got : d[i], d[4 + i] = odd ? d[4 + i] : got;
    }
}

__device__ __forceinline__ void store_decoded(uint4 *to, u32 b, u32 blocks, const u32 (&d)[8]) {
    u32 first = b & ~1u, odd = threadIdx.x & 1;
    if (first < blocks) to[2 * (i64)first + odd] = make_uint4(d[0], d[1], d[2], d[3]);
    if (first + 1 < blocks) to[2 * (i64)first + 2 + odd] = make_uint4(d[4], d[5], d[6], d[7]);
}

// x [rows, K], amax and outer [rows / group]. A fault names token order[row] / slots, or the row where slots is 0.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(
        const uint4 *x, const float *amax, const i64 *order, uint2 *codes, u8 *scales, float *outer, uint4 *decoded,
        int *faults, int rows, int group, int slots, int bad_slot, int small_slot) {
    __shared__ Row row_data[ROWS];
    u32 blocks = (u32)rows * PER_ROW, begin = blockIdx.x * SPAN, first_row = begin / PER_ROW;
    u32 word[STEPS][WORDS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {  // on their way while the rows' scales are made
        u32 b = begin + s * THREADS + threadIdx.x;
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) {
            uint4 v = b < blocks ? x[(i64)b * (WORDS / 4) + i] : make_uint4(0, 0, 0, 0);
            word[s][4 * i] = v.x, word[s][4 * i + 1] = v.y, word[s][4 * i + 2] = v.z, word[s][4 * i + 3] = v.w;
        }
    }
    for (u32 i = threadIdx.x; i < ROWS && first_row + i < rows; i += THREADS) {
        u32 row = first_row + i, entry = row / group;
        row_data[i] = row_of(amax[entry]);
        if (row * PER_ROW >= begin && row * PER_ROW < begin + SPAN && row == entry * group)
            outer[entry] = row_data[i].decode;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        u32 b = begin + s * THREADS + threadIdx.x, row = b / PER_ROW, pairs[8], code[2], out[8];
        float a[16], top = split(word[s], a, pairs);
        Row data = row_data[b < blocks ? row - first_row : 0];
        u32 d = encode(a, pairs, top, data, code, out);
        if (b < blocks) {
            codes[b] = make_uint2(code[0], code[1]);
            scales[b] = d;
            if (!(top <= data.amax)) {
                bool bad = __float_as_uint(top) >= 0x7F800000;
                atomicMin(faults + (bad ? bad_slot : small_slot), slots ? (int)order[row] / slots : (int)row);
            }
        }
#if DECODE
        exchange(out);
        store_decoded(decoded, b, blocks, out);
#endif
    }
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

#ifdef GATHER
// Eight elements of a row of y. GATHER: of x [tokens, K] BF16; else of silu(gate) * up, x [rows, 2K] FP32.
__device__ __forceinline__ uint4 eight(const void *x, u32 from, u32 chunk) {
#if GATHER
    return ((const uint4 *)x)[(i64)from * (K / 8) + chunk];
#else
    const float4 *gate = (const float4 *)x + (i64)from * (K / 2) + 2 * chunk, *up = gate + K / 4;
    float4 g0 = gate[0], g1 = gate[1], u0 = up[0], u1 = up[1];
    return make_uint4(pair_of(swiglu(g0.x, u0.x), swiglu(g0.y, u0.y)), pair_of(swiglu(g0.z, u0.z), swiglu(g0.w, u0.w)),
                      pair_of(swiglu(g1.x, u1.x), swiglu(g1.y, u1.y)), pair_of(swiglu(g1.z, u1.z), swiglu(g1.w, u1.w)));
#endif
}

// A row of y [rows, K] a block of threads, and its NVFP4 with its own outer scale, decoded too. A fault names its token.
// GATHER: a token a block, made once and written to its `slots` rows, places [tokens, slots]; else places [rows] is order.
// Launched before the kernel in front has ended. The product behind fetches its weights while these rows are made; it
// reads the plan too, which for SwiGLU is older than the product in front.
#define ROW(copy) (i64)(GATHER ? (u32)places[source * slots + copy] : source)
extern "C" __global__ void __launch_bounds__(THREADS) produce(
        const void *x, const i64 *places, uint4 *y, uint2 *codes, u8 *scales, float *outer, uint4 *decoded, int *faults,
        int slots, int bad_slot) {
    __shared__ uint4 row_y[K / 8];
    __shared__ u32 tops[THREADS / 32];
    if (GATHER) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (!GATHER) asm volatile("griddepcontrol.wait;" ::: "memory");
    const u32 source = blockIdx.x, token = GATHER ? source : (u32)places[source] / (u32)slots;
    const u32 copies = GATHER ? slots : 1;
    u32 top = 0;
#pragma unroll
    for (u32 c = threadIdx.x; c < K / 8; c += THREADS) {
        uint4 v = eight(x, source, c);
        row_y[c] = v;
        for (u32 i = 0; KEEP && i < copies; i++) y[ROW(i) * (K / 8) + c] = v;
        top = __vmaxu2(__vmaxu2(__vmaxu2(magnitudes(v.x), magnitudes(v.y)), magnitudes(v.z)),
                       __vmaxu2(magnitudes(v.w), top));
    }
    top = __reduce_max_sync(ALL, max(top & 0xFFFF, top >> 16));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) top = max(top, tops[i]);
    Row data = row_of(__uint_as_float(top << 16));
    for (u32 i = threadIdx.x; i < copies; i += THREADS) outer[ROW(i)] = data.decode;
    if (threadIdx.x == 0 && top >= 0x7F80) atomicMin(faults + bad_slot, (int)token);
    if (threadIdx.x / 32 * 32 >= PER_ROW) return;  // whole warps: the others exchange what they store
    u32 b = threadIdx.x, pairs[8], code[2], out[8], word[8];
    float a[16];
    if (b < PER_ROW) {
        uint4 low = row_y[2 * b], high = row_y[2 * b + 1];
        word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
        word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
        float block_top = split(word, a, pairs);
        u32 d = encode(a, pairs, block_top, data, code, out);
        for (u32 i = 0; KEEP && i < copies; i++) {
            codes[ROW(i) * PER_ROW + b] = make_uint2(code[0], code[1]);
            scales[ROW(i) * PER_ROW + b] = d;
        }
    }
    exchange(out);
    for (u32 i = 0; i < copies; i++) store_decoded(decoded + ROW(i) * (2 * PER_ROW), b, PER_ROW, out);
}
#endif
