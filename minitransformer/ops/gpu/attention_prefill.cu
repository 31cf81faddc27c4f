// attention/2 for many queries on Hopper (ops/attention.py has the spec): persistent blocks of one warp that loads tiles of
// 64 keys by the copy engine (attention_work.cuh), and GROUPS groups of four warps that own 64 rows each, (token, query
// head) pairs.
//
// While a group does the softmax of tile t, its P V product of tile t - 1 and the other groups' products are under way; three
// groups, because the softmax of one is a chain that leaves most cycles to others. For their registers, the scores of tile
// t + 1 lie where those of tile t did, and queries in shared memory. Scores, weights and output stay in registers, in the layout
// of the tensor core's accumulator: lane 4g + t of a warp holds rows g and g + 8, columns 8j + 2t and 8j + 2t + 1, which is what
// the spec's quad sum is made of.
//
// Compiled with: GROUP (query heads a key/value head), WIDTH (head size, 64 or 128), GROUPS (of attention.Prefill), KEYS (64)
// a tile, SEGMENT (16) tiles, SLOTS (2) of tiles of keys, and of values, SHARED (bytes), BOX: keys that lie together, a multiple
// of 8 that divides KEYS.

#include "attention_work.cuh"

// Tiles in shared memory for the tensor core: 128-byte swizzle, 8 rows every 1024 bytes, 64 columns every 8192. The first
// one's low half, and tile `slot` from `bytes` on.
__device__ __forceinline__ u32 describe(const char *tiles) { return address(tiles) >> 4 | 8192 >> 4 << 16; }

__device__ __forceinline__ u64 within(u32 tiles, u32 slot, u32 bytes) {
    return (u64)(1024 >> 4 | 1 << 30) << 32 | (tiles + slot * (TILE >> 4) + (bytes >> 4));
}

__device__ __forceinline__ void scores(float (&s)[32], u32 q, u32 keys, u32 slot) {
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
        const u32 at = i / 4 * 8192 + i % 4 * 32;
        mma(s, within(q, 0, at), within(keys, slot, at), i > 0);
    }
}

__device__ __forceinline__ void product(float (&o)[OUT], const u32 (&p)[16], u32 values, u32 slot) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) mma(o, p + 4 * i, within(values, slot, i * 2048));
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

