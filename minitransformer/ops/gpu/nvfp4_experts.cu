// NVFP4 experts of few tokens in one kernel, tokens to weighted sums (dispatch/1, nvfp4/1, quantised_linear/1, swiglu/1).
//
// At one token the experts' 21 MB take 5 us, and five kernels one after another as long again, in which memory rests. Here
// every warp that multiplies has its tiles of FC1's weight on their way into shared memory as soon as the plan is known,
// and of FC2's behind them, in the order in which it multiplies them; meanwhile the other warps quantise the tokens, each
// block for itself. FC1 is spread over all blocks as pairs of 16 columns of gate and of up, so SwiGLU needs no other block.
// Its rows go through memory, where nobody waits for a block but for each number: a cell holds 0xffff, which no row has (a
// NaN is 0x7fc0), until it is written. Each block quantises those rows for itself too, and owns 16 columns of the output,
// all experts.
//
// The grid has no more blocks than the GPU runs at once, and is launched as one that meets (cuda.launch). Launches that
// share cells follow one another and have one shape (few_experts.py): `begun` counts their blocks, so it tells which half
// of the cells a launch fills; the other half, which the launch before has filled, it empties.
//
// Compiled with: TOKENS, SLOTS (experts a token), HIDDEN, WIDTH (of an expert), BLOCKS, WARPS, WORKERS: those
// that multiply, FIRST and SECOND: units of 64 columns in a piece of FC1's and FC2's weight (to ask for one takes 100 ns,
// whatever its length), DEPTH: pieces that a warp has on their way, SHARED: bytes; WIDE 0 and DECODE 1 for nvfp4_encode.cuh.

#include "hopper.cuh"
#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"

#define THREADS (32 * WARPS)
#define ROWS (TOKENS * SLOTS)
#define PIECE ((FIRST > SECOND ? FIRST : SECOND) * UNIT)
#define COLUMN_TILES (HIDDEN / 16)
#define PAIRS (WIDTH / 16)
#define OWN ((COLUMN_TILES + BLOCKS - 1) / BLOCKS)
#define STRIDE(columns) (2 * (columns) + 16)  // 16: eight rows' pieces fill the 32 banks
#define EMPTY 0xFFFF

struct Group { int expert, first, count; };  // up to 8 rows of an expert
struct Shared {
    char ring[WORKERS][DEPTH][PIECE];
    char x[TOKENS][STRIDE(HIDDEN)], h[ROWS][STRIDE(WIDTH)];  // BF16, then code * scale in the same place
    u64 full[WORKERS][DEPTH];
    float up[2][WORKERS / 2][4][32];
    float x_outer[TOKENS], h_outer[ROWS], weight[ROWS];
    u32 x_top[TOKENS], h_top[ROWS];
    int token[ROWS], row[ROWS], starts[ROWS], ends[ROWS], groups, half;
    Group group[ROWS];
    u16 y[OWN][ROWS][16];
};
static_assert(sizeof(Shared) <= SHARED && ROWS <= 32 * WORKERS && WORKERS < WARPS, "few_experts.py counts otherwise");

__device__ __forceinline__ void copy(void *to, const void *from, int bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

// A barrier of so many threads.
template <int COUNT>
__device__ __forceinline__ void meet_at(int number) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "n"(COUNT) : "memory");
}

// A tile of 16 weight rows that a warp multiplies: of FC1 part 0 is gate, 1 up; of FC2 part numbers the block's columns.
struct Tile { int group, tile, part; };

// A warp's tiles in turn, and its place in the ring.
struct Work {
    const char *gate_up, *down, *at;
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
        if (piece == 0) {
            Tile t = tile(turn);
            i64 tile = (i64)s.group[t.group].expert * (first ? 2 * PAIRS : COLUMN_TILES) + t.tile;
            at = first ? gate_up + tile * (HIDDEN / 64 * UNIT) : down + tile * (WIDTH / 64 * UNIT);
        }
        if ((threadIdx.x & 31) == 0) {
            u64 *barrier = &s.full[threadIdx.x >> 5][in];
            expect(barrier, bytes);
            copy(s.ring[threadIdx.x >> 5][in], at + piece * bytes, bytes, barrier);
        }
        if (++piece == pieces) piece = 0, turn++;
        if (++in == DEPTH) in = 0;
        room--;
    }
};

// What a lane reads of a unit: of the weight, and of x for two steps each. Lane 8i + j names row j of x.
struct Operands { uint4 codes; uint2 scales; uint4 x[2]; };

__device__ __forceinline__ Operands read(const char *unit, u32 x) {
    const int lane = threadIdx.x & 31;
    return {*(const uint4 *)(unit + 16 * lane), *(const uint2 *)(unit + 512 + lane / 4 * 8),
            {load_blocks(x), load_blocks(x + 64)}};
}

