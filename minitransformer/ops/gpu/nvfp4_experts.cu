// NVFP4 experts of few tokens in one kernel, tokens to weighted sums (dispatch/1, nvfp4/1, quantised_linear/1, swiglu/1).
//
// At one token the experts' 21 MB take 5 us, and five kernels one after another as long again, in which memory rests. Here
// every warp that multiplies has its tiles of FC1's weight on their way into shared memory as soon as the plan is known,
// and of FC2's behind them, in the order in which it multiplies them. Each block quantises the tokens for itself; FC1 is
// spread over all blocks as pairs of 16 columns of gate and of up, so SwiGLU needs no other block. Its rows go through
// memory, where nobody waits for a block but for each number: a cell holds 0xffff, which no row has (a NaN is 0x7fc0),
// until it is written. Each block quantises those rows for itself too, and owns 16 columns of the output, all experts.
//
// The grid has no more blocks than the GPU runs at once, and is launched as one that meets (cuda.launch). Launches that
// share cells follow one another and have one shape (few_experts.py): `begun` counts their blocks, so it tells which half
// of the cells a launch fills; the other half, which the launch before has filled, it empties.
//
// Compiled with: TOKENS, SLOTS (experts a token), HIDDEN, WIDTH (of an expert), BLOCKS, WARPS, WORKERS: warps that
// multiply, FIRST and SECOND: units of 64 columns in a piece of FC1's and FC2's weight (a copy costs some 20 ns, whatever
// its length), DEPTH: pieces that a warp has on their way, SHARED: bytes; WIDE 0 and DECODE 1 for nvfp4_encode.cuh.

#include "hopper.cuh"
#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"

#define THREADS (32 * WARPS)
#define ROWS (TOKENS * SLOTS)
#define PIECE ((FIRST > SECOND ? FIRST : SECOND) * UNIT)
#define COLUMN_TILES (HIDDEN / 16)
#define PAIRS (WIDTH / 16)
#define OWN ((COLUMN_TILES + BLOCKS - 1) / BLOCKS)
#define EIGHTS(rows) (((rows) + 7) / 8)
#define EMPTY 0xFFFF
#ifndef MOST_UNROLLED
#define MOST_UNROLLED 2
#endif

struct Group { int expert, first, count; };  // up to 8 rows of an expert
struct Slot { char units[PIECE]; float scales[16]; };  // a piece of a tile; the tile's outer scales, with its first piece
struct Shared {
    char x[EIGHTS(TOKENS) * 16 * HIDDEN], h[EIGHTS(ROWS) * 16 * WIDTH];  // BF16, then code * scale in the same place
    Slot ring[WORKERS][DEPTH];
    u64 full[WORKERS][DEPTH];
    float up[2][WORKERS / 2][8][16];
    float x_outer[TOKENS], h_outer[ROWS], weight[ROWS];
    u32 x_top[TOKENS], h_top[ROWS];
    int token[ROWS], row[ROWS], starts[ROWS], ends[ROWS], groups, half;
    Group group[ROWS];
    u16 y[OWN][ROWS][16];
};
static_assert(sizeof(Shared) <= SHARED && ROWS <= THREADS && DEPTH > 1 && WORKERS <= WARPS, "few_experts.py counts otherwise");

__device__ __forceinline__ void copy(void *to, const void *from, int bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void copy16(char *to, const char *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address(to)), "l"(from) : "memory");
}

// A tile of 16 weight rows that a warp multiplies: of FC1 part 0 is gate, 1 up; of FC2 part numbers the block's columns.
struct Tile { int group, tile, part; };

// A warp's tiles in turn, and its place in the ring.
struct Work {
    const char *gate_up, *down, *at;
    const float *gate_up_scale, *down_scale;
    int groups, first_turns, turns;  // of FC1, of both
    int turn, piece, in, room;       // what is asked for next, into which slot; slots that are free
    int slot, phase;                 // what comes next

