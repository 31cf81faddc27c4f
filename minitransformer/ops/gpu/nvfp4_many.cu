// Packed NVFP4 weights times many BF16 rows on Hopper (quantised_linear/1), and FC1 with SwiGLU behind it (swiglu/1).
//
// The weight is the tensor core's first operand, which wgmma takes from registers: four warps decode 4.5 bits a value
// (nvfp4.cuh) into what they multiply next, while their last products are under way, so decoding costs issue slots and
// nothing else. The rows of x are the second operand, in shared memory as the copy engine puts them there.
//
// A persistent block has two groups of four warps, each with its own tiles of 2 x 64 rows of the weight and ROWS of x and
// its own ring, which a warp of its own fills. While one group writes its tile, the other one has the tensor core.
//
// Compiled with: ROWS (64 or 128), STAGES, EXACT as in nvfp4.cuh, OUT: 0 FP32, 1 BF16, 2 BF16 of SwiGLU (the first 64 rows
// of a tile are of gate, the others of up); WIDE 0 and DECODE 0 for nvfp4_encode.cuh, SHARED: bytes.

#include "hopper.cuh"
#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"

#define COLUMNS (OUT == 2 ? 64 : 128)  // of y, of a tile
#define HALF (4 * UNIT)                // four tiles of 16 weight rows, one a warp
#define LINE (128 + 16)                // bytes of 64 columns of a row of y; 16: rows lie in other banks
#define CELLS 5                        // of schedule.py
#define AT_ONCE 8                      // tiles of rows that a wave of blocks takes at once, for the L2 cache

struct Shared {
    char x[2][STAGES][ROWS * 128], w[2][STAGES][2 * HALF];  // 64 columns: of x swizzled by 128 bytes
    char y[OUT ? 2 : 1][OUT ? ROWS : 1][LINE];
    u64 full[2][STAGES], empty[2][STAGES];
};
static_assert(sizeof(Shared) <= SHARED, "shared memory");

struct Sizes { int experts, N, K; };  // N: rows of the weight
// A tile of y: its expert, rows first .. end of x, first column of y.
struct Place { int expert, first, end, column; };

// schedule: of each tile of rows its expert, first row and the end of the expert's rows (schedule.py).
__device__ __forceinline__ bool place(const int *schedule, int tiles_m, const Sizes &size, int tile, Place &at) {
    const int tiles_n = ((OUT == 2 ? size.N / 2 : size.N) + COLUMNS - 1) / COLUMNS;
    if (tile >= tiles_m * tiles_n) return false;
    const int wide = AT_ONCE * tiles_n, before = tile / wide * AT_ONCE, rows = min(tiles_m - before, AT_ONCE);
    const int *cell = schedule + CELLS * (before + tile % wide % rows);
    at = {cell[0], cell[1], cell[2], tile % wide / rows * COLUMNS};
    return true;
}

__device__ __forceinline__ void produce(Shared &s, const TensorMap *x, const TensorMap *w, const int *schedule,
        int tiles_m, const Sizes &size, int which) {
    const int units = (size.K + 63) / 64, tiles = (size.N + 15) / 16;
    Place at;
    for (int tile = blockIdx.x + which * gridDim.x, n = 0; place(schedule, tiles_m, size, tile, at); tile += 2 * gridDim.x) {
        const int row = at.expert * tiles + at.column / 16, other = row + (OUT == 2 ? tiles / 2 : 4);
        for (int u = 0; u < units; u++, n++) {
            const int slot = n % STAGES;
            u64 *full = &s.full[which][slot];
            wait(&s.empty[which][slot], (n / STAGES & 1) ^ 1);
            expect(full, ROWS * 128 + 2 * HALF);
            load(s.x[which][slot], x, u * 64, at.first, full);
            load(s.w[which][slot], w, u * (UNIT / 4), row, full);
            load(s.w[which][slot] + HALF, w, u * (UNIT / 4), other, full);
        }
    }
}

