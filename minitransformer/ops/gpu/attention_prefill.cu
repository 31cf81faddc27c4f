// attention/2 for many queries on Hopper (ops/attention.py has the spec): persistent blocks of one warp that loads tiles
// of 64 keys by the copy engine, and two groups of four warps that own 64 rows each, (token, query head) pairs.
//
// A group's products are asked for ahead: while it does the softmax of tile t, the P V product of tile t - 1 and the
// scores of tile t + 1 are under way, and over the end of a piece of work the next one's first scores. Scores, weights and
// output stay in registers, in the layout of the tensor core's accumulator: lane 4g + t of a warp holds rows g and g + 8,
// columns 8j + 2t and 8j + 2t + 1, which is what the spec's quad sum is made of.
//
// Compiled with: GROUP (query heads a key/value head), WIDTH (head size, 64 or 128), EARLY (of attention.Prefill), KEYS (64) a tile, SEGMENT (16) tiles, STAGES (4) tiles that may wait, SHARED (bytes).

#include "hopper.cuh"

#define TOKENS (64 / GROUP)  // of a group of warps
#define TILE (KEYS * WIDTH * 2)  // bytes
#define OUT (WIDTH / 2)  // a thread's elements of the output

struct Inputs {
    const u16 *q;
    const i64 *positions;
    const int *bounds, *starts;
    int heads, pairs, blocks;
};

// A piece of work: 2 * TOKENS tokens from `first` of a sequence and a key/value head. shift: position minus token;
// row0: row of key 0. No tiles: there is no more work.
struct Item { int first, end, head, row0, shift, tiles; };

struct Shared {
    char k[STAGES][TILE], v[STAGES][TILE];  // 64 columns (128 bytes, swizzled) x 64 keys, then the next 64 columns
    float kept[2][OUT][128];  // of each thread: o of the segments before
    Item items[2];
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED, "attention_prefill.py counts other bytes");

// The program's work number `wave` or, where a sequence is shorter, the next: forward and back over the programs, the late
// tokens, which have the most keys, first.
__device__ __forceinline__ bool find(const Inputs &in, int &wave, Item &item) {
    for (;; wave++) {
        int i = wave * gridDim.x + (wave % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (i >= in.pairs * in.blocks) return false;
        int kv_heads = in.heads / GROUP, pair = i % in.pairs, sequence = pair / kv_heads;
        int first = in.bounds[sequence] + (in.blocks - 1 - i / in.pairs) * 2 * TOKENS, end = in.bounds[sequence + 1];
        if (first >= end) continue;
        int shift = (int)in.positions[first] - first, last = min(first + 2 * TOKENS, end) - 1 + shift;
        // Two tiles at least: one that is masked whole changes nothing, and the pipeline has no case for one alone.
        item = {first, end, pair % kv_heads, in.starts[sequence], shift, max(last / KEYS + 1, 2)};
        return true;
    }
}

__device__ __forceinline__ void produce(Shared &at, const Inputs &in, const TensorMap *k, const TensorMap *v) {
    Item item{0, 1, 0, 0, 0, 0};
    for (int n = 0, wave = 0, count = 0;; wave++, count++) {
        if (!find(in, wave, item)) item.tiles = 0;
        // The item before the last was read before the tiles were given back that this one's first tile needs.
        for (int t = 0; t < max(item.tiles, 1); t++, n++) {
            int slot = n % STAGES, row = item.row0 + t * KEYS, column = item.head * WIDTH;
            wait(&at.empty[slot], (n / STAGES & 1) ^ 1);
            if (t == 0) at.items[count % 2] = item;
            if (item.tiles == 0) return arrive(&at.full[slot]);
            expect(&at.full[slot], 2 * TILE);
#pragma unroll
            for (int c = 0; c < WIDTH; c += 64) load(at.k[slot] + c * 128, k, column + c, row, &at.full[slot]);
#pragma unroll
            for (int c = 0; c < WIDTH; c += 64) load(at.v[slot] + c * 128, v, column + c, row, &at.full[slot]);
        }
    }
}

// Tiles in shared memory for the tensor core: 128-byte swizzle, 8 rows every 1024 bytes, 64 columns every 8192. The first
// one's low half, and tile `slot` from `bytes` on.
__device__ __forceinline__ u32 describe(const char *tiles) { return address(tiles) >> 4 | 8192 >> 4 << 16; }

__device__ __forceinline__ u64 within(u32 tiles, u32 slot) {
    return (u64)(1024 >> 4 | 1 << 30) << 32 | (tiles + slot * (TILE >> 4));
}

__device__ __forceinline__ void scores(float (&s)[32], const u32 (&q)[WIDTH / 4], u32 keys, u32 slot) {
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) mma<0>(s, q + 4 * i, within(keys, slot) + (i / 4 * 8192 + i % 4 * 32 >> 4), i > 0);
}