    __device__ __forceinline__ Tile tile(int turn) const {
        int warp = threadIdx.x >> 5;
        if (turn < first_turns) {
            int item = warp + WORKERS * turn, pair = blockIdx.x + item / 2 * BLOCKS, part = item & 1;
            return {pair / PAIRS, pair % PAIRS + part * PAIRS, part};
        }
        int item = warp + WORKERS * (turn - first_turns), part = OWN == 1 ? 0 : item / groups;
        return {item - part * groups, (int)blockIdx.x + part * BLOCKS, part};
    }

    __device__ __forceinline__ void advance() {
        if (++slot == DEPTH) slot = 0, phase ^= 1;
        room++;
    }

    // Has the copy engine bring the next piece, if it is of a turn before `end` and a slot is free.
    __device__ __forceinline__ void ask(Shared &s, int end) {
        if (turn >= end || room == 0) return;
        const bool first = turn < first_turns;
        const int bytes = (first ? FIRST : SECOND) * UNIT, pieces = first ? HIDDEN / 64 / FIRST : WIDTH / 64 / SECOND;
        const float *scale = nullptr;
        if (piece == 0) {
            Tile t = tile(turn);
            i64 tile = (i64)s.group[t.group].expert * (first ? 2 * PAIRS : COLUMN_TILES) + t.tile;
            at = first ? gate_up + tile * (HIDDEN / 64 * UNIT) : down + tile * (WIDTH / 64 * UNIT);
            scale = (first ? gate_up_scale : down_scale) + tile * 16;
        }
        if ((threadIdx.x & 31) == 0) {
            u64 *barrier = &s.full[threadIdx.x >> 5][in];
            Slot &slot = s.ring[threadIdx.x >> 5][in];
            expect(barrier, bytes + (scale ? 64 : 0));
            if (scale) copy(slot.scales, scale, 64, barrier);
            copy(slot.units, at + piece * bytes, bytes, barrier);
        }
        if (++piece == pieces) piece = 0, turn++;
        if (++in == DEPTH) in = 0;
        room--;
    }
};

struct Packed { uint4 codes; uint2 scales; };  // what a lane reads of a unit of the weight
struct Columns { float low, high; };           // outer scales of rows g and g + 8 of a tile of the weight

__device__ __forceinline__ Packed read(const char *unit) {
    const int lane = threadIdx.x & 31;
    return {*(const uint4 *)(unit + 16 * lane), *(const uint2 *)(unit + 512 + lane / 4 * 8)};
}

__device__ __forceinline__ void decode_unit(const Packed &of, u32 (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint4 c = of.codes;
        u32 low, high;
        scales_of(of.scales, step, low, high);
        decode<false>(step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w, low, high, a[step]);
    }
}

// d (64 x 8) += a (64 x 16), in registers, times 16 columns of a tile of 8 rows.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
        : F4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The chains of a warp's tile with all rows of x: acc[j] of rows g, g + 8 of the weight and 8j + 2t, 8j + 2t + 1 of x. Four
// warps multiply together; one that is not busy has no tile. A unit is decoded while the one before it is multiplied.
template <int UNITS, int AT_ONCE, int N>
__device__ __forceinline__ Columns chain(float (&acc)[N][4], Work &work, Shared &s, const char *x, bool busy) {
    constexpr int UNROLL = AT_ONCE % 2 ? AT_ONCE : AT_ONCE % 4 ? 2 : MOST_UNROLLED;
    static_assert(UNITS % AT_ONCE == 0, "pieces are whole");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 tile = (u64)(1024 >> 4 | 1 << 30) << 32 | address(x) >> 4;  // 128-byte swizzle, 8 rows every 1024 bytes
    Columns column = {};
    Packed coming = {};
    u32 a[2][4][4] = {};
#pragma unroll 1
    for (int u0 = 0; u0 < UNITS; u0 += AT_ONCE) {
        const Slot &slot = s.ring[warp][work.slot];
        if (busy) {
            wait(&s.full[warp][work.slot], work.phase);
            if (u0 == 0) column = {slot.scales[lane / 4], slot.scales[lane / 4 + 8]};
            coming = read(slot.units);
        }
#pragma unroll 1
        for (int d0 = 0; d0 < AT_ONCE; d0 += UNROLL) {
#pragma unroll
            for (int d = 0; d < UNROLL; d++, tile += 64) {
                if (busy) decode_unit(coming, a[d % 2]);
                fence();
#pragma unroll
                for (int step = 0; step < 4; step++)
#pragma unroll
                    for (int j = 0; j < N; j++) multiply(acc[j], a[d % 2][step], tile + j * (UNITS * 64) + 2 * step);
                commit();
                if (busy) coming = read(slot.units + (d0 + d + 1) * UNIT);  // behind the last one: nobody's
                finish<1>();
            }
        }
        if (UNROLL % 2) finish<0>();
        if (busy) {
            __syncwarp();
            work.advance();
            work.ask(s, work.turns);
        }
    }
    finish<0>();
#pragma unroll
    for (int j = 0; j < N; j++) hold(acc[j]);
    return column;
}

