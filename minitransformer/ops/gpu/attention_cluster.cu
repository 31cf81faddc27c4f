// attention/2 for few queries and few keys (ops/attention.py has the spec): a cluster of blocks shares a piece of work, that is
// 16 rows, (token, query head) pairs of a key/value head, and one segment of keys. Each block makes the scores of its tiles of
// keys and hands the weights to all; then each has its columns of the values. All copies are on their way from the start.
//
// A warp keeps a tile's scores and weights as the tensor core's accumulator lies: lane 4g + t holds rows g and g + 8,
// columns 8j + 2t and 8j + 2t + 1, which is what the spec's quad sum is made of, and the weights lie as the next product
// wants them.
//
// Compiled with: GROUP (query heads a key/value head), WIDTH (head size, 64 or 128), KEYS (64) a tile, SEGMENT (1024) keys,
// ROWS (8 or 16, those that are there), CLUSTER (blocks that share a piece), SHARED (bytes).

#include "cluster.cuh"

#define TILES (SEGMENT / KEYS)
#define ROW (2 * WIDTH)        // bytes of a key or value
#define CHUNKS (WIDTH / 8)     // of 16 bytes
#define START -1e30f
#define HALVES (ROWS / 8)      // of the accumulator: rows g, rows g + 8

// q, o [tokens, heads, WIDTH], k, v [rows, key/value heads, WIDTH] BF16; positions int64 [tokens]; key_rows int64
// [sequences, max_keys]; bounds int32 [sequences + 1], or null if every sequence has one token. m, l FP32 [lines], lines:
// tokens * heads. If acc is not null, instead of o, of each of `segments` segments: m, l and acc FP32 [segments, lines, WIDTH].
struct Inputs {
    const u16 *q, *k, *v;
    const i64 *positions, *key_rows;
    const int *bounds;
    u16 *o;
    float *m, *l, *acc, scale;
    int heads, max_keys, lines, sequences, segments;

    __device__ __forceinline__ int kv_heads() const { return heads / GROUP; }
    __device__ __forceinline__ int items() const { return kv_heads() * sequences * segments; }
};

// A piece of work: the tokens first .. end - 1 of a sequence, a key/value head, `count` keys of a segment and their rows.
struct Item { int first, end, head, segment, count; const i64 *rows; };

// Whether piece i has keys.
__device__ __forceinline__ bool find(const Inputs &in, int i, Item &item) {
    const int sequence = i / in.kv_heads() % in.sequences;
    item.head = i % in.kv_heads(), item.segment = i / in.kv_heads() / in.sequences;
    item.first = in.bounds ? in.bounds[sequence] : sequence, item.end = in.bounds ? in.bounds[sequence + 1] : sequence + 1;
    item.rows = in.key_rows + (i64)sequence * in.max_keys + item.segment * SEGMENT;
    item.count = min((int)in.positions[item.end - 1] + 1 - item.segment * SEGMENT, SEGMENT);
    return item.segment == 0 || item.count > 0;  // so of the first segment nobody waits for the position here
}

// Where byte 16 * chunk of a key or value lies in a tile: eight neighbouring rows' chunks fill the 32 banks.
__device__ __forceinline__ u32 place(int key, int chunk) { return key * ROW + ((chunk ^ (key & 7)) << 4); }

// What a lane of a warp knows of its rows.
struct Rows {
    u32 q[WIDTH / 4];
    int position[HALVES];  // in the segment