__device__ __forceinline__ void product(float (&o)[OUT], const u32 (&p)[16], u32 values, u32 slot) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) mma<1>(o, p + 4 * i, within(values, slot) + (i * 2048 >> 4), 1);
}

// The new maximum m of a tile's raw scores s, and the factor of what was summed before. The largest score times scale is
// the largest of the scaled ones.
__device__ __forceinline__ void find_top(const float (&s)[32], float (&m)[2], float (&shrink)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most[8];
#pragma unroll
        for (int i = 0; i < 8; i++) most[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
        for (int n = 4; n > 0; n /= 2)
#pragma unroll
            for (int i = 0; i < n; i++) most[i] = fmaxf(most[i], most[i + n]);
        most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 1));
        most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 2));
        const float top = fmaxf(m[h], most[0] * scale);
        shrink[h] = exp2_hw(m[h] - top);
        m[h] = top;
    }
}

// Some of a tile's scores become weights, which are added up.
template <int FROM, int TO>
__device__ __forceinline__ void weigh(float (&s)[32], const float (&m)[2], float (&sum)[2], float scale) {
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        s[i] = exp2_hw(s[i] * scale - m[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}

// What a thread of a group keeps. n: tiles of the items before; whole: tiles that every row of the group sees in full; keys:
// of the sequence.
struct Group {
    Shared &at;
    const Inputs &in;
    float (*kept)[128];  // in shared memory, this thread's
    float scale;
    int which, row, column, count, n, tiles, whole, keys, position[2];
    u32 k, v, p[16];
    u32 q[WIDTH / 4];
    float o[OUT], m[2], l[2], m_all[2], l_all[2];  // of the segment, of those before it

    __device__ __forceinline__ u32 slot(int t) const { return (u32)(n + t) % STAGES; }

    __device__ __forceinline__ void arrived(int t) const { wait(&at.full[slot(t)], (u32)(n + t) / STAGES & 1); }
    __device__ __forceinline__ bool is_there(int t) const { return passed(&at.full[slot(t)], (u32)(n + t) / STAGES & 1); }

    __device__ __forceinline__ void release(int t) const {
        if (threadIdx.x % 32 == 0) arrive(&at.empty[slot(t)]);
    }

    // Starts loading the queries of the item whose first tile is tile t.
    __device__ __forceinline__ void ahead(Item &item, int t) {
        arrived(t);
        item = at.items[count % 2];
        // Spare rows repeat the last token and are not stored.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u16 *from = row_of(item, row + 8 * h) + column;
#pragma unroll
            for (int i = 0; i < WIDTH / 8; i++) q[2 * i + h] = load_early(from + 8 * i);
        }
    }

    __device__ __forceinline__ const u16 *row_of(const Item &item, int r) const {
        const int token = min(item.first + which * TOKENS + r / GROUP, item.end - 1);
        return in.q + ((i64)token * in.heads + item.head * GROUP + r % GROUP) * WIDTH;
    }

    // Values past the sequence's end are another's or what lay there: NaN times a weight of 0 would be NaN.
    __device__ __forceinline__ void clear(int t) {
        const int thread = threadIdx.x % 128;
#pragma unroll 1
        for (int r = max(keys - t * KEYS, 0) + thread / 8; r < KEYS; r += 16)
#pragma unroll
            for (int c = 0; c < WIDTH; c += 64)
                *(uint4 *)(at.v[slot(t)] + c * 128 + r * 128 + thread % 8 * 16) = uint4{0, 0, 0, 0};
        show(), meet(which);
    }

    // m and l of a segment that ended go behind those before it; o follows, with these factors, when its last product is
    // there.
    __device__ __forceinline__ void fold(bool first, float (&old)[2], float (&now)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float m_old = first ? -1e30f : m_all[h], top = fmaxf(m_old, m[h]);
            old[h] = exp2_hw(m_old - top), now[h] = exp2_hw(m[h] - top);
            m_all[h] = top, l_all[h] = (first ? 0 : l_all[h]) * old[h] + l[h] * now[h];
        }
    }

    __device__ __forceinline__ void fold_o(bool first, const float (&old)[2], const float (&now)[2]) {
#pragma unroll
        for (int i = 0; i < OUT; i++) o[i] = (first ? 0 : kept[i][0]) * old[i / 2 % 2] + o[i] * now[i / 2 % 2];
    }

    // Tile t: its softmax (its scores were asked for into s) beside tile t - 1's product and, if MORE, the scores of tile
    // t + 1 into `next`; else beside the loads of the next item's queries.
    template <bool FIRST, bool MORE>
    __device__ __forceinline__ void step(float (&s)[32], float (&next)[32], int t, Item *item) {
        if (MORE) hold(next);
        hold(o);
        fence();
        if (!FIRST) product(o, p, v, slot(t - 1)), commit();
        if (MORE) scores(next, q, k, slot(t + 1)), commit();
        finish<!FIRST + MORE>();
        hold(s);
        if (!MORE) ahead(*item, t + 1);
        const bool there = !MORE || t + 2 >= tiles || is_there(t + 2);  // asked for early, the answer takes its time
        const bool fresh = t % SEGMENT == 0;
        float old[2], now[2];
        if (fresh || t >= whole) {
            if (fresh) {
                if (!FIRST) fold(t == SEGMENT, old, now);
                m[0] = m[1] = -1e30f, l[0] = l[1] = 0;
            }
            if ((t + 1) * KEYS > keys) clear(t);
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (t * KEYS + column + i / 4 * 8 + i % 2 > position[i / 2 % 2]) s[i] = -__int_as_float(0x7f800000);
        }
        float shrink[2], sum[2] = {0, 0};
        find_top(s, m, shrink, scale);
        weigh<0, EARLY>(s, m, sum, scale);
        hold(s), hold(shrink);
        if (!there) arrived(t + 2);
        finish<MORE>();
        hold(o);
        if (!FIRST) release(t - 1);
        if (fresh) {
            if (!FIRST) {
                fold_o(t == SEGMENT, old, now);
#pragma unroll
                for (int i = 0; i < OUT; i++) kept[i][0] = o[i];
            }
#pragma unroll
            for (int i = 0; i < OUT; i++) o[i] = 0;
        }
        // Through a shuffle, so that it is not done before the wait: here it fills the pauses between the other half's exp2.
        const float again[2] = {__shfl_sync(~0u, m[0], threadIdx.x % 32), __shfl_sync(~0u, m[1], threadIdx.x % 32)};
        weigh<EARLY, 32>(s, again, sum, scale);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            l[h] = l[h] * shrink[h] + sum[h];
        }
#pragma unroll
        for (int i = 0; i < 16; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < OUT; i++) o[i] *= shrink[i / 2 % 2];
    }

    __device__ __forceinline__ void last(float (&s)[32], Item &next) {
        step<false, false>(s, s, tiles - 1, &next);
        hold(o);
        fence();
        product(o, p, v, slot(tiles - 1)), commit();
        finish<0>();
        hold(o);
        release(tiles - 1);
        if (tiles > SEGMENT) {
            float old[2], now[2];
            fold(false, old, now);
            fold_o(false, old, now);
#pragma unroll
            for (int h = 0; h < 2; h++) m[h] = m_all[h], l[h] = l_all[h];
        }
    }

    // An item, whose first scores were asked for into s0 -> the next one.
    __device__ __forceinline__ Item attend(const Item &item, float (&s0)[32], float (&s1)[32]) {
        Item next;
        const int first = item.first + which * TOKENS;
        tiles = item.tiles, keys = item.end + item.shift, count++;
        whole = (first + item.shift + 1) / KEYS;
#pragma unroll
        for (int h = 0; h < 2; h++) position[h] = min(first + (row + 8 * h) / GROUP, item.end - 1) + item.shift;
        arrived(1);
        step<true, true>(s0, s1, 0, nullptr);
        int t = 1;
        for (; t + 2 < tiles; t += 2) {
            step<false, true>(s1, s0, t, nullptr);
            step<false, true>(s0, s1, t + 1, nullptr);
        }
        if (t + 1 < tiles) {
            step<false, true>(s1, s0, t, nullptr);
            last(s0, next);
        } else last(s1, next);
        n += tiles;
        return next;
    }

    __device__ __forceinline__ void store(const Item &item, u16 *o_out, float *m_out, float *l_out) {
        divide();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = row + 8 * h, token = item.first + which * TOKENS + r / GROUP;
            const bool valid = token < item.end && r < TOKENS * GROUP;
            const i64 line = (i64)token * in.heads + item.head * GROUP + r % GROUP;
            write(m_out + line, __float_as_uint(m[h]), valid && column == 0);
            write(l_out + line, __float_as_uint(l[h]), valid && column == 0);
#pragma unroll
            for (int i = 2 * h; i < OUT; i += 4) {
                u32 pair = pack(o[i], o[i + 1]);
                if (o[i] != o[i]) pair = pair & 0xffff0000 | 0x7fc0;
                if (o[i + 1] != o[i + 1]) pair = pair & 0xffff | 0x7fc00000;
                write(o_out + line * WIDTH + 2 * i - 4 * h + column, pair, valid);
            }
        }
    }

    // o / l, rounded to nearest. With 1 / l rounded so, two corrections of the quotient give that, if no residual leaves the
    // normal numbers; other values, zero among them, are left to the division that looks at each.
    __device__ __forceinline__ void divide() {
        const float inverse[2] = {__frcp_rn(l[0]), __frcp_rn(l[1])};
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < OUT; i++) most = max(most, 2 * __float_as_uint(o[i]) - (27u << 24));  // from 2^-100
#pragma unroll
        for (int h = 0; h < 2; h++) most = max(most, (l[h] >= 1 && l[h] < 0x1p64f) ? 0 : ~0u);
        const bool plain = __all_sync(~0u, most < (200u << 24));  // to 2^100