struct Packed { uint4 codes; uint2 scales; };  // what a lane reads of a unit

// Of this warp's 16 weight rows.
__device__ __forceinline__ Packed read(const char *half) {
    const int lane = threadIdx.x & 31;
    const char *unit = half + threadIdx.x / 32 % 4 * UNIT;
    return {*(const uint4 *)(unit + 16 * lane), *(const uint2 *)(unit + 512 + lane / 4 * 8)};
}

__device__ __forceinline__ void decode_step(const Packed &of, int step, u32 *a) {
    const uint4 c = of.codes;
    u32 low, high, four[4];
    scales_of(of.scales, step, low, high);
    decode<EXACT>(step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w, low, high, four);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = four[i];
}

// d (64 x ROWS) = a (64 x 16), in registers, times 16 columns of a tile of ROWS rows, + d if `more`.
__device__ __forceinline__ void multiply(float (&d)[32], const u32 *a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : F16(d, 0), F16(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}

__device__ __forceinline__ void multiply(float (&d)[64], const u32 *a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}

// Four steps of the chain, and between them the operands of the four after those, of `coming`. The products that read
// these registers before are the fifth to the eighth before the last.
__device__ __forceinline__ void advance(float (&acc)[ROWS / 2], const u32 *a, const char *x, bool more,
        const Packed &coming, u32 *next) {
    const u64 tile = (u64)(1024 >> 4 | 1 << 30) << 32 | address(x) >> 4;  // 128-byte swizzle, 8 rows every 1024 bytes
#pragma unroll
    for (int step = 0; step < 4; step++) {
        fence();
        multiply(acc, a + 4 * step, tile + 2 * step, step > 0 || more);
        commit();
        finish<4>();
        decode_step(coming, step, next + 4 * step);
    }
}

// fl(acc * fl(row scale * column scale)) of two rows of the weight (g, g + 8) and rows 8j + 2t, 8j + 2t + 1 of x.
__device__ __forceinline__ void scale(float (&v)[4], const float *acc, const float (&row)[2], const float (&column)[2]) {
#pragma unroll
    for (int c = 0; c < 4; c++)
        v[c] = __fmul_rn(EXACT ? acc[c] : __fmul_rn(acc[c], 524288.0f), __fmul_rn(row[c & 1], column[c >> 1]));
}

__device__ __forceinline__ void stage(char (*y)[LINE], int j, const float (&v)[4]) {
    const int lane = threadIdx.x & 31, n = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int c = 0; c < 4; c++)
        *(u16 *)(y[8 * j + 2 * (lane & 3) + (c & 1)] + 2 * (n + (c & 2 ? 8 : 0))) = pair_of(v[c], 0.0f);
}

// Staged 64 columns of the tile's rows to memory, whole lines where a row of y is one.
__device__ __forceinline__ void write_lines(char (*lines)[LINE], u16 *y, const Place &at, int column, int N, int which) {
    meet(which);
    for (int i = threadIdx.x % 128; i < ROWS * 8; i += 128) {
        const int row = at.first + i / 8, n = column + i % 8 * 8;
        if (row >= at.end || n >= N) continue;
        const char *from = lines[i / 8] + i % 8 * 16;
        u16 *to = y + (i64)row * N + n;
        if (N % 8 == 0) *(uint4 *)to = *(const uint4 *)from;
        else for (int k = 0; k < min(N - n, 8); k++) to[k] = ((const u16 *)from)[k];
    }
    meet(which);
}

