// The lanes of a norm's weight gradient (rms_norm/1): lane l of a column adds rows l, l + 128, l + 256, ... in order.
//
// A column has 128 chains and no more, so what counts is how far ahead of them the rows are read. A warp owns one lane of
// 64 columns, two a thread, and a ring in shared memory that asynchronous copies fill three groups of 16 rows ahead.
//
// Compiled with: D; RESIDUAL: the norm is of x + residual; ALIGNED: rows begin at multiples of 16 bytes.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define LANES 128
#define COLUMNS 64
#define GROUP 16
#define GROUPS 4
#define ARRAYS (2 + RESIDUAL)

struct Ring {
    u32 rows[GROUPS][ARRAYS][GROUP][COLUMNS / 2];  // of dy, x and the residual: two columns a word
    float inverse[GROUPS][GROUP];
};

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from));
}

__device__ __forceinline__ void copy_4(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

__device__ __forceinline__ void wait_for_the_oldest() { asm volatile("cp.async.wait_group 2;"); }  // GROUPS - 2

// Group g of a lane's rows into its place of the ring.
__device__ __forceinline__ void fetch(Ring &ring, const u16 *const (&from)[3], const float *inverse, int group, int lane,
                                      int column, int T) {
    int slot = group % GROUPS, first = group * GROUP;
#if ALIGNED
    int piece = threadIdx.x % 8, i0 = threadIdx.x / 8, d = column + 8 * piece;  // eight pieces of 16 bytes a row
    if (d < D) {
#pragma unroll
        for (int i = 0; i < GROUP; i += 4) {
            int t = (first + i + i0) * LANES + lane;
#pragma unroll
            for (int array = 0; array < ARRAYS; array++)
                if (t < T) copy_16(&ring.rows[slot][array][i + i0][4 * piece], from[array] + (i64)t * D + d);
        }
    }
#else
    int d = column + 2 * threadIdx.x;
    for (int i = 0; i < GROUP; i++) {
        int t = (first + i) * LANES + lane;
        for (int array = 0; array < ARRAYS && t < T; array++) {
            const u16 *row = from[array] + (i64)t * D;
            ring.rows[slot][array][i][threadIdx.x] = (d < D ? row[d] : 0) | (u32)(d + 1 < D ? row[d + 1] : 0) << 16;
        }
    }
#endif
    int t = (first + (int)threadIdx.x) * LANES + lane;
    if (threadIdx.x < GROUP && t < T) copy_4(&ring.inverse[slot][threadIdx.x], inverse + t);
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }

// sum + dy * (v * inverse), each operation rounded.
__device__ __forceinline__ float add(float sum, float dy, float v, float inverse) {
    return __fadd_rn(sum, __fmul_rn(dy, __fmul_rn(v, inverse)));
}

// Row i of a slot to the sums of a thread's two columns.
__device__ __forceinline__ void add_row(const Ring &ring, int slot, int i, float (&sum)[2]) {
    u32 dy = ring.rows[slot][0][i][threadIdx.x], v = ring.rows[slot][1][i][threadIdx.x];
    float a = low(v), b = high(v), inverse = ring.inverse[slot][i];
#if RESIDUAL
    u32 r = ring.rows[slot][2][i][threadIdx.x];
    a = __fadd_rn(a, low(r)), b = __fadd_rn(b, high(r));
#endif
    sum[0] = add(sum[0], low(dy), a, inverse), sum[1] = add(sum[1], high(dy), b, inverse);
}

// dy, x, residual [T, D] BF16, inverse [T] -> lanes FP32 [128, D]. Block b: lane b mod 128, columns from b / 128 * 64 on.
extern "C" __global__ void __launch_bounds__(32) norm_lanes(
        const u16 *dy, const u16 *x, const u16 *residual, const float *inverse, float *lanes, int T) {
    __shared__ __align__(16) Ring ring;
    int lane = blockIdx.x % LANES, column = blockIdx.x / LANES * COLUMNS;
    int rows = lane < T ? (T - lane + LANES - 1) / LANES : 0;
    const u16 *const from[3] = {dy, x, residual};
#pragma unroll
    for (int g = 0; g < GROUPS - 1; g++) {
        fetch(ring, from, inverse, g, lane, column, T);
        commit();
    }
    float sum[2] = {0.0f, 0.0f};
    for (int g = 0; g * GROUP < rows; g++) {
        wait_for_the_oldest();
        __syncwarp();  // the copies of all threads are seen, and the group before this one has been read by all
        fetch(ring, from, inverse, g + GROUPS - 1, lane, column, T);
        commit();
        int count = rows - g * GROUP;
        if (count >= GROUP) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) add_row(ring, g % GROUPS, i, sum);
        } else {
            for (int i = 0; i < count; i++) add_row(ring, g % GROUPS, i, sum);
        }
    }
    int d = column + 2 * threadIdx.x;
    if (d < D) lanes[(i64)lane * D + d] = sum[0];
    if (d + 1 < D) lanes[(i64)lane * D + d + 1] = sum[1];
}
