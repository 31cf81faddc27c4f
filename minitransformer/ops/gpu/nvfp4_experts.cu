// NVFP4 experts of few tokens in one kernel, tokens to weighted sums (dispatch/1, nvfp4/1, quantised_linear/1, swiglu/1).
//
// At one token the experts' 21 MB take 5 us, and five kernels one after another as long again, in which memory rests. Here
// every warp has its tiles of both weights on their way into shared memory as soon as the plan is known, in the order in
// which it multiplies them. Each block quantises the tokens for itself; FC1 is spread over all blocks as pairs of 16
// columns of gate and of up, so SwiGLU needs no other block; its rows go through memory, the one meeting of all blocks;
// then each block quantises those for itself too, and owns 16 columns of the output, all experts.
//
// The grid has no more blocks than the GPU runs at once, and is launched as one that meets (cuda.launch). `arrived` only
// grows, by the number of blocks a launch (the same for all launches that share it: few_experts.py), so nobody resets it.
//
// Compiled with: TOKENS, SLOTS (experts a token), HIDDEN, WIDTH (of an expert), BLOCKS, WARPS, AT_ONCE: units of 64 columns
// in a piece of the weight (a copy costs some 20 ns, whatever its length), DEPTH: pieces that a warp has on their way,
// SHARED: bytes; WIDE 0 and DECODE 1 for nvfp4_encode.cuh.

#include "hopper.cuh"
#include "nvfp4.cuh"
#include "nvfp4_encode.cuh"

#define THREADS (32 * WARPS)
#define ROWS (TOKENS * SLOTS)
#define PIECE (AT_ONCE * UNIT)
#define COLUMN_TILES (HIDDEN / 16)
#define PAIRS (WIDTH / 16)
#define OWN ((COLUMN_TILES + BLOCKS - 1) / BLOCKS)
#define STRIDE(columns) (2 * (columns) + 16)  // 16: eight rows' pieces fill the 32 banks

struct Group { int expert, first, count; };  // up to 8 rows of an expert
struct Shared {
    char ring[WARPS][DEPTH][PIECE];
    char x[TOKENS][STRIDE(HIDDEN)], h[ROWS][STRIDE(WIDTH)];  // BF16, then code * scale in the same place
    u64 full[WARPS][DEPTH];
    float up[2][WARPS / 2][4][32];
    float x_outer[TOKENS], h_outer[ROWS], weight[ROWS];
    u32 x_top[TOKENS], h_top[ROWS];
    int token[ROWS], row[ROWS], starts[ROWS], ends[ROWS], groups;
    Group group[ROWS];
    u16 y[OWN][ROWS][16];
};
static_assert(sizeof(Shared) <= SHARED && ROWS <= THREADS && DEPTH > 1, "few_experts.py counts otherwise");

