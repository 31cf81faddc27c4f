// nvfp4/1 on Hopper (ops/nvfp4.py has the spec): a thread quantises a block of 16, so nothing of a block is done twice.
// nvfp4_encode.cuh says why the rounding is the spec's.
//
// Compiled with: K; THREADS; for `quantize` WIDE: x is FP32, else BF16; DECODE: the BF16 operand too; STEPS: blocks a
// thread; for `produce` GATHER: a row is a token's (1), itself (2),
// or SwiGLU's (0); KEEP: y, codes and scales too, not the operand alone.

#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"

#define SPAN (THREADS * STEPS)
#define PER_ROW (K / 16)
#define ROWS ((SPAN + PER_ROW - 2) / PER_ROW + 1)  // that SPAN blocks in a row can touch

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

#ifdef GATHER
// Eight elements of a row of y: of x BF16 [tokens, K] or [rows, K], or of silu(gate) * up, x [rows, 2K] FP32.
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
// GATHER 1: a token a block, made once and written to its `slots` rows, places [tokens, slots]; else places [rows] is order.
// Launched before the kernel in front has ended. The product behind fetches its weights while these rows are made; it
// reads the plan too, which for SwiGLU is older than the product in front.
#define ROW(copy) (i64)(GATHER == 1 ? (u32)places[source * slots + copy] : source)
extern "C" __global__ void __launch_bounds__(THREADS) produce(
        const void *x, const i64 *places, uint4 *y, uint2 *codes, u8 *scales, float *outer, uint4 *decoded, int *faults,
        int slots, int bad_slot) {
    __shared__ uint4 row_y[K / 8];
    __shared__ u32 tops[THREADS / 32];
    if (GATHER == 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (GATHER != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    const u32 source = blockIdx.x, token = GATHER == 1 ? source : (u32)places[source] / (u32)slots;
    const u32 copies = GATHER == 1 ? slots : 1;
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