// What acc has of a row of x, and of row g or g + 8 of the weight, in the lanes whose t is row % 8 / 2.
template <int N>
__device__ __forceinline__ float pick(const float (&acc)[N][4], int row, int high) {
    float v = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float even = acc[j][2 * high], odd = acc[j][2 * high + 1];
        v = row / 8 != j ? v : row & 1 ? odd : even;
    }
    return __fmul_rn(v, 524288.0f);
}

// Where 8 columns of a row lie in tiles of 8 rows and 64 columns.
template <int COLUMNS>
__device__ __forceinline__ int place(int row, int eight) {
    return row / 8 * (16 * COLUMNS) + eight / 8 * 1024 + row % 8 * 128 + (eight ^ row) % 8 * 16;
}

template <int COLUMNS>
__device__ __forceinline__ void fetch(char *to, const u16 *x, int rows) {
    for (int i = threadIdx.x; i < rows * (COLUMNS / 8); i += THREADS)
        copy16(to + place<COLUMNS>(i / (COLUMNS / 8), i % (COLUMNS / 8)), (const char *)(x + 8 * (i64)i));
}

// 16 cells that other blocks fill, once all of them are filled.
__device__ __forceinline__ void load_filled(uint4 &v, uint4 &w, const u16 *at) {
    u32 most;
    do {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4 + 16];"
            : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
        most = __vmaxu2(__vmaxu2(v.x, v.y), __vmaxu2(v.z, v.w));
        most = __vmaxu2(most, __vmaxu2(__vmaxu2(w.x, w.y), __vmaxu2(w.z, w.w)));
    } while (most >> 16 == EMPTY || (most & 0xFFFF) == EMPTY);
}