__device__ __forceinline__ void copy(char *to, const char *from, int bytes, u64 *barrier) {
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
    int groups, first_turns, turns;  // of FC1, of both
    int turn, piece;                 // what is asked for next
    int slot, phase;                 // what comes next

    __device__ __forceinline__ Tile tile(int turn) const {
        int warp = threadIdx.x >> 5;
        if (turn < first_turns) {
            int item = warp + WARPS * turn, pair = blockIdx.x + item / 2 * BLOCKS, part = item & 1;
            return {pair / PAIRS, pair % PAIRS + part * PAIRS, part};
        }
        int item = warp + WARPS * (turn - first_turns), part = item / groups;
        return {item % groups, (int)blockIdx.x + part * BLOCKS, part};
    }

    __device__ __forceinline__ void advance() {
        if (++slot == DEPTH) slot = 0, phase ^= 1;
    }

    // Has the copy engine bring the next piece into a free slot.
    __device__ __forceinline__ void ask(Shared &s, int slot) {
        if (turn == turns) return;
        const int units = turn < first_turns ? HIDDEN / 64 : WIDTH / 64;
        if (piece == 0) {
            Tile t = tile(turn);
            i64 expert = s.group[t.group].expert;
            at = turn < first_turns ? gate_up + (expert * (2 * PAIRS) + t.tile) * (HIDDEN / 64 * UNIT)
                                    : down + (expert * COLUMN_TILES + t.tile) * (WIDTH / 64 * UNIT);
        }
        if ((threadIdx.x & 31) == 0) {
            u64 *barrier = &s.full[threadIdx.x >> 5][slot];
            int bytes = min(AT_ONCE, units - piece * AT_ONCE) * UNIT;
            expect(barrier, bytes);
            copy(s.ring[threadIdx.x >> 5][slot], at + piece * PIECE, bytes, barrier);
        }
        if (++piece * AT_ONCE >= units) piece = 0, turn++;
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
        decode<false>(word, low, high, a);
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The chain of a tile: acc of rows g, g + 8 of the weight and 2t, 2t + 1 of x. A unit is read while the one before it is
// multiplied: a warp waits for each of its products, and has no time to wait for shared memory as well.
template <int UNITS>
__device__ __forceinline__ void chain(float (&acc)[4], Work &work, Shared &s, const char *row) {
    const int warp = threadIdx.x >> 5;
    const u32 x = address(row) + (threadIdx.x & 31) / 8 * 16;
    wait(&s.full[warp][work.slot], work.phase);
    Operands now = read(s.ring[warp][work.slot], x);
    for (int u0 = 0; u0 < UNITS; u0 += AT_ONCE) {
        const int slot = work.slot;
#pragma unroll
        for (int d = 0; d < AT_ONCE; d++) {
            const int u = u0 + d;
            if (UNITS % AT_ONCE && u >= UNITS) break;
            Operands next = now;
            if (d == AT_ONCE - 1 || u + 1 == UNITS) work.advance();
            if (u + 1 < UNITS) {
                if (d == AT_ONCE - 1) wait(&s.full[warp][work.slot], work.phase);
                next = read(s.ring[warp][work.slot] + (d + 1) % AT_ONCE * UNIT, x + (u + 1) * 128);
            }
            multiply(acc, now);
            now = next;
        }
        __syncwarp();
        work.ask(s, slot);
    }
}

template <int COLUMNS>
__device__ __forceinline__ void fetch(char (*to)[STRIDE(COLUMNS)], const u16 *x, int rows) {
    for (int i = threadIdx.x; i < rows * (COLUMNS / 8); i += THREADS)
        copy16(to[i / (COLUMNS / 8)] + i % (COLUMNS / 8) * 16, (const char *)(x + 8 * (i64)i));
}

// Rows of BF16 become what a product reads of their NVFP4. top: 0 before, the largest magnitude after.
template <int COLUMNS>
__device__ __forceinline__ void quantise(char (*x)[STRIDE(COLUMNS)], int rows, u32 *top, float *outer) {
    for (int b = threadIdx.x; b < rows * (COLUMNS / 16); b += THREADS) {
        const int row = b / (COLUMNS / 16);
        const uint4 *at = (const uint4 *)(x[row] + b % (COLUMNS / 16) * 32), v = at[0], w = at[1];
        u32 most = __vmaxu2(__vmaxu2(magnitudes(v.x), magnitudes(v.y)), __vmaxu2(magnitudes(v.z), magnitudes(v.w)));
        most = __vmaxu2(most, __vmaxu2(magnitudes(w.x), magnitudes(w.y)));
        most = __vmaxu2(most, __vmaxu2(magnitudes(w.z), magnitudes(w.w)));
        atomicMax(top + row, max(most & 0xFFFF, most >> 16));
    }
    __syncthreads();
    for (int b = threadIdx.x; b < rows * (COLUMNS / 16); b += THREADS) {
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
    __syncthreads();
}

// All blocks' writes up to here can be read after it.
__device__ __forceinline__ void meet_all(u64 *arrived) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 now, until;
        asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(now) : "l"(arrived) : "memory");
        until = (now / BLOCKS + 1) * BLOCKS;
        do
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrived) : "memory");
        while (now < until);
    }
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

