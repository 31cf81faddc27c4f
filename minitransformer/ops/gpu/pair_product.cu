// The experts' dX = dY W on Hopper (grouped_linear.py has the spec): persistent pairs of blocks, each with one warp that loads
// by the copy engine and two groups of four warps that take turns at tiles of 128 columns of dX and up to 128 rows. The rows
// are the narrow side of the tensor core's instruction, so an expert's tiles cost what its rows need. While one group writes
// its tile, the other keeps the tensor core busy. One group owns an output's whole chain.
//
// The two blocks of a pair take the same rows and neighbouring columns: each loads half of dY for both, which takes a
// quarter off what goes through the L2 cache.
//
// WEIGHTED: dX times the routing weights, whose own gradient is the lane sum over a row of dX before that, times `other` [R,
// N] (which a warp more loads). A lane, the column modulo 128, belongs to one block of a pair, which has 64 lanes of two of
// their columns; the sums are passed on to the pair with the next 256 columns through memory. A pair waits for those before it
// alone, which began before it: pairs are numbered as they begin, since CUDA promises no order.
//
// Compiled with: WEIGHTED, STAGES, SHARED (bytes). Here x is dY [R, K], w [experts * K, N], y is dX [R, N].

#include "hopper.cuh"
#define BOX 8192  // bytes of 64 x 64 elements, what the copy engine brings at once
#define DEPTH 64
#define ROWS 128
#define COLUMNS 128  // of a block
#define APART (WEIGHTED ? 128 : 64)  // from the one half of a block's columns to the other
#define CELLS 5  // of schedule.py
#include "wide_mma.cuh"

struct Shared {
    char w[STAGES][2 * BOX], x[STAGES][2 * BOX];
    char out[2][2][2 * BOX];  // of a group: its rows of 64 columns, and of the next 64
    float weights[2][ROWS];
    u64 full[STAGES], empty[STAGES], turns[2], came[2], left[2];
    int pair;
};
static_assert(sizeof(Shared) == SHARED, "pair_product.py counts other bytes");

struct Sizes { const int *schedule; int tiles, N, K; };

// lanes: [tile of rows, half of its lanes, 8 rows of 16, thread], two rows of two lanes. done: [tile of
// rows, half]: how many of the pairs of columns are in the lanes; then how many pairs of blocks have begun.
struct Dots { float4 *lanes; int *done; };

// Rows from `first` to `end` of an expert and this block's columns: 64 from `column` on, 64 from APART further.
struct Tile { int number, expert, first, end, column; };

// Tile number t of all, whose two columns of tiles a pair of blocks takes: the rows of one expert after another, so that
// both operands stay in the L2 cache; WEIGHTED: all columns of one tile of rows.
__device__ __forceinline__ Tile place(const Sizes &in, int t) {
    const int pairs = (in.N + 2 * COLUMNS - 1) / (2 * COLUMNS);
    const int *at = in.schedule + t / pairs * CELLS;
    const int base = WEIGHTED ? t / pairs : at[3], rows = WEIGHTED ? 1 : at[4], u = t - base * pairs, i = base + u % rows;
    at = in.schedule + i * CELLS;
    return {i, at[0], at[1], at[2], u / rows * 2 * COLUMNS + (int)rank() * (WEIGHTED ? 64 : COLUMNS)};
}

__device__ __forceinline__ int count(const Sizes &in) {
    return in.tiles * ((in.N + 2 * COLUMNS - 1) / (2 * COLUMNS));
}

__device__ __forceinline__ int pair_of(const Shared &at) { return WEIGHTED ? read_first(&at.pair) : blockIdx.x / 2; }