// acc: what the warp's 16 rows of the first and the second half of the weight's tile gave.
__device__ __forceinline__ void finish_tile(Shared &s, const float (&acc)[2][ROWS / 2], const float (&column)[2][2],
        const float *row_scale, void *y, const Place &at, int N, int which) {
    const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
    for (int h = 0; h < (OUT == 2 ? 1 : 2); h++) {
        const int n = at.column + 64 * h + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            float v[4], up[4], row[2];
#pragma unroll
            for (int i = 0; i < 2; i++) row[i] = row_scale ? row_scale[min(at.first + 8 * j + 2 * t + i, at.end - 1)] : 1.0f;
            scale(v, acc[h] + 4 * j, row, column[h]);
#if OUT == 0
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int r = at.first + 8 * j + 2 * t + (c & 1), to = n + (c & 2 ? 8 : 0);
                if (r < at.end && to < N) ((float *)y)[(i64)r * N + to] = v[c];
            }
#else
            if (OUT == 2) {
                scale(up, acc[1] + 4 * j, row, column[1]);
#pragma unroll
                for (int c = 0; c < 4; c++) v[c] = swiglu(v[c], up[c]);
            }
            stage(s.y[which], j, v);
#endif
        }
        if (OUT) write_lines(s.y[which], (u16 *)y, at, at.column + 64 * h, N, which);
    }
}

__device__ __forceinline__ void consume(Shared &s, const float *row_scale, const float *weight_scale, void *y,
        const int *schedule, int tiles_m, const Sizes &size, int which) {
    const int units = (size.K + 63) / 64, lane = threadIdx.x & 31, own = threadIdx.x / 32 % 4 * 16;
    const int N = OUT == 2 ? size.N / 2 : size.N;
    Place at;
    for (int tile = blockIdx.x + which * gridDim.x, n = 0; place(schedule, tiles_m, size, tile, at); tile += 2 * gridDim.x) {
        float acc[2][ROWS / 2], column[2][2];
        u32 a[2][16];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int w = at.column + own + lane / 4 + 8 * i + h * (OUT == 2 ? N : 64);
                column[h][i] = load_early(weight_scale + (i64)at.expert * size.N + min(w, size.N - 1));
            }
        wait(&s.full[which][n % STAGES], n / STAGES & 1);
        Packed packed = read(s.w[which][n % STAGES]);
#pragma unroll
        for (int step = 0; step < 4; step++) decode_step(packed, step, a[0] + 4 * step);
        for (int u = 0; u < units; u++, n++) {
            const int slot = n % STAGES, next = (n + 1) % STAGES;
            packed = read(s.w[which][slot] + HALF);
            advance(acc[0], a[0], s.x[which][slot], u > 0, packed, a[1]);
            if (u > 0 && lane == 0) arrive(&s.empty[which][(n - 1) % STAGES]);  // its products have ended
            if (u + 1 < units) wait(&s.full[which][next], (n + 1) / STAGES & 1);
            packed = read(s.w[which][next]);  // behind the last unit whatever lies there: it is not multiplied
            advance(acc[1], a[1], s.x[which][slot], u > 0, packed, a[0]);
        }
        finish<0>();
        hold(acc[0]), hold(acc[1]);
        if (lane == 0) arrive(&s.empty[which][(n - 1) % STAGES]);
        finish_tile(s, acc, column, row_scale, y, at, N, which);
    }
}

// x [R, K] in boxes of ROWS x 64, the packed weight [experts * tiles, words] in boxes of four tiles and a unit, outer scales
// [R] or null and [experts, N], schedule -> y [R, N], or [R, N / 2] with SwiGLU.
extern "C" __global__ void __launch_bounds__(384, 1) many(const __grid_constant__ TensorMap x,
        const __grid_constant__ TensorMap w, const float *row_scale, const float *weight_scale, const int *schedule,
        void *y, int bound, int experts, int N, int K) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    const int which = threadIdx.x / 128;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * STAGES; i++) init(&s.full[i / STAGES][i % STAGES], 1), init(&s.empty[i / STAGES][i % STAGES], 4);
    show();
    __syncthreads();
    const int tiles_m = schedule[CELLS * bound];
    const Sizes size = {experts, N, K};
    if (which < 2) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(s, row_scale, weight_scale, y, schedule, tiles_m, size, which);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 32 == 0 && threadIdx.x < 256 + 64)
            produce(s, &x, &w, schedule, tiles_m, size, threadIdx.x / 32 % 4);
    }
}
