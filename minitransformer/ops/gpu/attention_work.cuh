// attention_prefill.cu's pieces of work: who takes them, and the warp that loads their queries, keys and values.

#include "hopper.cuh"

#define TILE (KEYS * WIDTH * 2)  // bytes
#define OUT (WIDTH / 2)  // a thread's elements of the output
#define TOKENS (64 / GROUP)  // of a group of warps

struct Inputs {
    const i64 *positions, *key_rows;
    const int *bounds, *starts;
    int heads, pairs, blocks, max_keys;
};

// A piece of work: GROUPS * TOKENS tokens from `first` of a sequence and a key/value head. shift: position minus token; keys:
// row of key 0 or, out of pages, the sequence. No tiles: there is no more work.
struct Item { int first, end, head, keys, shift, tiles; };

// The program's work number `wave` or, where a sequence is shorter, the next: forward and back over the programs, the late
// tokens, which have the most keys, first.
__device__ __forceinline__ bool find(const Inputs &in, u32 &wave, Item &item) {
    for (;; wave++) {
        int i = wave * gridDim.x + (wave % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (i >= in.pairs * in.blocks) return false;
        int kv_heads = in.heads / GROUP, pair = i % in.pairs, sequence = pair / kv_heads;
        int first = in.bounds[sequence] + (in.blocks - 1 - i / in.pairs) * GROUPS * TOKENS, end = in.bounds[sequence + 1];
        if (first >= end) continue;
        int shift = (int)in.positions[first] - first, last = min(first + GROUPS * TOKENS, end) - 1 + shift;
        // Two tiles at least: one that is masked whole changes nothing, and the pipeline has no case for one alone.
        item = {first, end, pair % kv_heads, in.key_rows ? sequence : in.starts[sequence], shift, max(last / KEYS + 1, 2)};
        return true;
    }
}

// The row of a tile's keys from lane * BOX on. Past the table's end any will do: what lies there is masked.
__device__ __forceinline__ int look(const Inputs &in, const Item &item, int t, int lane) {
    const int j = t * KEYS + lane % (KEYS / BOX) * BOX;
    if (!in.key_rows) return item.keys + j;
    return j < in.max_keys ? (int)in.key_rows[(i64)item.keys * in.max_keys + j] : 0;
}

struct Shared {
    char k[SLOTS][TILE], v[SLOTS][TILE];  // 64 columns (128 bytes, swizzled) x 64 keys, then the next 64 columns
    char q[GROUPS][64 * WIDTH * 2];  // 64 rows in the same way
    float4 kept[GROUPS][4][OUT / 4][32];  // of each thread of each warp: o of the segments before
    Item items[2];
    u64 full_q, full_k[SLOTS], empty_k[SLOTS], full_v[SLOTS], empty_v[SLOTS];
};
static_assert((sizeof(Shared) + 15) / 16 * 16 == SHARED, "attention_prefill.py counts other bytes");

__device__ __forceinline__ void load_tile(char *to, const TensorMap *map, int column, int row, u64 *full, int lane) {
    int rows[KEYS / BOX];
#pragma unroll
    for (int i = 0; i < KEYS / BOX; i++) rows[i] = __shfl_sync(~0u, row, i);
    if (!elected()) return;
    expect(full, TILE);
#pragma unroll
    for (int i = 0; i < KEYS / BOX; i++)
#pragma unroll
        for (int c = 0; c < WIDTH; c += 64) load(to + (c + i * BOX) * 128, map, column + c, rows[i], full);
}

__device__ __forceinline__ void load_queries(Shared &at, const Item &item, const TensorMap *map) {
    if (!elected()) return;
    expect(&at.full_q, GROUPS * TOKENS * GROUP * WIDTH * 2);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int c = 0; c < WIDTH; c += 64)
            load(at.q[g] + c * 128, map, c, item.head * GROUP, item.first + g * TOKENS, &at.full_q);
}

// The keys of a tile, then the values of the tile before, which are needed later. What comes next is looked up meanwhile.
__device__ __forceinline__ void produce(Shared &at, const Inputs &in, const TensorMap *q, const TensorMap *k, const TensorMap *v) {
    const int lane = threadIdx.x % 32;
    Item item, next{0, 1, 0, 0, 0, 0};
    u32 wave = 0;
    find(in, wave, next);
    int row = look(in, next, 0, lane), row_v = 0, column = 0;
    for (u32 n = 0, count = 0;; count++) {
        item = next;
        for (int t = 0; t < max(item.tiles, 1); t++, n++) {
            const u32 slot = n % SLOTS, before = (n - 1) % SLOTS;
            wait(&at.empty_k[slot], (n / SLOTS & 1) ^ 1);
            // The item before the last was read before the tile was given back that lay here.
            if (t == 0 && lane == 0) at.items[count % 2] = item;
            // Tile 0 takes the place of a tile before the last piece's last, tile 1 that one's: its queries have been read.
            if (t == 1) load_queries(at, item, q);
            if (item.tiles > 0) load_tile(at.k[slot], k, item.head * WIDTH, row, &at.full_k[slot], lane);
            if (n > 0) wait(&at.empty_v[before], ((n - 1) / SLOTS & 1) ^ 1);
            if (n > 0) load_tile(at.v[before], v, column, row_v, &at.full_v[before], lane);
            if (item.tiles == 0) {
                if (lane == 0) arrive(&at.full_k[slot]);
                return;
            }
            column = item.head * WIDTH, row_v = row;
            if (t == 0 && !find(in, ++wave, next)) next.tiles = 0;
            row = t + 1 < item.tiles ? look(in, item, t + 1, lane) : look(in, next, 0, lane);
        }
    }
}