// A tile's scores become weights, which are added up.
__device__ __forceinline__ void weigh(float (&s)[32], const float (&m)[2], float (&sum)[2], float scale) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i] = exp2_hw(s[i] * scale - m[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}

// What a thread of a group keeps. n: tiles of the items before; whole: tiles that every row of the group sees in full; keys:
// of the sequence.
struct Group {
    Shared &at;
    const Inputs &in;
    float4 (*kept)[32];  // in shared memory, this thread's
    float scale;
    int which, row, column, count, n, tiles, whole, keys, position[2];
    u32 q, k, v, p[16];
    float o[OUT], m[2], l[2], m_all[2], l_all[2];  // of the segment, of those before it
    float shrink[2], sum[2];  // of the last tile: the factor of what was summed before, this thread's weights

    __device__ __forceinline__ u32 slot(int t) const { return (u32)(n + t) % SLOTS; }

    __device__ __forceinline__ void arrived(u64 *full, int t) const { wait(full + slot(t), (u32)(n + t) / SLOTS & 1); }

    __device__ __forceinline__ void release(u64 *empty, int t) const {
        if (threadIdx.x % 32 == 0) arrive(empty + slot(t));
    }

    __device__ __forceinline__ float &kept_one(int i) const { return (&kept[i / 4][0].x)[i % 4]; }

    // The thread of the group. The compiler may not know: it would keep too many addresses for the whole kernel.
    static __device__ __forceinline__ u32 here() {
        u32 thread = threadIdx.x % 128;
        asm volatile("" : "+r"(thread));
        return thread;
    }

    // The item whose first tile is tile t.
    __device__ __forceinline__ Item ahead(int t) const {
        arrived(at.full_k, t);
        return at.items[count % 2];
    }

    // The item's first scores.
    __device__ __forceinline__ void begin(float (&s)[32]) const {
        wait(&at.full_q, count % 2);
        fence(), scores(s, q, k, slot(0)), commit();
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

    template <bool KEEP>
    __device__ __forceinline__ void fold_o(bool first, const float (&old)[2], const float (&now)[2]) {
#pragma unroll
        for (int i = 0; i < OUT; i += 4) {
            const float4 before = first ? make_float4(0, 0, 0, 0) : kept[i / 4][0];
            o[i] = before.x * old[0] + o[i] * now[0], o[i + 1] = before.y * old[0] + o[i + 1] * now[0];
            o[i + 2] = before.z * old[1] + o[i + 2] * now[1], o[i + 3] = before.w * old[1] + o[i + 3] * now[1];
            if (KEEP) kept[i / 4][0] = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
        }
    }

    // The last tile's weights into l. In the next step: before it the assembler would put this, which waits, between products.
    __device__ __forceinline__ void add_up() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2), sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            l[h] = l[h] * shrink[h] + sum[h];
        }
    }

    // Tile t, whose scores are in s: their softmax, then the scores of tile t + 1 if MORE, in their place, and t's product.
    template <bool FIRST, bool MORE>
    __device__ __forceinline__ void step(float (&s)[32], int t, Item *item) {
        release(at.empty_k, t);
        if (!FIRST) add_up();
        if (!MORE) *item = ahead(t + 1);
        const bool fresh = t % SEGMENT == 0;
        int second = t == SEGMENT;
        asm volatile("" : "+r"(second));  // or the compiler makes two loops of one, and a slower one
        float old[2], now[2];
        if (fresh || t >= whole) {
            if (fresh) {
                if (!FIRST) fold(second, old, now);
                m[0] = m[1] = -1e30f, l[0] = l[1] = 0;
            }
            if ((t + 1) * KEYS > keys) arrived(at.full_v, t), clear(t);
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (t * KEYS + column + i / 4 * 8 + i % 2 > position[i / 2 % 2]) s[i] = -__int_as_float(0x7f800000);
        }
        find_top(s, m, shrink, scale);
        sum[0] = sum[1] = 0;
        weigh(s, m, sum, scale);
        hold(s), hold(shrink), hold(sum);
        if (MORE) arrived(at.full_k, t + 1);
        arrived(at.full_v, t);
        finish<0>(), hold(o);
        if (!FIRST) release(at.empty_v, t - 1);
        if (fresh) {
            if (!FIRST) fold_o<true>(second, old, now);
#pragma unroll
            for (int i = 0; i < OUT; i++) o[i] = 0;
            shrink[0] = shrink[1] = 1;  // of zeros
        }
#pragma unroll
        for (int i = 0; i < 16; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
        if (MORE) hold(s), fence(), scores(s, q, k, slot(t + 1)), commit();
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (__any_sync(~0u, shrink[h] != 1)) {  // a maximum of eight rows moved
#pragma unroll
                for (int i = 2 * h; i < OUT; i += 4) o[i] *= shrink[h], o[i + 1] *= shrink[h];
            }
        hold(o), fence(), product(o, p, v, slot(t)), commit();
        if (MORE) finish<1>(), hold(s);
    }

    // An item, whose first scores were asked for into s -> the next one.
    __device__ __forceinline__ Item attend(const Item &item, float (&s)[32]) {
        Item next;
        const int first = item.first + which * TOKENS;
        tiles = item.tiles, keys = item.end + item.shift, count++;
        whole = (first + item.shift + 1) / KEYS;
#pragma unroll
        for (int h = 0; h < 2; h++) position[h] = min(first + (row + 8 * h) / GROUP, item.end - 1) + item.shift;
        finish<0>(), hold(s);
        step<true, true>(s, 0, nullptr);
#pragma unroll 1
        for (int t = 1; t + 1 < tiles; t++) step<false, true>(s, t, nullptr);
        step<false, false>(s, tiles - 1, &next);
        add_up();
        finish<0>(), hold(o);
        release(at.empty_v, tiles - 1);
        if (tiles > SEGMENT) {
            float old[2], now[2];
            fold(false, old, now), fold_o<false>(false, old, now);
#pragma unroll
            for (int h = 0; h < 2; h++) m[h] = m_all[h], l[h] = l_all[h];
        }
        n += tiles;
        return next;
    }

    __device__ __forceinline__ void store(const Item &item, u16 *o_out, float *m_out, float *l_out) {
        const u32 lane = here() % 32, rows = max(min(item.end - item.first - which * TOKENS, TOKENS), 0) * GROUP;
        const i64 begin = (i64)(item.first + which * TOKENS) * in.heads + item.head * GROUP;
        const auto line = [&](u32 r) -> u64 { return r / GROUP * in.heads + r % GROUP; };  // from there
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 r = row + 8 * h;
            write(m_out + begin + line(r), __float_as_uint(m[h]), r < rows && column == 0);
            write(l_out + begin + line(r), __float_as_uint(l[h]), r < rows && column == 0);
        }
        char *mine = (char *)(kept[0] - lane);  // the warp's
        __syncwarp();  // nobody reads what is kept there
        if (!stage_quick(mine)) {
            __syncwarp();
            const bool plain = divide();
            __syncwarp();
            if (plain) stage<true>(mine); else stage<false>(mine);
        }
        __syncwarp();
        constexpr int ACROSS = WIDTH / 8;  // threads of 16 bytes a row
        u16 *to = o_out + begin * WIDTH + lane % ACROSS * 8;
#pragma unroll
        for (int i = 0; i < ACROSS / 2; i++) {
            const u32 own = i * (32 / ACROSS) + lane / ACROSS, r = row / 16 * 16 + own, chunk = lane % ACROSS;
            const uint4 part = *(const uint4 *)(mine + own * WIDTH * 2 + (chunk ^ own % 8) * 16);
            write(to + line(r) * WIDTH, part, r < rows);
        }
        __syncwarp();
    }

    // o times 1 / l in BF16 into shared memory -> whether all of the warp are o / l so. A product is at most one step of FP32
    // from the quotient, which matters in the middle between two numbers of BF16 and a step from it.
    __device__ __forceinline__ bool stage_quick(char *to) const {
        const float inverse[2] = {__frcp_rn(l[0]), __frcp_rn(l[1])};
        u32 least = ~0u, most = 0;  // of two each: steps from one before the middle, twice the size
        put(to, [&](int i) {
            const float a = o[2 * i] * inverse[i % 2], b = o[2 * i + 1] * inverse[i % 2];
            const u32 pair = pack(a, b), low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410);
            least = __viaddmin_u16x2(low, 0x80018001, least), most = __viaddmax_u16x2(pair, pair, most);
            return pair;
        });
        bool good = min(least & 0xffff, least >> 16) > 2 && max(most & 0xffff, most >> 16) <= 0xff00;  // no NaN
