// attention/2 for few queries and few keys (ops/attention.py has the spec): a cluster of blocks shares a piece of work, that is
// 16 rows, (token, query head) pairs of a key/value head, and one segment of keys. Each block makes the scores of its tiles of
// keys and hands the weights to all; then each has its columns of the values. All copies are on their way from the start.
//
// Compiled with: GROUP (query heads a key/value head), WIDTH (head size, 64 or 128), KEYS (64) a tile, SEGMENT (1024) keys,
// ROWS (8 or 16, those that are there), CLUSTER (blocks that share a piece), SHARED (bytes).

#include "attention_few.cuh"

#define TILES (SEGMENT / KEYS)
#define OWN (TILES / CLUSTER)           // tiles of a block, one a warp
#define COLUMNS (WIDTH / CLUSTER)       // of the values
#define PARTS (COLUMNS / 8)             // of 16 bytes, one a warp
#define THREADS 128

struct Together {
    char keys[OWN * KEYS * ROW];  // then the weights of all tiles: [tile][two steps or one][lane] of 16 bytes
    char values[PARTS][SEGMENT][16];
    float top[TILES][16], sum[TILES][16];  // of each tile and row
    u64 tops_came, weights_came;
};
static_assert(sizeof(Together) == SHARED, "attention_cluster.py counts other bytes");
static_assert(OWN * KEYS * ROW >= TILES * 4 * 32 * 8 * HALVES, "the weights do not fit where the keys were");

// Starts the copies of this block's keys and of its columns of all values.
__device__ __forceinline__ void fetch(const Inputs &in, const Item &item, Together &at, int rank, int tiles) {
    constexpr int KEY_COPIES = OWN * KEYS * CHUNKS / THREADS, VALUE_COPIES = SEGMENT * PARTS / THREADS;
    const int chunk = threadIdx.x % CHUNKS, key0 = threadIdx.x / CHUNKS;
    const int part = threadIdx.x % PARTS, value0 = threadIdx.x / PARTS;
    const int inside = in.max_keys - item.segment * SEGMENT;  // of the table
    u32 key_row[KEY_COPIES], value_row[VALUE_COPIES];
#pragma unroll
    for (int x = 0; x < KEY_COPIES; x++) {
        const int key = rank * OWN * KEYS + key0 + x * (THREADS / CHUNKS);
        key_row[x] = load_early(item.rows + (key < inside ? key : 0));
    }
#pragma unroll
    for (int x = 0; x < VALUE_COPIES; x++) {
        const int key = value0 + x * (THREADS / PARTS);
        value_row[x] = load_early(item.rows + (key < inside ? key : 0));
    }
    const u32 stride = in.kv_heads() * CHUNKS;
    const char *k = (const char *)(in.k + item.head * WIDTH + chunk * 8);
    const char *v = (const char *)(in.v + item.head * WIDTH + rank * COLUMNS + part * 8);
#pragma unroll
    for (int x = 0; x < KEY_COPIES; x++) {
        const int here = key0 + x * (THREADS / CHUNKS), key = rank * OWN * KEYS + here;
        if (key < tiles * KEYS)
            copy16(address(at.keys) + place(here, chunk), k + (u64)(key < item.count ? key_row[x] * stride : 0) * 16,
                key < item.count);
    }
    commit();
#pragma unroll
    for (int x = 0; x < VALUE_COPIES; x++) {
        const int key = value0 + x * (THREADS / PARTS);
        if (key < tiles * KEYS)
            copy16(address(at.values[part][key]), v + (u64)(key < item.count ? value_row[x] * stride : 0) * 16,
                key < item.count);
    }
    commit();
}

// A tile's largest scores, then its weights and their sums, to every block; the maximum of the tiles before in between.
__device__ __forceinline__ void hand_out(Together &at, float (&s)[32], float (&top)[HALVES], int tile, int phase, int lane) {
    const int row = lane / 4;
    float sum[HALVES];
    u32 p[16];
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int x = 0; x < CLUSTER; x += 4)
            give(there(&at.top[tile][row + 8 * h], x + lane % 4), top[h], there(&at.tops_came, x + lane % 4));
    wait(&at.tops_came, phase);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        top[h] = START;
