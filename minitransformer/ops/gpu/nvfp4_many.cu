// Packed NVFP4 weights times many BF16 rows on Hopper (quantised_linear/1), and FC1 with SwiGLU behind it (swiglu/1).
//
// The weight is the tensor core's first operand, which wgmma takes from registers: four warps decode 4.5 bits a value
// (nvfp4.cuh) into what they multiply next, while their last products are under way. What is decoded once serves all rows of
// x that an expert has, up to ROWS: the second operand, in shared memory as the copy engine puts them there, on whose side
// the instruction has as many rows as the tile.
//
// A persistent block has two groups of four warps. Each has 64 of a tile's 128 rows of the weight; they share the rows of x
// and a ring, which four more warps fill. A group may be ahead of the other by as much as the ring holds, so that while one
// of them writes its part of the tile, the other one has the tensor core.
//
// Compiled with: ROWS (64, 128 or 192), STAGES, EXACT as in nvfp4.cuh, OUT: 0 FP32, 1 BF16, 2 BF16 of SwiGLU (the first two
// warps of a group have rows of gate, the others of up); WIDE 0 and DECODE 0 for nvfp4_encode.cuh, SHARED: bytes.

#include "hopper.cuh"
#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"
#include "decoded_mma.cuh"

#define COLUMNS (OUT == 2 ? 32 : 64)  // of y, of a group
#define BOX (ROWS / 4)                // rows of x that the copy engine brings at once, for one warp
#define PACKED (8 * UNIT)             // eight tiles of 16 weight rows, one a warp
#define PART 32                       // rows of a tile that are written at once
#define LINE (2 * COLUMNS + 16)       // bytes of a row of them; 16: rows lie in other banks
#define CELLS 5                       // of schedule.py

// A tile of y: its expert (-1: there is none), rows first .. end of x, first column of y.
struct __align__(16) Place { int expert, first, end, column; };

struct Shared {
    char x[STAGES][ROWS * 128], w[STAGES][PACKED];  // 64 columns: of x swizzled by 128 bytes
    float4 halves[2][OUT == 2 ? 4 : 1][PART / 8][32];  // of a part, what each warp's lanes have: of gate, of up
    char y[2][OUT ? PART : 1][LINE];
    float rows[2][ROWS];   // outer scales
    Place places[STAGES];  // of the tile that begins here
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED, "shared memory");

struct Sizes { int experts, N, K; };  // N: rows of the weight
struct Ring {
    int slot, round;
    __device__ __forceinline__ void step() {
        if (++slot == STAGES) slot = 0, round ^= 1;
    }
};

// schedule: of each tile of rows its expert, first row and end, the expert's first tile and how many it has (schedule.py).
// All rows of an expert before the next columns.
__device__ __forceinline__ bool place(const int *schedule, int tiles_m, const Sizes &size, int tile, Place &at) {
    const int tiles_n = ((OUT == 2 ? size.N / 2 : size.N) + 2 * COLUMNS - 1) / (2 * COLUMNS);
    if (tile >= tiles_m * tiles_n) return false;
    const int *cell = schedule + tile / tiles_n * CELLS;
    const int first = cell[3], rows = cell[4], inside = tile - first * tiles_n;
    cell = schedule + (first + inside % rows) * CELLS;
    at = {cell[0], cell[1], cell[2], inside / rows * 2 * COLUMNS};
    return true;
}

// By four warps, each with a quarter of a tile's rows; the last one brings the weight too.
__device__ __forceinline__ void produce(Shared &s, const TensorMap *x, const TensorMap *w, const int *schedule,
        int tiles_m, const Sizes &size, int warp) {
    const int units = (size.K + 63) / 64, tiles = (size.N + 15) / 16;
    Ring ring = {0, 0};
    Place at;
    for (int tile = blockIdx.x; place(schedule, tiles_m, size, tile, at); tile += gridDim.x) {
        const int row = at.expert * tiles + at.column / 16, first = at.first + warp * BOX;
        const int bytes = (first < at.end ? BOX * 128 : 0) + (warp == 3 ? PACKED : 0);
        for (int u = 0; u < units; u++, ring.step()) {
            u64 *full = &s.full[ring.slot];
            char *to = s.w[ring.slot];
            wait(&s.empty[ring.slot], ring.round ^ 1);
            if (u == 0 && warp == 3) s.places[ring.slot] = at;
            expect(full, bytes);
            if (first < at.end) load(s.x[ring.slot] + warp * (BOX * 128), x, u * 64, first, full);
            if (warp < 3) continue;
            load(to, w, u * (UNIT / 4), row, full);
            if (OUT == 2) load(to + PACKED / 2, w, u * (UNIT / 4), row + tiles / 2, full);
        }
    }
    wait(&s.empty[ring.slot], ring.round ^ 1);
    if (warp == 3) s.places[ring.slot].expert = -1;
    arrive(&s.full[ring.slot]);
}