__device__ __forceinline__ void produce(Shared &at, const Sizes &in, const TensorMap *x, const TensorMap *w) {
    const int own = rank();
    int step = 0;
    for (int t = pair_of(at); t < count(in); t += gridDim.x / 2) {
        const Tile tile = place(in, t);
        const int boxes = (tile.end - tile.first + 63) / 64;
        for (int k = 0; k < in.K; k += DEPTH, step++) {
            const int slot = step % STAGES;
            wait(&at.empty[slot], (step / STAGES & 1) ^ 1);
            expect(&at.full[slot], (2 + boxes) * BOX);
#pragma unroll
            for (int b = 0; b < 2; b++)
                load(at.w[slot] + b * BOX, w, tile.column + APART * b, tile.expert * in.K + k, &at.full[slot]);
            if (own < boxes) load_both(at.x[slot] + own * BOX, x, k, tile.first + 64 * own, &at.full[slot]);
        }
    }
}

// `other` to where the outputs will lie, for the groups in turn.
__device__ __forceinline__ void fetch(Shared &at, const Sizes &in, const TensorMap *other) {
    int n = 0;
    for (int t = pair_of(at); t < count(in); t += gridDim.x / 2, n++) {
        const Tile tile = place(in, t);
        const int group = n % 2, rows = (tile.end - tile.first + 63) / 64, halves = tile.column + APART < in.N ? 2 : 1;
        wait(&at.left[group], (n / 2 & 1) ^ 1);  // the lines before are in memory
        expect(&at.came[group], rows * halves * BOX);
        for (int half = 0; half < halves; half++)
            for (int b = 0; b < rows; b++)
                load(at.out[group][half] + b * BOX, other, tile.column + APART * half, tile.first + 64 * b, &at.came[group]);
    }
}

struct Group {
    Shared &at;
    const Sizes &in;
    const Dots &dots;
    int which;

    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % 32 < 2) arrive_at(&at.empty[step % STAGES], threadIdx.x % 32);
    }

    // The products of a tile of N rows, whose steps come after `first` others, in turn with the other group.
    template <int N>
    __device__ __forceinline__ void chain(float (&d)[2][64], int first, int turn) const {
        const int last = first + (in.K + DEPTH - 1) / DEPTH;
        wait(&at.turns[which], turn & 1 ^ 1 - which);  // group 0's first turn is free
#pragma unroll 1
        for (int step = first; step < last; step++) {
            const int slot = step % STAGES;
            wait(&at.full[slot], step / STAGES & 1);
            const u64 columns = describe(at.w[slot]), rows = describe(at.x[slot]);
            hold(d[0]), hold(d[1]);
            fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    product<N>(d[h], columns + (h * BOX + k * 2048) / 16, rows + k * 32 / 16, step > first || k > 0);
            commit();
            finish<1>();
            hold(d[0]), hold(d[1]);
            if (step > first) release(step - 1);
        }
        if (threadIdx.x % 32 == 0) arrive(&at.turns[1 - which]);
        finish<0>();
        hold(d[0]), hold(d[1]);
        release(last - 1);
    }

    __device__ __forceinline__ void chain(float (&d)[2][64], int rows, int first, int turn) const {
        if (rows > 120) chain<128>(d, first, turn);
        else if (rows > 112) chain<120>(d, first, turn);
        else if (rows > 104) chain<112>(d, first, turn);
        else if (rows > 96) chain<104>(d, first, turn);
        else if (rows > 80) chain<96>(d, first, turn);
        else if (rows > 64) chain<80>(d, first, turn);
        else if (rows > 48) chain<64>(d, first, turn);
        else if (rows > 32) chain<48>(d, first, turn);
        else if (rows > 16) chain<32>(d, first, turn);
        else chain<16>(d, first, turn);
    }

    // A thread's 16 bytes of each 16th row of 64 columns in shared memory, swizzled by 128 bytes.
    __device__ __forceinline__ uint4 *line(int half, int j) const {
        const int thread = threadIdx.x % 128;
        return (uint4 *)(at.out[which][half] + (thread / 8 + 16 * j) * 128 + ((thread % 8 ^ thread / 8 % 8) << 4));
    }

    // This thread's element of line 0 in a matrix [R, N], of 64 columns, and whether line j is inside.
    __device__ __forceinline__ i64 element(const Tile &tile, int half) const {
        return (i64)(tile.first + threadIdx.x % 128 / 8) * in.N + tile.column + half * APART + threadIdx.x % 8 * 8;
    }
    __device__ __forceinline__ bool inside(const Tile &tile, int half, int j) const {
        const int column = tile.column + half * APART + threadIdx.x % 8 * 8;
        return tile.first + threadIdx.x % 128 / 8 + 16 * j < tile.end && column < in.N;
    }

    // Lane 8q + i says where row i of matrix q lies: rows 8 (q / 2) + i of 16, columns 8 (q % 2) of the warp's 16.
    __device__ __forceinline__ u32 matrices(int half) const {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        return address(at.out[which][half]) + (lane / 16 * 8 + lane % 8) * 128
            + ((2 * warp + lane / 8 % 2 ^ lane % 8) << 4);
    }

    // lanes + fl(other * g) of this block's lanes, two columns each, for `other` as the tensor core would have given it.
    __device__ __forceinline__ void add(const float (&d)[2][64], const Tile &tile, int round) const {
        const int part = tile.number * 2 + (int)rank(), turn = tile.column / (2 * COLUMNS);
        const int halves = tile.column + APART < in.N ? 2 : 1;
        int *done = dots.done + part;
        if (threadIdx.x % 128 == 0 && turn > 0) {
            int seen;
            do asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(done) : "memory");
            while (seen < turn);
        }
        wait(&at.came[which], round & 1);
        meet(which);
        float4 *lanes = dots.lanes + part * 2048 + threadIdx.x % 128, sums[16];
