// What attention_cluster.cu and attention_warp.cu share: 16 rows, (token, query head) pairs of a key/value head, against tiles
// of keys by products of one warp.
//
// A warp keeps a tile's scores and weights as the tensor core's accumulator lies: lane 4g + t holds rows g and g + 8,
// columns 8j + 2t and 8j + 2t + 1, which is what the spec's quad sum is made of, and the weights lie as the next product
// wants them.

#include "cluster.cuh"

#define ROW (2 * WIDTH)        // bytes of a key or value
#define CHUNKS (WIDTH / 8)     // of 16 bytes
#define START -1e30f
#define EVICT_LAST 0x14F0000000000000
#define EVICT_NORMAL 0x1000000000000000
#define KEPT (40 << 20)  // bytes of segments' sums at most that the L2 cache is asked to keep, of its 50 MB
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

// Piece i, whose keys are not counted yet.
__device__ __forceinline__ Item locate(const Inputs &in, int i) {
    const int sequence = i / in.kv_heads() % in.sequences;
    Item item;
    item.head = i % in.kv_heads(), item.segment = i / in.kv_heads() / in.sequences;
    item.first = in.bounds ? in.bounds[sequence] : sequence, item.end = in.bounds ? in.bounds[sequence + 1] : sequence + 1;
    item.rows = in.key_rows + (i64)sequence * in.max_keys + item.segment * SEGMENT;
    return item;
}

// Whether it has keys.
__device__ __forceinline__ bool count(const Inputs &in, Item &item) {
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
    __device__ __forceinline__ void shrink(float (&acc)[4 * N], const float (&top)[HALVES], const float (&sum)[HALVES]) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const float most = fmaxf(m[h], top[h]), factor = exp2_hw(m[h] - most);
            m[h] = most, l[h] = l[h] * factor + sum[h];
#pragma unroll
            for (int j = 2 * h; j < 4 * N; j += 4) acc[j] *= factor, acc[j + 1] *= factor;
        }
    }
};

__device__ __forceinline__ void store_for(u64 policy, float *at, float a, float b) {
    asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" :: "l"(at), "f"(a), "f"(b), "l"(policy) : "memory");
}

// 8 * N columns of the result from `column` on; m and l where `lead`.
template <int N>
__device__ __forceinline__ void store(const Inputs &in, const Item &item, const Rows &rows, const float *acc,
        const Running &run, int column, bool lead, int lane) {
    // The fold wants them and gives them up.
    const u64 policy = (i64)in.segments * in.lines * WIDTH * 4 <= KEPT ? EVICT_LAST : EVICT_NORMAL;
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
                store_for(policy, in.acc + at + 8 * j, a, b);
                continue;
            }
            *(u32 *)(in.o + at + 8 * j) = quotients(a, b, run.l[h]);
        }
    }
}