struct Packed { uint4 codes; uint2 scales; };  // what a lane reads of a unit

// Of this warp's 16 weight rows. at: where in a stage its lanes' codes and scales lie.
__device__ __forceinline__ Packed read(const char *stage, const u32 (&at)[2]) {
    return {*(const uint4 *)(stage + at[0]), *(const uint2 *)(stage + at[1])};
}

__device__ __forceinline__ void decode_step(const Packed &of, int step, u32 (&a)[4]) {
    const uint4 c = of.codes;
    u32 low, high;
    scales_of(of.scales, step, low, high);
    decode<EXACT>(step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w, low, high, a);
}

// The chain of a tile of at most N rows, whose first unit is there: acc (64 x N). Between two products the operand of the one
// after the next is decoded, into the registers of the one before the last, which has ended.
template <int N>
__device__ __forceinline__ void chain(Shared &s, float (&acc)[ROWS / 2], int units, int which, Ring &ring) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
    const int unit = OUT == 2 ? 4 * (warp / 2) + 2 * which + warp % 2 : 4 * which + warp;
    u32 a[4][4], at[2] = {unit * UNIT + 16 * lane, unit * UNIT + 512 + lane / 4 * 8};
    hold(at);  // in registers, where they are not made again and again
    Packed packed = read(s.w[ring.slot], at), coming;
    decode_step(packed, 0, a[0]), decode_step(packed, 1, a[1]);
    int last = ring.slot;
#pragma unroll 1
    for (int u = 0; u < units; u++) {
        const u32 x = address(s.x[ring.slot]) >> 4;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            fence();
            // 128-byte swizzle, 8 rows every 1024 bytes.
            multiply<N>(acc, a[step], (u64)(1024 >> 4 | 1 << 30) << 32 | x + 2 * step, step > 0 || u > 0);
            commit();
            finish<2>();
            if (step == 1) {
                if (u > 0 && lane == 0) arrive(&s.empty[last]);  // its products have ended
                last = ring.slot;
                ring.step();
                if (u + 1 < units) wait(&s.full[ring.slot], ring.round);
                coming = read(s.w[ring.slot], at);  // behind the last unit whatever lies there: it is not multiplied
            }
            decode_step(step < 2 ? packed : coming, step + 2 & 3, a[step + 2 & 3]);
        }
        packed = coming;
    }
    finish<0>();
    hold(acc);
    if (lane == 0) arrive(&s.empty[last]);
}

// By the smallest instruction that has room for the rows, of those that are compiled.
#define FIRST (ROWS > 128 ? 32 : 16)
#define NEXT(n) (ROWS > 128 && n == 32 ? 32 : 16)
template <int N>
__device__ __forceinline__ void chain_of(Shared &s, float (&acc)[ROWS / 2], int rows, int units, int which, Ring &ring) {
    if constexpr (N < ROWS) {
        if (rows > N) return chain_of<N + NEXT(N)>(s, acc, rows, units, which, ring);
    }
    chain<N>(s, acc, units, which, ring);
}

// fl(acc * fl(row scale * column scale)) of two rows of the weight (g, g + 8) and rows 8j + 2t, 8j + 2t + 1 of x.
__device__ __forceinline__ void scale(float (&v)[4], const float *acc, const float *row, const float (&column)[2]) {
#pragma unroll
    for (int c = 0; c < 4; c++)
        v[c] = __fmul_rn(EXACT ? acc[c] : __fmul_rn(acc[c], 524288.0f), __fmul_rn(row[c & 1], column[c >> 1]));
}

// Of columns n and n + 8, rows 2t and 2t + 1 of eight.
__device__ __forceinline__ void stage(char (*lines)[LINE], int n, const float (&v)[4]) {
#pragma unroll
    for (int c = 0; c < 4; c++)
        *(u16 *)(lines[2 * (threadIdx.x & 3) + (c & 1)] + 2 * (n + (c & 2 ? 8 : 0))) = pair_of(v[c], 0.0f);
}

// A staged part of the tile, from row `first` on, to memory, whole lines where a row of y is one.
__device__ __forceinline__ void write_lines(const char (*lines)[LINE], u16 *y, const Place &at, int first, int N) {
    for (int i = threadIdx.x % 128; i < PART * (COLUMNS / 8); i += 128) {
        const int line = i / (COLUMNS / 8), row = first + line, n = at.column + i % (COLUMNS / 8) * 8;
        if (row >= at.end || n >= N) continue;
        const char *from = lines[line] + i % (COLUMNS / 8) * 16;
        u16 *to = y + (i64)row * N + n;
        if (N % 8 == 0) *(uint4 *)to = *(const uint4 *)from;
        else for (int k = 0; k < min(N - n, 8); k++) to[k] = ((const u16 *)from)[k];
    }
}