#pragma unroll
        for (int j = 0; j < 16; j++) sums[j] = turn == 0 ? float4{0, 0, 0, 0} : __ldcg(lanes + j * 128);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 8 && half < halves; j++) {
                u32 pairs[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                    : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(matrices(half) + j * 2048));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int i = 8 * j + 4 * h;
                    float4 &sum = sums[2 * j + h];
                    sum.x += __uint_as_float(pairs[2 * h] << 16) * d[half][i];
                    sum.y += __uint_as_float(pairs[2 * h] & 0xffff0000) * d[half][i + 1];
                    sum.z += __uint_as_float(pairs[2 * h + 1] << 16) * d[half][i + 2];
                    sum.w += __uint_as_float(pairs[2 * h + 1] & 0xffff0000) * d[half][i + 3];
                }
            }
#pragma unroll
        for (int j = 0; j < 16; j++) __stcg(lanes + j * 128, sums[j]);
        meet(which);  // and what all have written is released by one
        if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.b32 [%0], %1;" :: "l"(done), "r"(turn + 1) : "memory");
    }

    // A tile: turned in shared memory, then whole lines.
    __device__ __forceinline__ void store(const float (&d)[2][64], const Tile &tile, u16 *y) const {
        if (!WEIGHTED) meet(which);  // the lines before are in memory
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 pairs[4];
#pragma unroll
                for (int q = 0; q < 4; q++) pairs[q] = rounded(d[half], (2 * j + q / 2) * 4 + q % 2 * 2);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                    :: "r"(matrices(half) + j * 2048), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
            }
        meet(which);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 lines[8];
#pragma unroll
            for (int j = 0; j < 8; j++) lines[j] = *line(half, j);
            u16 *to = y + element(tile, half);
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (inside(tile, half, j)) __stcs((uint4 *)(to + (i64)16 * j * in.N), lines[j]);
        }
        if (!WEIGHTED) return;
        show();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&at.left[which]);
    }

    // Two outputs of a column, d[i] and d[i + 1], in neighbouring rows.
    __device__ __forceinline__ u32 rounded(const float (&d)[64], int i) const {
        float low = d[i], high = d[i + 1];
        if (WEIGHTED) {
            const float2 weight = *(const float2 *)&at.weights[which][i / 4 * 8 + threadIdx.x % 4 * 2];
            low *= weight.x, high *= weight.y;  // fl: the routing weight in FP32
        }
        u32 pair = pack(low, high);
        if (low != low) pair = pair & 0xffff0000 | 0x7fc0;  // a gradient's NaN
        if (high != high) pair = pair & 0xffff | 0x7fc00000;
        return pair;
    }
};