__device__ __forceinline__ void multiply(float (&acc)[4], const Operands &of) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint4 c = of.codes, b = of.x[step / 2];
        const u32 word = step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w;
        const u32 b0 = step % 2 ? b.z : b.x, b1 = step % 2 ? b.w : b.y;
        u32 low, high, a[4];
        scales_of(of.scales, step, low, high);
        decode<false, true>(word, low, high, a);
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The chain of a tile: acc of rows g, g + 8 of the weight and 2t, 2t + 1 of x. A unit is read while the one before it is
// multiplied: a warp waits for each of its products, and has no time to wait for shared memory as well.
template <int UNITS, int AT_ONCE>
__device__ __forceinline__ void chain(float (&acc)[4], Work &work, Shared &s, const char *row) {
    constexpr int UNROLL = AT_ONCE % 4 == 0 ? 4 : AT_ONCE % 3 == 0 ? 3 : AT_ONCE % 2 == 0 ? 2 : 1;
    static_assert(UNITS % AT_ONCE == 0, "pieces are whole");
    const int warp = threadIdx.x >> 5;
    const char *at = s.ring[warp][work.slot];
    u32 x = address(row) + (threadIdx.x & 31) / 8 * 16;
    wait(&s.full[warp][work.slot], work.phase);
    Operands now = read(at, x);
#pragma unroll 1
    for (int u = UNROLL; u <= UNITS; u += UNROLL, at += UNROLL * UNIT, x += UNROLL * 128) {
#pragma unroll
        for (int d = 1; d <= UNROLL; d++) {
            const bool over = d == UNROLL && u % AT_ONCE == 0;  // a piece ends with `now`
            if (over) {
                work.advance();
                at = s.ring[warp][work.slot] - d * UNIT;
                if (u < UNITS) wait(&s.full[warp][work.slot], work.phase);
            }
            const Operands next = read(at + d * UNIT, x + d * 128);  // at the end of all nobody's
            multiply(acc, now);
            now = next;
            if (over) {
                __syncwarp();
                work.ask(s, work.turns);
            }
        }
    }
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

// Rows of BF16, in memory or (CELLS) on their way there, become what a product reads of their NVFP4, in x, by the threads
// from FIRST_THREAD on. top: 0 before, the largest magnitude after.
template <int COLUMNS, bool CELLS, int FIRST_THREAD>
__device__ __forceinline__ void quantise(char (*x)[STRIDE(COLUMNS)], const u16 *from, int rows, u32 *top, float *outer) {
    constexpr int COUNT = THREADS - FIRST_THREAD;
    const int mine = threadIdx.x - FIRST_THREAD, blocks = rows * (COLUMNS / 16);
    for (int b = mine; b < blocks; b += COUNT) {
        const int row = b / (COLUMNS / 16);
        uint4 *at = (uint4 *)(x[row] + b % (COLUMNS / 16) * 32), v, w;
        if (CELLS) load_filled(v, w, from + 16 * b);
        else v = ((const uint4 *)from)[2 * b], w = ((const uint4 *)from)[2 * b + 1];
        at[0] = v, at[1] = w;
        u32 most = __vmaxu2(__vmaxu2(magnitudes(v.x), magnitudes(v.y)), __vmaxu2(magnitudes(v.z), magnitudes(v.w)));
        most = __vmaxu2(most, __vmaxu2(magnitudes(w.x), magnitudes(w.y)));
        most = __vmaxu2(most, __vmaxu2(magnitudes(w.z), magnitudes(w.w)));
        atomicMax(top + row, max(most & 0xFFFF, most >> 16));
    }
    meet_at<COUNT>(FIRST_THREAD ? 15 : 0);
    for (int b = mine; b < blocks; b += COUNT) {
        const int row = b / (COLUMNS / 16);
        uint4 *at = (uint4 *)(x[row] + b % (COLUMNS / 16) * 32), v = at[0], w = at[1];
        const u32 word[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
        u32 pairs[8], code[2], out[8];
        float a[16], block_top = split(word, a, pairs);
        Row data = row_of(__uint_as_float(top[row] << 16));
        encode(a, pairs, block_top, data, code, out);
        at[0] = make_uint4(out[0], out[1], out[2], out[3]), at[1] = make_uint4(out[4], out[5], out[6], out[7]);
        if (b % (COLUMNS / 16) == 0) outer[row] = data.decode;
    }
}

// The plan into shared memory, and the groups of rows, in the order of the rows, by the warps that multiply.
__device__ __forceinline__ int read_plan(Shared &s, const i64 *order, const i64 *rows, const i64 *bounds,
        const float *weights, int experts) {
    const int lane = threadIdx.x & 31;
    const int r = min(threadIdx.x, ROWS - 1), slot = order[r], row = rows[r];  // all on their way at once
    const float weight = weights[r];
    for (int e = threadIdx.x; e < experts; e += 32 * WORKERS) {
        const int begin = bounds[e], end = bounds[e + 1];
        for (int first = begin; first < end; first += 8) s.starts[first] = e, s.ends[first] = end;
    }
    if (threadIdx.x < ROWS) s.token[r] = slot / SLOTS, s.row[r] = row, s.weight[r] = weight;
    meet_at<32 * WORKERS>(14);
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
    meet_at<32 * WORKERS>(14);
    return s.groups;
}

__device__ __forceinline__ void fill(u16 *cell, u32 value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(cell), "h"((u16)value) : "memory");
}

struct Columns { float low, high; };  // outer scales of rows g and g + 8 of a tile of the weight

// Asked for before the chain, needed behind it.
template <int TILES>
__device__ __forceinline__ Columns columns_of(const float *scale, const Group &group, const Tile &tile) {
    const float *at = scale + ((i64)group.expert * TILES + tile.tile) * 16 + (threadIdx.x & 31) / 4;
    return {load_early(at), load_early(at + 8)};
}

// FC1 and SwiGLU: rows of h, in filled; the same cells of emptied are for the next launch.
__device__ __forceinline__ void first_product(Shared &s, Work &work, const float *scale, u16 *filled, u16 *emptied) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    for (int turn = 0; turn < work.first_turns; turn++) {
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        float acc[4] = {}, v[4];
        const char *x = s.x[s.token[group.first + min(lane % 8, group.count - 1)]];
        const Columns column = columns_of<2 * PAIRS>(scale, group, tile);
        chain<HIDDEN / 64, FIRST>(acc, work, s, x);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int token = s.token[group.first + min(2 * t + (c & 1), group.count - 1)];
            const float factor = __fmul_rn(s.x_outer[token], c & 2 ? column.high : column.low);
            v[c] = __fmul_rn(__fmul_rn(acc[c], 524288.0f), factor);
            if (tile.part) s.up[turn & 1][warp / 2][c][lane] = v[c];
        }
        meet_at<64>(1 + warp / 2);  // two warps; the next turn has other cells
        if (tile.part) continue;
        u32 y[4];
#pragma unroll
        for (int c = 0; c < 4; c++) y[c] = pair_of(swiglu(v[c], s.up[turn & 1][warp / 2][c][lane]), 0.0f);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = 2 * t + (c & 1), at = (group.first + row) * WIDTH + tile.tile * 16 + g + (c & 2 ? 8 : 0);
            if (row < group.count) fill(filled + at, y[c]), emptied[at] = EMPTY;
        }
    }
}

