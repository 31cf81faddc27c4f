// attention/2 for few queries and many keys (ops/attention.py has the spec): a block is one warp and takes one piece of work,
// that is 16 rows, (token, query head) pairs of a key/value head, and one segment of keys. Its copies run ahead by half tiles:
// the keys' two, then the values'. Keys and values leave the L2 cache first, so that the segments' sums are still there when
// attention_fold.cu wants them.
//
// Compiled with: GROUP (query heads a key/value head), WIDTH (head size, 64 or 128), KEYS (64) a tile, SEGMENT (1024) keys,
// ROWS (8 or 16, those that are there), SLOTS (half tiles in shared memory), EARLY (half tiles of keys, and of values, that
// come to the L2 cache early).

#include "attention_few.cuh"

#define HALF (KEYS / 2)
#define EVICT_FIRST 0x12F0000000000000

// 16 bytes that nobody will read again; zeros if not valid.
__device__ __forceinline__ void copy_once(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
        :: "r"(to), "l"(from), "r"(valid ? 16 : 0), "l"(EVICT_FIRST) : "memory");
}

__device__ __forceinline__ void to_l2(const char *at) {
#pragma unroll
    for (int b = 0; b < ROW; b += 128) asm volatile("prefetch.global.L2 [%0];" :: "l"(at + b) : "memory");
}

// The row of key j, of keys that lie together by rest + 1, a power of two: one number is read for them all.
__device__ __forceinline__ u32 row_of(const i64 *rows, int j, int rest) { return load_early(rows + (j & ~rest)) + (j & rest); }

// Before in_turn: what piece i begins with comes to the L2 cache while the kernels in front still run. What those change is
// read again later, so the numbers here are not kept, and a row that is none is left out.
__device__ __forceinline__ void fetch(const Inputs &in, int i, int store_rows, int rest, int lane) {
    const int sequence = i / in.kv_heads() % in.sequences, segment = i / in.kv_heads() / in.sequences;
    const int last = in.bounds ? (int)load_early(in.bounds + sequence + 1) - 1 : sequence;
    const int inside = in.max_keys - segment * SEGMENT;
    const int count = (int)load_early(in.positions + last) + 1 - segment * SEGMENT;
    const i64 *rows = in.key_rows + (i64)sequence * in.max_keys + segment * SEGMENT;
    u32 row[EARLY];
#pragma unroll
    for (int h = 0; h < EARLY; h++) row[h] = h * HALF + lane < inside ? row_of(rows, h * HALF + lane, rest) : ~0u;
#pragma unroll
    for (int h = 0; h < EARLY; h++) {
        if (h * HALF + lane >= count || row[h] >= store_rows) continue;
        const i64 at = ((i64)row[h] * in.kv_heads() + i % in.kv_heads()) * ROW;
        to_l2((const char *)in.k + at), to_l2((const char *)in.v + at);
    }
}

struct Copies {
    const Inputs &in;
    const Item &item;
    u32 ring, slot;
    int lane, inside, rest, tile;  // keys of the segment in the table; the tile after the one that is copied
    u32 row[2], ahead[2];    // of both halves' keys, one a lane: where a key or value begins, in chunks; the next tile's rows