#pragma unroll
        for (int t = 0; t < TILES; t++)
            if (t <= tile) top[h] = fmaxf(top[h], at.top[t][row + 8 * h]);
    }
    weigh(s, top, sum, p);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int x = 0; x < CLUSTER; x += 4)
            give(there(&at.sum[tile][row + 8 * h], x + lane % 4), sum[h], there(&at.weights_came, x + lane % 4));
#pragma unroll
    for (int to = 0; to < CLUSTER; to++) {
        const u32 keys = there(at.keys, to) + (tile * 64 * HALVES + lane) * 16, barrier = there(&at.weights_came, to);
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            const u32 *two = p + 8 * i, *one = p + 4 * i;
            if (HALVES == 1) give(keys + i * 512, two[0], two[2], two[4], two[6], barrier);
            else give(keys + i * 512, one[0], one[1], one[2], one[3], barrier);
        }
    }
}

// The weights times 8 columns of the values.
__device__ __forceinline__ void columns(const Together &at, Running &run, float (&acc)[4], int warp, int tiles, int lane) {
#pragma unroll 4
    for (int t = 0; t < tiles; t++) {
        float top[HALVES], sum[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; h++) top[h] = at.top[t][lane / 4 + 8 * h], sum[h] = at.sum[t][lane / 4 + 8 * h];
        run.shrink<1>(acc, top, sum);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint4 b = load_turned(address(at.values[warp][t * KEYS + i * 16 + lane]));
            const uint4 *from = (const uint4 *)at.keys + (t * 2 + i / 2) * 32 * HALVES + lane;
            uint4 p = from[0], p1;
            if (HALVES == 1) p1 = make_uint4(p.z, 0, p.w, 0), p = make_uint4(p.x, 0, p.y, 0);
            else p1 = from[32];
            mma(acc, &p.x, b.x, b.y);
            mma(acc, &p1.x, b.z, b.w);
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) together(const u16 *q,
        const u16 *k, const u16 *v, const i64 *positions, const i64 *key_rows, const int *bounds, u16 *o, float *m_out,
        float *l_out, float *acc_out, float scale, int heads, int max_keys, int lines, int sequences, int segments) {
    extern __shared__ __align__(1024) char memory[];
    const Inputs in{q, k, v, positions, key_rows, bounds, o, m_out, l_out, acc_out, scale, heads, max_keys, lines, sequences,
        segments};
    Together &at = *(Together *)memory;
    const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so the compiler sees that a warp stays together
    if (threadIdx.x == 0) {
        init(&at.tops_came), init(&at.weights_came);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    begun();
    in_turn();
    int phase = 0;
    for (int i = blockIdx.x / CLUSTER; i < in.items(); i += gridDim.x / CLUSTER) {
        Item item = locate(in, i);
        if (!count(in, item)) continue;
        const int tile = rank * OWN + warp, tiles = (item.count + KEYS - 1) / KEYS;
        Rows rows;
        Running run;
        float s[32], top[HALVES], acc[4] = {0, 0, 0, 0};
        rows.load(in, item, lane);
        fetch(in, item, at, rank, tiles);
        if (threadIdx.x == 0)
            expect(&at.tops_came, tiles * 32 * HALVES), expect(&at.weights_came, tiles * (32 + 4 * 32 * 8) * HALVES);
        const bool mine = warp < OWN && tile < tiles;
        finish<1>();
        __syncthreads();
        if (mine) {
            rows.score<8>(s, address(at.keys) + warp * KEYS * ROW, lane);
            rows.mask(s, top, tile * KEYS, in.scale, lane);
        }
        all_there();  // every block may be written to
        if (mine) hand_out(at, s, top, tile, phase, lane);
        finish<0>();
        __syncthreads();
        if (warp < PARTS) {
            wait(&at.tops_came, phase);
            wait(&at.weights_came, phase);
            run.start();
            columns(at, run, acc, warp, tiles, lane);
            store<1>(in, item, rows, acc, run, rank * COLUMNS + warp * 8, rank == 0 && warp == 0, lane);
        }
        __syncthreads();
        done_reading();
        phase ^= 1;
    }
    all_there();
}