// A part's values, v[j]: of rows 8j + 2t, 8j + 2t + 1 of it, to memory.
__device__ __forceinline__ void write_part(Shared &s, const float (&v)[PART / 8][4], void *y, const Place &at, int first,
        int N, int which) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, n = 16 * warp + lane / 4;
#if OUT == 0
#pragma unroll
    for (int j = 0; j < PART / 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = first + 8 * j + 2 * (lane & 3) + (c & 1), to = at.column + n + (c & 2 ? 8 : 0);
            if (row < at.end && to < N) ((float *)y)[(i64)row * N + to] = v[j][c];
        }
#else
#if OUT == 1
#pragma unroll
    for (int j = 0; j < PART / 8; j++) stage(s.y[which] + 8 * j, n, v[j]);
#else
    // Two warps have the same columns, one of gate, one of up; each joins one half of the part's rows.
#pragma unroll
    for (int j = 0; j < 4; j++) s.halves[which][warp][j][lane] = make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
    meet(which);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int j = warp / 2 * 2 + i;
        const float4 gate = s.halves[which][warp & 1][j][lane], up = s.halves[which][warp | 2][j][lane];
        const float out[4] = {swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)};
        stage(s.y[which] + 8 * j, 16 * (warp & 1) + lane / 4, out);
    }
#endif
    meet(which);
    write_lines(s.y[which], (u16 *)y, at, first, N);
    if (OUT == 1) meet(which);  // before the lines are written again; SwiGLU meets before that
#endif
}

// acc: what the warp's 16 rows of the weight gave.
__device__ __forceinline__ void finish_tile(Shared &s, const float (&acc)[ROWS / 2], const float (&column)[2], void *y,
        const Place &at, int N, int which) {
    const float *rows = s.rows[which] + 2 * (threadIdx.x & 3);
#pragma unroll 1
    for (int part = 0; at.first + part * PART < at.end; part++) {
        float v[PART / 8][4];
#pragma unroll
        for (int p = 0; p < ROWS / PART; p++)  // registers have no run-time index
            if (part == p) {
#pragma unroll
                for (int j = 0; j < PART / 8; j++)
                    scale(v[j], acc + 4 * (p * (PART / 8) + j), rows + PART * p + 8 * j, column);
            }
        write_part(s, v, y, at, at.first + part * PART, N, which);
    }
}

__device__ __forceinline__ void consume(Shared &s, const float *row_scale, const float *weight_scale, void *y,
        const Sizes &size, int which) {
    const int units = (size.K + 63) / 64, lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
    const int N = OUT == 2 ? size.N / 2 : size.N, own = OUT == 2 ? 16 * (warp & 1) + warp / 2 * N : 16 * warp;
    Ring ring = {0, 0};
    while (true) {  // a tile, whose place comes with its first unit
        wait(&s.full[ring.slot], ring.round);
        Place at = s.places[ring.slot];
        if (at.expert < 0) break;
        float acc[ROWS / 2], column[2], rows[(ROWS + 127) / 128];
        at.column += which * COLUMNS;
#pragma unroll
        for (int i = 0; i < 2; i++)
            column[i] = load_early(weight_scale + (i64)at.expert * size.N + min(at.column + own + lane / 4 + 8 * i, size.N - 1));
#pragma unroll
        for (int i = 0; i < (ROWS + 127) / 128; i++) {
            const int row = at.first + 128 * i + threadIdx.x % 128;
            rows[i] = row_scale ? load_early(row_scale + min(row, at.end - 1)) : 1.0f;
        }
        chain_of<FIRST>(s, acc, at.end - at.first, units, which, ring);
        meet(which);  // the scales before are read
#pragma unroll
        for (int i = 0; i < (ROWS + 127) / 128; i++)
            if (128 * i + threadIdx.x % 128 < ROWS) s.rows[which][128 * i + threadIdx.x % 128] = rows[i];
        meet(which);
        finish_tile(s, acc, column, y, at, N, which);
    }
}

// x [R, K] in boxes of BOX x 64, the packed weight [experts * tiles, words] in boxes of eight tiles (four for SwiGLU) and a
// unit, outer scales [R] or null and [experts, N], schedule -> y [R, N], or [R, N / 2] with SwiGLU.
extern "C" __global__ void __launch_bounds__(384, 1) many(const __grid_constant__ TensorMap x,
        const __grid_constant__ TensorMap w, const float *row_scale, const float *weight_scale, const int *schedule,
        void *y, int bound, int experts, int N, int K) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);  // so that the compiler knows it is one number a warp
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) init(&s.full[i], 4), init(&s.empty[i], 8);
    show();
    __syncthreads();
    const int tiles_m = schedule[CELLS * bound];
    const Sizes size = {experts, N, K};
    if (warp < 8) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(s, row_scale, weight_scale, y, size, warp / 4);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x % 32 == 0) produce(s, &x, &w, schedule, tiles_m, size, warp - 8);
    }
}