    // Asks for the numbers of the next tile's rows.
    __device__ __forceinline__ void look() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int j = tile * KEYS + h * HALF + lane;
            if (j < inside) ahead[h] = row_of(item.rows, j, rest);
        }
    }

    // Starts the copy number N, counted from a tile's first.
    template <int N>
    __device__ __forceinline__ void start() {
        constexpr int H = N % 2;
        if (N % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool valid = tile * KEYS + h * HALF + lane < item.count;
                row[h] = valid ? ahead[h] * in.kv_heads() * CHUNKS : 0;
            }
            tile++;
            look();
        }
        const int left = item.count - (tile - 1) * KEYS;
        if (left > 0) {
            const int mine = lane / CHUNKS, chunk = lane % CHUNKS, valid = left - H * HALF - mine;
            const char *from = (const char *)((N % 4 < 2 ? in.k : in.v) + (item.head * CHUNKS + chunk) * 8);
            const u32 to = ring + slot * (HALF * ROW) + mine * ROW;
#pragma unroll
            for (int x = 0; x < HALF; x += 32 / CHUNKS) {  // place(x + mine, chunk), with few instructions
                const u32 chunks = __shfl_sync(~0u, (int)row[H], x + mine);
                copy_once(to + x * ROW + ((chunk ^ (x + mine & 7)) << 4), from + (u64)chunks * 16, x < valid);
            }
        }
        commit();
        slot = slot == SLOTS - 1 ? 0 : slot + 1;
    }

    template <int N>
    __device__ __forceinline__ void begin() {
        if constexpr (N > 0) begin<N - 1>();
        start<N>();
    }
};

// 32 keys' weights times their values.
__device__ __forceinline__ void product(float (&acc)[WIDTH / 2], const u32 *p, u32 values, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 2) {
            const uint4 b = load_turned(values + place(16 * i + lane % 16, j + lane / 16));
            mma(acc + 4 * j, p + 4 * i, b.x, b.y);
            mma(acc + 4 * j + 4, p + 4 * i, b.z, b.w);
        }
}

// The first `fetching` blocks begin before the kernel in front has ended.
extern "C" __global__ void __launch_bounds__(32, 1) alone(const u16 *q, const u16 *k, const u16 *v, const i64 *positions,
        const i64 *key_rows, const int *bounds, u16 *o, float *m_out, float *l_out, float *acc_out, float scale, int heads,
        int max_keys, int lines, int sequences, int segments, int store_rows, int rest, int fetching) {
    extern __shared__ __align__(1024) char memory[];
    const Inputs in{q, k, v, positions, key_rows, bounds, o, m_out, l_out, acc_out, scale, heads, max_keys, lines, sequences,
        segments};
    const int lane = threadIdx.x;
    if (blockIdx.x < fetching) fetch(in, blockIdx.x, store_rows, rest, lane);
    in_turn();
    Item item = locate(in, blockIdx.x);
    Copies copies{in, item, address(memory), 0, lane, max_keys - item.segment * SEGMENT, rest, 0};
    copies.look();
    if (!count(in, item)) return;
    copies.begin<SLOTS - 2>();
    u32 slot = 0;
    const auto arrived = [&] {  // the half tile that is read next; the one before is free
        finish<SLOTS - 2>();
        __syncwarp();
        const u32 here = address(memory) + slot * (HALF * ROW);
        slot = slot == SLOTS - 1 ? 0 : slot + 1;
        return here;
    };
    Rows rows;
    Running run;
    float acc[WIDTH / 2];
    rows.load(in, item, lane);
    run.start();
#pragma unroll
    for (int j = 0; j < WIDTH / 2; j++) acc[j] = 0;
#pragma unroll 1
    for (int before = 0; before < item.count; before += KEYS) {
        float s[32], top[HALVES], m[HALVES], sum[HALVES];
        u32 p[16], here = arrived();
        copies.start<SLOTS - 1>();
        rows.score<4>(s, here, lane);
        here = arrived();
        copies.start<SLOTS>();
        rows.score<4>(s + 16, here, lane);
        rows.mask(s, top, before, in.scale, lane);
#pragma unroll
        for (int h = 0; h < HALVES; h++) m[h] = fmaxf(run.m[h], top[h]);
        weigh(s, m, sum, p);
        run.shrink<CHUNKS>(acc, top, sum);
        here = arrived();
        copies.start<SLOTS + 1>();
        product(acc, p, here, lane);
        here = arrived();
        copies.start<SLOTS + 2>();
        product(acc, p + 8, here, lane);
    }
    store<CHUNKS>(in, item, rows, acc, run, 0, true, lane);
}
