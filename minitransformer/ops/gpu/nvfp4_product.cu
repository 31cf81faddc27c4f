// NVFP4 weights times BF16 rows on Hopper, the weights decoded from 4.5 bits in registers (quantised_linear/1).
// nvfp4.cuh has the weights' order, their decoding and the proof that 2^-19 may stay in (EXACT 0) for NVFP4
// activations. Other activations may reach the floor, so for them (EXACT 1) each pair is multiplied by 2^19 first.
//
// Compiled with: TILES (of 16 rows) a warp, WARPS a block, GROUPS of 8 rows of x a block, DEPTH of the weight's
// prefetch in units of 64 columns (it divides their number), EXACT, FP32_OUT.

#include "nvfp4.cuh"

#define ROWS_X (8 * GROUPS)

__device__ __forceinline__ uint4 load_codes(const char *unit) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(unit));
    return v;
}

__device__ __forceinline__ uint2 load_scales(const char *unit) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(unit));
    return v;
}

// The expert of the group'th group of ROWS_X rows, its first row of the group and its end; expert = experts: none.
__device__ __forceinline__ void expert_of(const i64 *bounds, int experts, int group, int &expert, int &first, int &end) {
    int lane = threadIdx.x & 31, before = 0;
    expert = experts;
    for (int e0 = 0; e0 < experts; e0 += 128) {
        int mine = e0 + 4 * lane, at[5], upto = 0;
#pragma unroll
        for (int i = 0; i < 5; i++) at[i] = (int)bounds[min(mine + i, experts)];
#pragma unroll
        for (int i = 0; i < 4; i++) upto += (at[i + 1] - at[i] + ROWS_X - 1) / ROWS_X;
        int own = upto;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            int other = __shfl_up_sync(~0u, upto, o);
            if (lane >= o) upto += other;
        }
        u32 hit = __ballot_sync(~0u, before + upto > group);
        if (hit) {
            int place = group - (before + upto - own), e = 0;
#pragma unroll
            for (int i = 0; i < 3; i++) {
                int tiles = (at[i + 1] - at[i] + ROWS_X - 1) / ROWS_X;
                if (e == i && place >= tiles) place -= tiles, e = i + 1;
            }
            int begin = e == 0 ? at[0] : e == 1 ? at[1] : e == 2 ? at[2] : at[3];
            int stop = e == 0 ? at[1] : e == 1 ? at[2] : e == 2 ? at[3] : at[4];
            int lead = __ffs(hit) - 1;
            expert = __shfl_sync(~0u, mine + e, lead);
            first = __shfl_sync(~0u, begin + place * ROWS_X, lead);
            end = __shfl_sync(~0u, stop, lead);
            return;
        }
        before += __shfl_sync(~0u, upto, 31);
    }
}

template <int USED>
__device__ __forceinline__ void chain(const char *(&at)[TILES], const char *(&scale_at)[TILES], u32 x, int units,
        int stride, float (&acc)[TILES][GROUPS][4], uint4 (&codes)[DEPTH][TILES], uint2 (&scales)[DEPTH][TILES]) {
    for (int u0 = 0; u0 < units; u0 += DEPTH) {
        const bool more = u0 + DEPTH < units;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int u = u0 + d;
            uint4 c[TILES];
            uint2 s[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                c[i] = codes[d][i], s[i] = scales[d][i];
                if (more) {
                    codes[d][i] = load_codes(at[i] + (u + DEPTH) * UNIT);
                    scales[d][i] = load_scales(scale_at[i] + (u + DEPTH) * UNIT);
                }
            }
            uint4 b[USED];  // of two steps
#pragma unroll
            for (int step = 0; step < 4; step++) {
#pragma unroll
                for (int j = 0; j < USED && step % 2 == 0; j++) b[j] = load_blocks(x + 8 * j * stride + u * 128 + step * 32);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    u32 low, high, a[4], word = step == 0 ? c[i].x : step == 1 ? c[i].y : step == 2 ? c[i].z : c[i].w;
                    scales_of(s[i], step, low, high);
                    decode<EXACT>(word, low, high, a);
#pragma unroll
                    for (int j = 0; j < USED; j++) {
                        float *v = acc[i][j];
                        u32 b0 = step % 2 ? b[j].z : b[j].x, b1 = step % 2 ? b[j].w : b[j].y;
                        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                            "{%8, %9}, {%0, %1, %2, %3};" : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
                            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void store(void *y, i64 at, float value) {
#if FP32_OUT
    ((float *)y)[at] = value;
#else
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16 *)y)[at] = value == value ? bits : 0x7FC0;
#endif
}

// Rows of x on their way into shared memory, whole units of them.
__device__ __forceinline__ void fetch(u32 base, const u16 *x, int first, int rows, int units, int stride, int K) {
    const int pieces = units * 8;
    for (int p = threadIdx.x; p < rows * pieces; p += 32 * WARPS) {
        int row = p / pieces, k = p % pieces * 8;
        u32 to = base + row * stride + k * 2;
        if (k < K)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + (i64)(first + row) * K + k));
        else  // zero weights times what lies there must be 0
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(to), "r"(0));
    }
}