    __device__ __forceinline__ void load(const Inputs &in, const Item &item, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = lane / 4 + 8 * h, token = min(item.first + r / GROUP, item.end - 1);  // spare rows repeat a token
            const u16 *from = in.q + ((i64)token * in.heads + item.head * GROUP + r % GROUP) * WIDTH + lane % 4 * 2;
            if (h < HALVES) position[h] = (int)load_early(in.positions + token) - item.segment * SEGMENT;
#pragma unroll
            for (int i = 0; i < WIDTH / 8; i++) q[2 * i + h] = h < HALVES ? load_early(from + 8 * i) : 0;
        }
    }

    // Scores of 8 * N keys of a tile at `keys`, raw.
    template <int N>
    __device__ __forceinline__ void score(float *s, u32 keys, int lane) const {
#pragma unroll
        for (int j = 0; j < 4 * N; j++) s[j] = 0;
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i += 2)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const uint4 b = load_blocks(keys + place(8 * j + lane % 8, 2 * i + lane / 8));
                mma(s + 4 * j, q + 4 * i, b.x, b.y);
                mma(s + 4 * j, q + 4 * i + 4, b.z, b.w);
            }
    }

    // Raw scores of a tile that begins `before` keys after the segment -> scaled and masked; the largest of each row.
    __device__ __forceinline__ void mask(float (&s)[32], float (&top)[HALVES], int before, float scale, int lane) const {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            top[h] = -__int_as_float(0x7f800000);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float &one = s[i / 2 * 4 + 2 * h + i % 2];
                one = before + i / 2 * 8 + lane % 4 * 2 + i % 2 <= position[h] ? one * scale : -__int_as_float(0x7f800000);
                top[h] = fmaxf(top[h], one);
            }
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
        }
    }
};

// Scores -> weights, their quad sums, and the weights as the next product's operand.
__device__ __forceinline__ void weigh(float (&s)[32], const float (&m)[HALVES], float (&sum)[HALVES], u32 (&p)[16]) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        sum[h] = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float &one = s[i / 2 * 4 + 2 * h + i % 2];
            one = exp2_hw(one - m[h]);
            sum[h] += one;
        }
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = i % 2 < HALVES ? pack(s[2 * i], s[2 * i + 1]) : 0;
}

// A row's numbers after a tile whose largest score is `top` and whose weights' sum is `sum`.
struct Running {
    float m[HALVES], l[HALVES];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int h = 0; h < HALVES; h++) m[h] = START, l[h] = 0;
    }

    // acc of 8 * N columns follows.
    template <int N>
    __device__ __forceinline__ void shrink(float (&acc)[4 * N], const float *top, const float *sum, int row) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const float most = fmaxf(m[h], top[row + 8 * h]), factor = exp2_hw(m[h] - most);
            m[h] = most, l[h] = l[h] * factor + sum[row + 8 * h];
#pragma unroll
            for (int j = 2 * h; j < 4 * N; j += 4) acc[j] *= factor, acc[j + 1] *= factor;
        }
    }
};

// 8 * N columns of the result from `column` on; m and l where `lead`.
template <int N>
__device__ __forceinline__ void store(const Inputs &in, const Item &item, const Rows &rows, const float *acc,
        const Running &run, int column, bool lead, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const int r = lane / 4 + 8 * h, token = item.first + r / GROUP;
        if (token >= item.end || r >= 16 / GROUP * GROUP || rows.position[h] < 0) continue;
        i64 line = (i64)token * in.heads + item.head * GROUP + r % GROUP;
        if (in.acc) line += (i64)item.segment * in.lines;
        if (lead && lane % 4 == 0) in.m[line] = run.m[h], in.l[line] = run.l[h];
        const i64 at = line * WIDTH + column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = acc[4 * j + 2 * h], b = acc[4 * j + 2 * h + 1];
            if (in.acc) {
                *(float2 *)(in.acc + at + 8 * j) = make_float2(a, b);
                continue;
            }
            const float x = __fdiv_rn(a, run.l[h]), y = __fdiv_rn(b, run.l[h]);
            u32 pair = pack(x, y);
            if (x != x) pair = pair & 0xffff0000 | 0x7fc0;
            if (y != y) pair = pair & 0xffff | 0x7fc00000;
            *(u32 *)(in.o + at + 8 * j) = pair;
        }
    }
}

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
        run.shrink<1>(acc, at.top[t], at.sum[t], lane / 4);
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
        Item item;
        if (!find(in, i, item)) continue;
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
