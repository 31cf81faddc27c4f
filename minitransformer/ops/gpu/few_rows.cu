// y = x W^T for few rows on Hopper (linear/2): a block owns 16 columns of y and asks for their whole weight at once.
//
// The chain over K is one step of mma.m16n8k16 after another, some 33 cycles each, and may not be split: 256 steps for
// K = 4096, longer than the weight takes to arrive. So a warp does nothing but the chain, and all that it will read is
// on its way from the start: two others copy the weight's 16 rows and 8 rows of x into shared memory, CHUNK columns
// behind one barrier. A copy costs some 30 ns whatever its length, so CHUNK is large. The weight is the operand with 16
// rows, x the one with 8.
//
// Compiled with: CHUNK, FP32_OUT.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define ROWS 8    // of x
#define COPYING 2 // warps
#define GROUP 16  // steps without a branch between them
#define NEAR 3    // steps between a read of shared memory and its use

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const u16 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier) {  // its first phase; each is used once
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
            : "=r"(done) : "r"(barrier) : "memory");
    } while (!done);
}

// Four 8 x 8 blocks; lane 8i + j names row j of block i, and gets two neighbours of row lane / 4 of each block.
__device__ __forceinline__ uint4 load_blocks(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// COUNT steps from `step` on; low: of the weight, x: of the rows.
template <int COUNT>
__device__ __forceinline__ void advance(float (&acc)[4], u32 low, u32 x) {
    uint4 a[COUNT + NEAR], b[(COUNT + NEAR + 1) / 2];
#pragma unroll
    for (int i = 0; i < COUNT + NEAR; i++) {
        if (i < COUNT) a[i] = load_blocks(low + 32 * i);
        if (i < COUNT && i % 2 == 0) b[i / 2] = load_blocks(x + 32 * i);
        const int j = i - NEAR;
        if (j < 0) continue;
        const u32 first = j % 2 ? b[j / 2].z : b[j / 2].x, second = j % 2 ? b[j / 2].w : b[j / 2].y;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[j].x), "r"(a[j].y), "r"(a[j].z), "r"(a[j].w), "r"(first), "r"(second));
    }
}

__device__ __forceinline__ void store(void *y, i64 at, float value) {
#if FP32_OUT
    ((float *)y)[at] = value;
#else
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16 *)y)[at] = bits;  // a NaN is 0x7fff, the hardware's
#endif
}

// x [M, K], w [N, K] BF16 -> y [M, N]; K a multiple of 16, x and w aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(32 + 32 * COPYING) few_rows(const u16 *x, const u16 *w, void *y, int M,
        int N, int K) {
    extern __shared__ __align__(16) char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int stride = 2 * K + 16, chunks = (K + CHUNK - 1) / CHUNK;  // 16: eight rows' pieces fill the 32 banks
    const int tiles = (N + 15) / 16, n0 = blockIdx.x % tiles * 16, m0 = blockIdx.x / tiles * ROWS;
    const int columns = min(N - n0, 16), rows = min(M - m0, ROWS);
    const u32 base = (u32)__cvta_generic_to_shared(shared), x_base = base + 16 * stride;
    const u32 barriers = x_base + min(M, ROWS) * stride;

    if (threadIdx.x == 0) {
        for (int c = 0; c < chunks; c++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + 8 * c) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (warp > 0) {
        if (lane) return;
        for (int c = 0; c < chunks; c++) {
            const int k = c * CHUNK;
            const u32 bytes = 2 * min(CHUNK, K - k), barrier = barriers + 8 * c;
            if (warp == 1) expect(barrier, (columns + rows) * bytes);
            for (int i = warp - 1; i < rows; i += COPYING)
                copy(x_base + i * stride + 2 * k, x + (i64)(m0 + i) * K + k, bytes, barrier);
            for (int i = warp - 1; i < columns; i += COPYING)
                copy(base + i * stride + 2 * k, w + (i64)(n0 + i) * K + k, bytes, barrier);
        }
        return;
    }

    // Blocks: rows 0 .. 7 and 8 .. 15 of the weight, then the next 8 columns; of x four times 8 columns, two steps.
    u32 low = base + (lane & 15) * stride + (lane >> 4) * 16;
    u32 at = x_base + min(lane & 7, rows - 1) * stride + (lane >> 3) * 16;
    float acc[4] = {};
    for (int c = 0; c < chunks; c++) {
        wait_for(barriers + 8 * c);
        int left = min(CHUNK, K - c * CHUNK) / 16;
        for (; left >= GROUP; left -= GROUP, low += 32 * GROUP, at += 32 * GROUP) advance<GROUP>(acc, low, at);
        for (; left > 0; left--, low += 32, at += 32) advance<1>(acc, low, at);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int m = 2 * (lane & 3) + (c & 1), n = n0 + (lane >> 2) + (c & 2 ? 8 : 0);
        if (m < rows && n < N) store(y, (i64)(m0 + m) * N + n, acc[c]);
    }
}