#pragma unroll
        for (int h = 0; h < 2; h++) good = good && l[h] >= 1 && l[h] < 0x1p64f;
        return __all_sync(~0u, good);
    }

    // Pairs of the output, 16 bytes of a row in turned places.
    template <class Pair>
    __device__ __forceinline__ void put(char *to, Pair pair) const {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            char *at = to + row % 16 * WIDTH * 2 + column * 2 + (c ^ row % 8) * 16;
#pragma unroll
            for (int i = 2 * c; i < OUT / 2; i += 16)
                *(u32 *)(at + i / 16 * 128) = pair(i), *(u32 *)(at + i / 16 * 128 + 8 * WIDTH * 2) = pair(i + 1);
        }
    }

    template <bool NUMBERS>
    __device__ __forceinline__ void stage(char *to) const {
        put(to, [&](int i) {
            u32 pair = pack(o[2 * i], o[2 * i + 1]);
            if (!NUMBERS && o[2 * i] != o[2 * i]) pair = pair & 0xffff0000 | 0x7fc0;
            if (!NUMBERS && o[2 * i + 1] != o[2 * i + 1]) pair = pair & 0xffff | 0x7fc00000;
            return pair;
        });
    }

    // o / l, rounded to nearest -> whether all of the warp are numbers. With 1 / l rounded so, two corrections of the
    // quotient give that, if no residual leaves the normal numbers; other values, zero among them, are left to the division
    // that looks at each.
    __device__ __forceinline__ bool divide() {
        const float inverse[2] = {__frcp_rn(l[0]), __frcp_rn(l[1])};
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < OUT; i++) most = max(most, 2 * __float_as_uint(o[i]) - (27u << 24));  // from 2^-100
#pragma unroll
        for (int h = 0; h < 2; h++) most = max(most, (l[h] >= 1 && l[h] < 0x1p64f) ? 0 : ~0u);
        if (__all_sync(~0u, most < (200u << 24))) {  // to 2^100
#pragma unroll
            for (int i = 0; i < OUT; i++) {
                const float d = l[i / 2 % 2], r = inverse[i / 2 % 2];
                const float quotient = o[i] * r, nearer = __fmaf_rn(__fmaf_rn(-quotient, d, o[i]), r, quotient);
                o[i] = __fmaf_rn(__fmaf_rn(-nearer, d, o[i]), r, nearer);
            }
            return true;
        }