// Rows of BF16 become what a product reads of their NVFP4. top: 0 before, the largest magnitude after. cells: where the
// rows come from, if they are not there.
template <int COLUMNS>
__device__ __forceinline__ void quantise(char *x, int rows, u32 *top, float *outer,
        const u16 *cells = nullptr) {
    constexpr int TOGETHER = (COLUMNS / 16 | 32) & -(COLUMNS / 16 | 32);  // lanes of one row: what divides both
    const int lane = threadIdx.x & 31, blocks = rows * (COLUMNS / 16);
    for (int b = threadIdx.x; b - lane < blocks; b += THREADS) {
        const int row = b / (COLUMNS / 16);
        u32 most = 0;
        if (b < blocks) {
            uint4 &v = *(uint4 *)(x + place<COLUMNS>(row, 2 * b % (COLUMNS / 8)));
            uint4 &w = *(uint4 *)(x + place<COLUMNS>(row, 2 * b % (COLUMNS / 8) + 1));
            if (cells) load_filled(v, w, cells + 16 * b);
            most = __vmaxu2(__vmaxu2(magnitudes(v.x), magnitudes(v.y)), __vmaxu2(magnitudes(v.z), magnitudes(v.w)));
            most = __vmaxu2(most, __vmaxu2(magnitudes(w.x), magnitudes(w.y)));
            most = __vmaxu2(most, __vmaxu2(magnitudes(w.z), magnitudes(w.w)));
        }
        most = max(most & 0xFFFF, most >> 16);
#pragma unroll
        for (int by = 1; by < TOGETHER; by *= 2) most = max(most, (u32)__shfl_xor_sync(ALL, (int)most, by));
        if (b < blocks && lane % TOGETHER == 0) atomicMax(top + row, most);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        const int row = b / (COLUMNS / 16);
        uint4 &v = *(uint4 *)(x + place<COLUMNS>(row, 2 * b % (COLUMNS / 8)));
        uint4 &w = *(uint4 *)(x + place<COLUMNS>(row, 2 * b % (COLUMNS / 8) + 1));
        const u32 word[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
        u32 pairs[8], code[2], out[8];
        float a[16], block_top = split(word, a, pairs);
        Row data = row_of(__uint_as_float(top[row] << 16));
        encode(a, pairs, block_top, data, code, out);
        v = make_uint4(out[0], out[1], out[2], out[3]), w = make_uint4(out[4], out[5], out[6], out[7]);
        if (b % (COLUMNS / 16) == 0) outer[row] = data.decode;
    }
    show();
    __syncthreads();
}

// The plan into shared memory, and the groups of rows, in the order of the rows.
__device__ __forceinline__ void read_plan(Shared &s, const i64 *order, const i64 *rows, const i64 *bounds,
        const float *weights, int experts) {
    const int lane = threadIdx.x & 31;
    const int r = min(threadIdx.x, ROWS - 1), slot = order[r], row = rows[r];  // all on their way at once
    const float weight = weights[r];
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        const int begin = bounds[e], end = bounds[e + 1];
        for (int first = begin; first < end; first += 8) s.starts[first] = e, s.ends[first] = end;
    }
    if (threadIdx.x < ROWS) s.token[r] = slot / SLOTS, s.row[r] = row, s.weight[r] = weight;
    __syncthreads();
    if (threadIdx.x < 32) {
        int groups = 0;
        for (int r = lane; r - lane < ROWS; r += 32) {
            const int expert = r < ROWS ? s.starts[r] : -1;
            const u32 all = __ballot_sync(ALL, expert >= 0);
            if (expert >= 0) s.group[groups + __popc(all & ((1u << lane) - 1))] = {expert, r, min(s.ends[r] - r, 8)};
            groups += __popc(all);
        }
        s.groups = groups;
    }
    __syncthreads();
}

__device__ __forceinline__ void fill(u16 *cell, u32 value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(cell), "h"((u16)value) : "memory");
}

// FC1 and SwiGLU: rows of h, in filled; the same cells of emptied are for the next launch.
__device__ __forceinline__ void first_product(Shared &s, Work &work, int rounds, u16 *filled, u16 *emptied) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    for (int turn = 0; turn < rounds; turn++) {
        float acc[EIGHTS(TOKENS)][4] = {};
        const bool busy = turn < work.first_turns;
        const Columns column = chain<HIDDEN / 64, FIRST>(acc, work, s, s.x, busy);
        if (!busy) continue;
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        float (&up)[8][16] = s.up[turn & 1][warp / 2];
        for (int both = 0; both < 2; both++) {  // up before gate
            for (int i = 0; i < group.count; i++) {
                const int token = s.token[group.first + i];
                if (tile.part == both || t != token % 8 / 2) continue;
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const float factor = __fmul_rn(s.x_outer[token], high ? column.high : column.low);
                    const float v = __fmul_rn(pick(acc, token, high), factor);
                    const int n = g + 8 * high, at = (group.first + i) * WIDTH + tile.tile * 16 + n;
                    if (tile.part) up[i][n] = v;
                    else fill(filled + at, pair_of(swiglu(v, up[i][n]), 0.0f)), emptied[at] = EMPTY;
                }
            }
            if (both == 0) asm volatile("bar.sync %0, 64;" :: "r"(1 + warp / 2) : "memory");  // of two warps
        }
    }
}

// FC2: this block's columns of y.
__device__ __forceinline__ void second_product(Shared &s, Work &work, int rounds) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int turn = work.first_turns; turn < work.first_turns + rounds; turn++) {
        float acc[EIGHTS(ROWS)][4] = {};
        const bool busy = turn < work.turns;
        const Columns column = chain<WIDTH / 64, SECOND>(acc, work, s, s.h, busy);
        if (!busy) continue;
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        for (int row = group.first; row < group.first + group.count; row++) {
            if (t != row % 8 / 2) continue;
#pragma unroll
            for (int high = 0; high < 2; high++) {
                const float factor = __fmul_rn(s.h_outer[row], high ? column.high : column.low);
                s.y[tile.part][row][g + 8 * high] = pair_of(__fmul_rn(pick(acc, row, high), factor), 0.0f);
            }
        }
    }
}