// The sums of a warp's tiles, scaled, to y.
__device__ __forceinline__ void scaled(const float (&acc)[TILES][GROUPS][4], const float (&row_factor)[GROUPS][2],
        const float (&column_factor)[TILES][2], const int (&tile)[TILES], void *y, int first, int rows, int N) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int row = 8 * j + 2 * t + (c & 1);
            if (row >= rows) continue;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                int n = tile[i] * 16 + g + (c & 2 ? 8 : 0);
                if (n >= N) continue;
                float sum = EXACT ? acc[i][j][c] : __fmul_rn(acc[i][j][c], 524288.0f);
                float factor = __fmul_rn(row_factor[j][c & 1], column_factor[i][c >> 1]);
                store(y, (i64)(first + row) * N + n, __fmul_rn(sum, factor));
            }
        }
}

// x [R, K] BF16, bounds int64 [experts + 1], row_scale [R] or null, weight_scale [experts, N] -> y [R, N].
// A block owns ROWS_X rows of one expert and 16 * TILES * WARPS columns of y; K is a multiple of 8. Launched early, it
// must not stand behind the kernel that made weights or bounds.
extern "C" __global__ void __launch_bounds__(32 * WARPS) product(const char *packed, const u16 *x, const float *row_scale,
        const float *weight_scale, const i64 *bounds, void *y, int experts, int N, int K) {
    extern __shared__ __align__(16) char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tiles = (N + 15) / 16, blocks = (tiles + TILES * WARPS - 1) / (TILES * WARPS);
    const int units = (K + 63) / 64, stride = units * 128 + 16;  // 16: eight rows' pieces fill the 32 banks
    int expert, first, end;
    expert_of(bounds, experts, blockIdx.x / blocks, expert, first, end);
    if (expert >= experts) return;

    const char *at[TILES], *scale_at[TILES];
    int tile[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {  // a tile past the end is the last one again
        tile[i] = min((int)(blockIdx.x % blocks * WARPS + warp) * TILES + i, tiles - 1);
        at[i] = packed + ((i64)expert * tiles + tile[i]) * units * UNIT + 16 * lane;
        scale_at[i] = at[i] - 16 * lane + 512 + 8 * g;
    }
    uint4 codes[DEPTH][TILES];
    uint2 scales[DEPTH][TILES];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            codes[d][i] = load_codes(at[i] + d * UNIT);
            scales[d][i] = load_scales(scale_at[i] + d * UNIT);
        }

    const int rows = min(end - first, ROWS_X);
    float row_factor[GROUPS][2], column_factor[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            column_factor[i][h] = load_early(weight_scale + (i64)expert * N + min(tile[i] * 16 + g + 8 * h, N - 1));

    // Up to here weights and bounds, which were there before the kernel in front let this one begin (a launch clears L1, so
    // nothing older is read from it); x, its scales and y were not.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    fetch(base, x, first, rows, units, stride, K);
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            row_factor[j][h] = row_scale ? load_early(row_scale + first + min(8 * j + 2 * t + h, rows - 1)) : 1.0f;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    float acc[TILES][GROUPS][4] = {};
    const u32 mine = base + lane % 8 * stride + lane / 8 * 16;
    if (GROUPS == 1 || rows > 8) chain<GROUPS>(at, scale_at, mine, units, stride, acc, codes, scales);
    else chain<1>(at, scale_at, mine, units, stride, acc, codes, scales);

    scaled(acc, row_factor, column_factor, tile, y, first, rows, N);
}