#pragma unroll
        for (int i = 0; i < OUT; i++) {
            const float d = l[i / 2 % 2], r = inverse[i / 2 % 2];
            float quotient = o[i] * r;
            quotient = __fmaf_rn(__fmaf_rn(-quotient, d, o[i]), r, quotient);
            quotient = __fmaf_rn(__fmaf_rn(-quotient, d, o[i]), r, quotient);
            o[i] = plain ? quotient : o[i];
        }
        if (plain) return;
#pragma unroll
        for (int i = 0; i < OUT; i++) kept[i][0] = o[i];
#pragma unroll 1
        for (int i = 0; i < OUT; i++) kept[i][0] = __fdiv_rn(kept[i][0], i & 2 ? l[1] : l[0]);
#pragma unroll
        for (int i = 0; i < OUT; i++) o[i] = kept[i][0];
    }
};

// k, v: [rows, columns] BF16; q, o [T, N, WIDTH] BF16, positions int64 [T], bounds int32 [S + 1], starts int32 [S], m, l [T, N] FP32.
extern "C" __global__ void __launch_bounds__(384, 1) prefill(const __grid_constant__ TensorMap k,
        const __grid_constant__ TensorMap v, const u16 *q, const i64 *positions, const int *bounds, const int *starts, u16 *o,
        float *m, float *l, float scale, int heads, int pairs, int blocks) {
    extern __shared__ __align__(1024) char memory[];
    Shared &at = *(Shared *)memory;
    Inputs in{q, positions, bounds, starts, heads, pairs, blocks};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) init(&at.full[i], 1), init(&at.empty[i], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int thread = threadIdx.x % 128, which = __shfl_sync(~0u, threadIdx.x / 128, 0);
        Group group{at, in, (float (*)[128])&at.kept[which][0][thread], scale, which};
        group.row = thread / 32 * 16 + thread % 32 / 4, group.column = thread % 4 * 2;
        group.k = describe(at.k[0]), group.v = describe(at.v[0]), group.count = group.n = 0;
        Item item, done{};  // nothing of an item without tokens is stored
        group.ahead(item, 0);
        while (item.tiles > 0) {
            float s0[32], s1[32];
            fence();
            scores(s0, group.q, group.k, group.slot(0)), commit();
            group.store(done, o, m, l);
            done = item;
            item = group.attend(item, s0, s1);
        }
        group.store(done, o, m, l);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) produce(at, in, &k, &v);
    }
}