// The sums of y with the routing weights, slot after slot.
__device__ __forceinline__ void combine(const Shared &s, u16 *out, int own) {
    for (int i = threadIdx.x; i < own * TOKENS * 16; i += THREADS) {
        const int n = i % 16, token = i / 16 % TOKENS, part = i / 16 / TOKENS;
        float acc = 0.0f;
        for (int k = 0; k < SLOTS; k++) {
            const u32 y = s.y[part][s.row[token * SLOTS + k]][n];
            acc = __fmaf_rn(s.weight[token * SLOTS + k], __uint_as_float(y << 16), acc);
        }
        out[(i64)token * HIDDEN + (blockIdx.x + part * BLOCKS) * 16 + n] = pair_of(acc, 0.0f);
    }
}

// x [TOKENS, HIDDEN], the plan, its weights [TOKENS, SLOTS], packed weights and their outer scales -> out [TOKENS, HIDDEN].
// cells: two times [ROWS, WIDTH] BF16. A fault names its token.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const u16 *x, const i64 *order, const i64 *rows,
        const i64 *bounds, const float *weights, const char *gate_up, const float *gate_up_scale, const char *down,
        const float *down_scale, u16 *cells, u16 *out, u64 *begun, int *faults, int experts, int gate_up_slot,
        int down_slot) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = lane; i < DEPTH && warp < WORKERS; i += 32) init(&s.full[warp][i], 1);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) s.starts[i] = -1, s.h_top[i] = 0;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) s.x_top[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    fetch<HIDDEN>(s.x, x, TOKENS);
    u64 now = 0;
    if (threadIdx.x == THREADS - 1)
        asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(now) : "l"(begun) : "memory");
    read_plan(s, order, rows, bounds, weights, experts);
    if (threadIdx.x == THREADS - 1) s.half = now / BLOCKS & 1;

    const int groups = s.groups, pairs = (groups * PAIRS - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    const int own = (COLUMN_TILES - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    Work work = {gate_up, down, nullptr, gate_up_scale, down_scale, groups};
    work.room = DEPTH;
    int first_rounds = 0, second_rounds = 0;  // of the four warps, the first of which has the most tiles
    if (warp < WORKERS) {
        work.first_turns = (2 * pairs - warp + WORKERS - 1) / WORKERS;
        work.turns = work.first_turns + (own * groups - warp + WORKERS - 1) / WORKERS;
        first_rounds = (2 * pairs - warp / 4 * 4 + WORKERS - 1) / WORKERS;
        second_rounds = (own * groups - warp / 4 * 4 + WORKERS - 1) / WORKERS;
    }
    for (int i = 0; i < DEPTH; i++) work.ask(s, work.first_turns);
    copied();
    __syncthreads();
    quantise<HIDDEN>(s.x, TOKENS, s.x_top, s.x_outer);
    if (blockIdx.x == 0 && threadIdx.x < TOKENS && s.x_top[threadIdx.x] >= 0x7F80)
        atomicMin(faults + gate_up_slot, (int)threadIdx.x);

    u16 *filled = cells + s.half * (ROWS * WIDTH);
    first_product(s, work, first_rounds, filled, cells + (1 - s.half) * (ROWS * WIDTH));
    for (int i = 0; i < DEPTH; i++) work.ask(s, work.turns);
    __syncthreads();  // whoever looks for rows takes no time from the products
    quantise<WIDTH>(s.h, ROWS, s.h_top, s.h_outer, filled);
    for (int r = threadIdx.x; r < ROWS && blockIdx.x == 0; r += THREADS)
        if (s.h_top[r] >= 0x7F80) atomicMin(faults + down_slot, s.token[r]);
    second_product(s, work, second_rounds);
    __syncthreads();
    combine(s, out, own);
}
