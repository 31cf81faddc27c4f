// Beside warpgroup.h, what pair_product.cu names in PTX.
#include "warpgroup.h"
#define __cluster_dims__(...)

struct float2 { float x, y; };
template <class T> static T __ldcg(const T *at) { return *at; }
template <class T> static void __stcg(T *at, T value) { *at = value; }
template <class T> static void __stcs(T *at, T value) { *at = value; }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static int atomicAdd(int *at, int more) { return std::atomic_ref<int>(*at).fetch_add(more); }
static int first_of(unsigned at) { return *(int *)(cluster[0]->memory + (at & OFFSET)); }

// d (64 x N) of a and b, tiles in shared memory whose 64 or N rows, or columns where turned, descriptors name.
static float element(unsigned long long tile, int i, int k, bool turned) {
    const unsigned start = (tile & 0x3FFF) << 4, lead = (tile >> 16 & 0x3FFF) << 4, stride = (tile >> 32 & 0x3FFF) << 4;
    unsigned short half;
    memcpy(&half, &shared_byte(start + (turned ? i / 64 * lead + i % 64 * 2 + k / 8 * stride + k % 8 * 128
                                               : i / 8 * stride + i % 8 * 128 + k * 2)), 2);
    return bf16(half);
}
template <int N> static void wgmma_shared(
        float *d, unsigned long long a, unsigned long long b, int more, bool a_turned, bool b_turned) {
    ::wait();  // a warp comes together, and goes on together
    for (int i = 0; i < N / 2; i++) {
        const int row = threadIdx.x / 32 % 4 * 16 + lane() / 4 + (i & 2 ? 8 : 0), column = i / 4 * 8 + 2 * (lane() & 3) + (i & 1);
        float left[16], right[16];
        for (int k = 0; k < 16; k++) left[k] = element(a, row, k, a_turned), right[k] = element(b, column, k, b_turned);
        d[i] = chain_step(more ? d[i] : 0, left, right);
    }
    ::wait();
}

// stmatrix and ldmatrix, x4.trans: lane 8q + i says where row i of matrix q lies; lane 4c + r has of each its column c,
// rows 2r and 2r + 1.
static void store_turned(unsigned at, const unsigned *pairs) {
    Warp &w = warp();
    w.slot[lane()] = at;
    memcpy(w.a[lane()], pairs, 16);
    wait();
    const int q = lane() / 8, i = lane() % 8;
    for (int c = 0; c < 8; c++) {
        unsigned short half = w.a[4 * c + i / 2][q] >> i % 2 * 16;
        memcpy(block_memory + (at & OFFSET) + 2 * c, &half, 2);
    }
    wait();
}
static void load_turned(unsigned at, unsigned *pairs) {
    Warp &w = warp();
    w.slot[lane()] = at;
    wait();
    for (int q = 0; q < 4; q++) {
        unsigned short half[2];
        for (int b = 0; b < 2; b++)
            memcpy(half + b, block_memory + (w.slot[8 * q + lane() % 4 * 2 + b] & OFFSET) + lane() / 4 * 2, 2);
        pairs[q] = half[0] | (unsigned)half[1] << 16;
    }
    wait();
}