#pragma unroll
        for (int i = 0; i < OUT; i++) kept_one(i) = o[i];
#pragma unroll 1
        for (int i = 0; i < OUT; i++) kept_one(i) = __fdiv_rn(kept_one(i), i & 2 ? l[1] : l[0]);
#pragma unroll
        for (int i = 0; i < OUT; i++) o[i] = kept_one(i);
        return false;
    }
};

// k, v: [rows, columns] BF16; q, o [T, N, WIDTH] BF16, positions int64 [T], bounds int32 [S + 1], m, l [T, N] FP32. key_rows: int64
// [S, max_keys], or null if sequence s lies from row starts[s] on, int32 [S].
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1) prefill(const __grid_constant__ TensorMap q,
        const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const i64 *positions, const i64 *key_rows,
        const int *bounds, const int *starts, u16 *o, float *m, float *l, float scale, int heads, int pairs, int blocks,
        int max_keys) {
    extern __shared__ __align__(1024) char memory[];
    Shared &at = *(Shared *)memory;
    Inputs in{positions, key_rows, bounds, starts, heads, pairs, blocks, max_keys};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            init(&at.full_k[i], 1), init(&at.full_v[i], 1);
            init(&at.empty_k[i], 4 * GROUPS), init(&at.empty_v[i], 4 * GROUPS);
        }
        init(&at.full_q, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128 * GROUPS) {
        // With the loading warps' no more than there are at the beginning.
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(GROUPS == 3 ? 160 : 240));
        const int thread = threadIdx.x % 128, which = __shfl_sync(~0u, threadIdx.x / 128, 0);
        Group group{at, in, (float4 (*)[32])&at.kept[which][thread / 32][0][thread % 32], scale, which};
        group.row = thread / 32 * 16 + thread % 32 / 4, group.column = thread % 4 * 2, group.count = group.n = 0;
        for (int i = TOKENS * GROUP * 64 + thread; i < 64 * 64; i += 128)  // rows of no query
#pragma unroll
            for (int c = 0; c < WIDTH; c += 64) ((u16 *)(at.q[which] + c * 128))[i] = 0;
        show(), meet(which);
        group.q = describe(at.q[which]), group.k = describe(at.k[0]), group.v = describe(at.v[0]);
        Item item = group.ahead(0), done{};  // nothing of an item without tokens is stored
        while (item.tiles > 0) {  // with both stores in one place the assembler makes a slower loop
            float s[32];
            group.begin(s);
            group.store(done, o, m, l);
            done = item;
            item = group.attend(item, s);
        }
        group.store(done, o, m, l);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(GROUPS == 3 ? 32 : 24));
        if (threadIdx.x / 32 == 4 * GROUPS) produce(at, in, &q, &k, &v);
    }
}
