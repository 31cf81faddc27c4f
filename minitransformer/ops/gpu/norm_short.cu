// The input gradient of rms_norm/1 for short rows, such as heads': eight threads a row, so that a row's division and root
// are made by eight threads and its halving tree takes three exchanges.
//
// Thread j of a row has the columns 16k + 2j and 16k + 2j + 1. The tree's halves of 64, 32 and 16 meet in one thread, those
// of 8, 4 and 2 in threads j and j + 4, j + 2, j + 1, the last two are the thread's own. A lane has one element, or none:
// zeros that are added change nothing but a -0, which the last addition of 0 makes the +0 that the spec's lanes start from.
//
// Compiled with: D, a power of two of 16 to 128.

typedef unsigned int u32;
typedef long long i64;

#define THREADS 128
#define STEPS 4
#define BLOCKS (D / 16)
#define ALL 0xFFFFFFFFu

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }

// Two BF16, nearest even; a NaN becomes 0x7fc0.
__device__ __forceinline__ u32 pair_of(float even, float odd) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    if (even != even) pair = (pair & 0xFFFF0000) | 0x7FC0;
    return odd == odd ? pair : (pair & 0xFFFF) | 0x7FC00000;
}

// Templates: loops over halves are not unrolled.
template <int HALF> __device__ __forceinline__ void fold(float (&a)[2 * BLOCKS]) {
    if constexpr (HALF > 1) {
#pragma unroll
        for (int i = 0; i < HALF; i++) a[i] = __fadd_rn(a[i], a[i + HALF]);
        fold<HALF / 2>(a);
    }
}

template <int BY> __device__ __forceinline__ void exchange(float (&a)[2 * BLOCKS]) {
#pragma unroll
    for (int i = 0; i < 2; i++) a[i] = __fadd_rn(a[i], __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(a[i]), BY)));
}

// The halving tree over a row; each of its threads gets the sum.
__device__ __forceinline__ float tree(float (&a)[2 * BLOCKS]) {
    fold<BLOCKS>(a);
    exchange<4>(a), exchange<2>(a), exchange<1>(a);
    return __fadd_rn(__fadd_rn(a[0], a[1]), 0.0f);
}

// dy, x, dx [T, D], w [D] BF16 as pairs, inverse [T] FP32 (1 / rms, which the weight's gradient needs too).
extern "C" __global__ void __launch_bounds__(THREADS) norm_short(
        const u32 *dy, const u32 *x, const u32 *w, u32 *dx, float *inverse, int T, int eps_bits) {
    int j = threadIdx.x % 8, first = blockIdx.x * (THREADS / 8 * STEPS) + threadIdx.x / 8;
    u32 weight[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) weight[k] = w[8 * k + j];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        int row = first + s * (THREADS / 8);
        i64 at = (i64)row * (D / 2) + j;
        float v[2 * BLOCKS], g[2 * BLOCKS], a[2 * BLOCKS];
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            u32 both = row < T ? x[at + 8 * k] : 0, gradient = row < T ? dy[at + 8 * k] : 0;
            v[2 * k] = low(both), v[2 * k + 1] = high(both);
            g[2 * k] = __fmul_rn(low(gradient), low(weight[k])), g[2 * k + 1] = __fmul_rn(high(gradient), high(weight[k]));
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) a[i] = __fmul_rn(v[i], v[i]);
        float mean = __fmul_rn(tree(a), 1.0f / D);  // the quotient, rounded the same way
        float inv = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, __uint_as_float(eps_bits))));
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            v[i] = __fmul_rn(v[i], inv);
            a[i] = __fmul_rn(g[i], v[i]);
        }
        float c = __fmul_rn(tree(a), 1.0f / D);
        if (row < T) {
            if (j == 0) inverse[row] = inv;
#pragma unroll
            for (int k = 0; k < BLOCKS; k++) {
                float even = __fmul_rn(inv, __fsub_rn(g[2 * k], __fmul_rn(v[2 * k], c)));
                float odd = __fmul_rn(inv, __fsub_rn(g[2 * k + 1], __fmul_rn(v[2 * k + 1], c)));
                dx[at + 8 * k] = pair_of(even, odd);
            }
        }
    }
}