// FC1 and SwiGLU: rows of h.
__device__ __forceinline__ void first_product(Shared &s, Work &work, const float *scale, u16 *h) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    for (int turn = 0; turn < work.first_turns; turn++) {
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        float acc[4] = {}, v[4], column[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            column[i] = load_early(scale + (i64)group.expert * (2 * WIDTH) + tile.tile * 16 + g + 8 * i);
        chain<HIDDEN / 64>(acc, work, s, s.x[s.token[group.first + min(lane % 8, group.count - 1)]]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int token = s.token[group.first + min(2 * t + (c & 1), group.count - 1)];
            v[c] = __fmul_rn(__fmul_rn(acc[c], 524288.0f), __fmul_rn(s.x_outer[token], column[c >> 1]));
            if (tile.part) s.up[turn & 1][warp / 2][c][lane] = v[c];
        }
        asm volatile("bar.sync %0, 64;" :: "r"(1 + warp / 2) : "memory");  // of two warps; the next turn has other cells
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = 2 * t + (c & 1), f = tile.tile * 16 + g + (c & 2 ? 8 : 0);
            if (tile.part == 0 && row < group.count)
                h[(group.first + row) * WIDTH + f] = pair_of(swiglu(v[c], s.up[turn & 1][warp / 2][c][lane]), 0.0f);
        }
    }
}

// FC2: this block's columns of y.
__device__ __forceinline__ void second_product(Shared &s, Work &work, const float *scale) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int turn = work.first_turns; turn < work.turns; turn++) {
        const Tile tile = work.tile(turn);
        const Group group = s.group[tile.group];
        float acc[4] = {}, column[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            column[i] = load_early(scale + (i64)group.expert * HIDDEN + tile.tile * 16 + g + 8 * i);
        chain<WIDTH / 64>(acc, work, s, s.h[group.first + min(lane % 8, group.count - 1)]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int row = 2 * t + (c & 1);
            if (row >= group.count) continue;
            const float factor = __fmul_rn(s.h_outer[group.first + row], column[c >> 1]);
            s.y[tile.part][group.first + row][g + (c & 2 ? 8 : 0)] =
                pair_of(__fmul_rn(__fmul_rn(acc[c], 524288.0f), factor), 0.0f);
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
// h: room for [ROWS, WIDTH] BF16. A fault names its token.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const u16 *x, const i64 *order, const i64 *rows,
        const i64 *bounds, const float *weights, const char *gate_up, const float *gate_up_scale, const char *down,
        const float *down_scale, u16 *h, u16 *out, u64 *arrived, int *faults, int experts, int gate_up_slot,
        int down_slot) {
    extern __shared__ __align__(128) char memory[];
    Shared &s = *(Shared *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = lane; i < DEPTH; i += 32) init(&s.full[warp][i], 1);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) s.starts[i] = -1, s.h_top[i] = 0;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) s.x_top[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    fetch<HIDDEN>(s.x, x, TOKENS);
    read_plan(s, order, rows, bounds, weights, experts);

    const int groups = s.groups, pairs = (groups * PAIRS - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    const int own = (COLUMN_TILES - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
    const int first_turns = (2 * pairs - warp + WARPS - 1) / WARPS;
    Work work = {gate_up, down, 0, groups, first_turns, first_turns + (own * groups - warp + WARPS - 1) / WARPS};
    if (lane < work.turns) {  // the outer scales of this warp's tiles, before the weights are in their way
        const Tile tile = work.tile(lane);
        const i64 expert = s.group[tile.group].expert;
        const float *at = lane < first_turns ? gate_up_scale + expert * (2 * WIDTH) : down_scale + expert * HIDDEN;
        asm volatile("prefetch.global.L2 [%0];" :: "l"(at + tile.tile * 16));
    }
    for (int i = 0; i < DEPTH; i++) work.ask(s, i);
    copied();
    __syncthreads();
    quantise<HIDDEN>(s.x, TOKENS, s.x_top, s.x_outer);
    if (blockIdx.x == 0 && threadIdx.x < TOKENS && s.x_top[threadIdx.x] >= 0x7F80)
        atomicMin(faults + gate_up_slot, (int)threadIdx.x);

    first_product(s, work, gate_up_scale, h);
    meet_all(arrived);

    fetch<WIDTH>(s.h, h, ROWS);
    copied();
    __syncthreads();
    quantise<WIDTH>(s.h, ROWS, s.h_top, s.h_outer);
    for (int r = threadIdx.x; r < ROWS && blockIdx.x == 0; r += THREADS)
        if (s.h_top[r] >= 0x7F80) atomicMin(faults + down_slot, s.token[r]);
    second_product(s, work, down_scale);
    __syncthreads();
    combine(s, out, own);
}