// FC2: this block's columns of y.
__device__ __forceinline__ void second_product(Shared &s, Work &work, const float *scale) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int turn = work.first_turns; turn < work.turns; turn++) {
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        float acc[4] = {};
        const char *h = s.h[group.first + min(lane % 8, group.count - 1)];
        const Columns column = columns_of<COLUMN_TILES>(scale, group, tile);
        chain<WIDTH / 64, SECOND>(acc, work, s, h);
        u32 y[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {  // of rows that there are not too: without a branch all four are under way at once
            const float outer = s.h_outer[group.first + min(2 * t + (c & 1), group.count - 1)];
            const float factor = __fmul_rn(outer, c & 2 ? column.high : column.low);
            y[c] = pair_of(__fmul_rn(__fmul_rn(acc[c], 524288.0f), factor), 0.0f);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = 2 * t + (c & 1);
            if (row < group.count) s.y[tile.part][group.first + row][g + (c & 2 ? 8 : 0)] = y[c];
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
    extern __shared__ __align__(128) char memory[];
    Shared &s = *(Shared *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = lane; i < DEPTH && warp < WORKERS; i += 32) init(&s.full[warp][i], 1);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) s.starts[i] = -1, s.h_top[i] = 0;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) s.x_top[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int own = (COLUMN_TILES - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    Work work = {gate_up, down};
    if (warp < WORKERS) {
        work.groups = read_plan(s, order, rows, bounds, weights, experts);
        const int tiles = 2 * ((work.groups * PAIRS - (int)blockIdx.x + BLOCKS - 1) / BLOCKS);
        work.first_turns = (tiles - warp + WORKERS - 1) / WORKERS;
        work.turns = work.first_turns + (own * work.groups - warp + WORKERS - 1) / WORKERS;
        work.room = DEPTH;
        for (int i = 0; i < DEPTH; i++) work.ask(s, work.first_turns);
    } else {
        u64 now = 0;
        if (threadIdx.x == THREADS - 1)
            asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(now) : "l"(begun) : "memory");
        quantise<HIDDEN, false, 32 * WORKERS>(s.x, x, TOKENS, s.x_top, s.x_outer);
        if (threadIdx.x == THREADS - 1) s.half = now / BLOCKS & 1;
        const int token = threadIdx.x - 32 * WORKERS;
        if (blockIdx.x == 0 && token < TOKENS && s.x_top[token] >= 0x7F80) atomicMin(faults + gate_up_slot, token);
    }
    __syncthreads();

    u16 *filled = cells + s.half * (ROWS * WIDTH);
    first_product(s, work, gate_up_scale, filled, cells + (1 - s.half) * (ROWS * WIDTH));
    for (int i = 0; i < DEPTH; i++) work.ask(s, work.turns);
    __syncthreads();  // whoever looks for rows takes no time from the products
    quantise<WIDTH, true, 0>(s.h, filled, ROWS, s.h_top, s.h_outer);
    __syncthreads();
    second_product(s, work, down_scale);
    __syncthreads();
    combine(s, out, own);
    for (int r = threadIdx.x; r < ROWS && blockIdx.x == 0; r += THREADS)
        if (s.h_top[r] >= 0x7F80) atomicMin(faults + down_slot, s.token[r]);
}