__device__ __forceinline__ void consume(
        Shared &at, const Sizes &in, const float *weights, const i64 *order, const Dots &dots, u16 *y) {
    const int thread = threadIdx.x % 128, steps = (in.K + DEPTH - 1) / DEPTH, pairs = gridDim.x / 2;
    Group group{at, in, dots, __shfl_sync(~0u, (int)threadIdx.x / 128, 0)};
    int turn = 0;
    const int pair = __shfl_sync(~0u, pair_of(at), 0);  // so the compiler sees that a warp stays together
    for (int t = pair + group.which * pairs; t < count(in); t += 2 * pairs, turn++) {
        const Tile tile = place(in, t);
        const int rows = tile.end - tile.first;
        // Behind a barrier that everyone has passed since the last tile's were read.
        if (WEIGHTED) at.weights[group.which][thread] = thread < rows ? weights[order[tile.first + thread]] : 0;
        float d[2][64];
        group.chain(d, rows, (2 * turn + group.which) * steps, turn);
        if (WEIGHTED) group.add(d, tile, turn);
        group.store(d, tile, y);
    }
}

#if WEIGHTED
// Program (tile of rows, 8 rows of 16), a warp: the halving tree over each row's lanes -> out[order[row]].
extern "C" __global__ void lane_trees(const int *schedule, int tiles, const float4 *lanes, const i64 *order, float *out) {
    const int i = blockIdx.x / 4, eight = blockIdx.x % 4 * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= schedule[CELLS * tiles]) return;
    const int first = schedule[CELLS * i + 1] + eight * 8, end = schedule[CELLS * i + 2];
    if (first >= end) return;
    float4 sums[8];  // lanes 16w and on, for each w
#pragma unroll
    for (int w = 0; w < 8; w++) sums[w] = lanes[((i * 2 + w / 4) * 16 + eight) * 128 + w % 4 * 32 + lane];
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
        for (int w = 0; w < n; w++) {
            float4 &a = sums[w], &b = sums[w + n];
            a = float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        }
    float2 sum = {sums[0].x + sums[0].z, sums[0].y + sums[0].w};
#pragma unroll
    for (int n = 16; n >= 4; n /= 2) sum.x += __shfl_xor_sync(~0u, sum.x, n), sum.y += __shfl_xor_sync(~0u, sum.y, n);
    const int row = first + 2 * lane;
    if (lane < 4 && row < end) out[order[row]] = sum.x;
    if (lane < 4 && row + 1 < end) out[order[row + 1]] = sum.y;
}
#endif

// All BF16 but FP32 weights; schedule: schedule.py. WEIGHTED: y times weights[order[row]]; the pairs of the grid are a
// multiple of those that a row of y needs, so that each keeps its columns. done: zeros, [2 * tiles + 1].
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) pair_product(
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap other,
        u16 *y, const int *schedule, const float *weights, const i64 *order, float4 *lanes, int *done, int tiles, int N,
        int K) {
    extern __shared__ __align__(1024) char memory[];
    Shared &at = *(Shared *)memory;
    const Sizes in{schedule, schedule[CELLS * tiles], N, K};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) init(&at.full[i], 1), init(&at.empty[i], 8);
        init(&at.turns[0], 4), init(&at.turns[1], 4);
        init(&at.came[0], 1), init(&at.came[1], 1), init(&at.left[0], 4), init(&at.left[1], 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (WEIGHTED && rank() == 0) at.pair = atomicAdd(done + 2 * tiles, 1);
    }
    meet_pair();
    if (threadIdx.x < 256) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(at, in, weights, order, {lanes, done}, y);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 256) produce(at, in, &x, &w);
        if (WEIGHTED && threadIdx.x == 288) fetch(at, in, &other);
    }
    __syncwarp();
    meet_pair();  // no block ends while the other writes into it
}
