// Beside warpgroup.h, what attention_cluster.cu names in PTX: blocks of 8 x 8, turned, and writes into a neighbour's memory.
#include "warpgroup.h"
#include <functional>
#include <optional>
#define __cluster_dims__(...)

struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }

static uint4 load_turned_matrices(unsigned at) {
    Warp &w = warp();
    w.slot[lane()] = at;
    wait();
    unsigned v[4];
    for (int i = 0; i < 4; i++) {
        unsigned short two[2];
        for (int r = 0; r < 2; r++) memcpy(two + r, block_memory + w.slot[8 * i + 2 * (lane() & 3) + r] + lane() / 4 * 2, 2);
        v[i] = two[0] | (unsigned)two[1] << 16;
    }
    wait();
    return {v[0], v[1], v[2], v[3]};
}

static void copy_or_zero(unsigned to, const void *from, bool valid) {
    valid ? memcpy(block_memory + to, from, 16) : memset(block_memory + to, 0, 16);
}

template <class T> static T __ldcg(const T *at) { return *at; }
static float __shfl_up_sync(unsigned all, float value, int by, int width) {
    return __shfl_sync(all, value, lane() % width < by ? lane() : lane() - by);
}
// An address in a neighbour's memory: its number in the upper byte.
static char *in_cluster(unsigned at) { return cluster[at >> 24]->memory + (at & 0xFFFFFF); }
static void give_bytes(unsigned at, const void *from, int bytes, unsigned barrier) {
    memcpy(in_cluster(at), from, bytes);
    std::lock_guard<std::mutex> lock(guard);
    Phase &p = phase_of(barrier, barrier >> 24);
    p.bytes -= bytes;
    settle(p);
}
static void give_words(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d, unsigned barrier) {
    const unsigned words[4] = {a, b, c, d};
    give_bytes(at, words, 16, barrier);
}
static std::function<void()> in_front_ends;  // what the kernel in front writes, once somebody waits for its end
static std::once_flag *ended;
static thread_local std::optional<std::barrier<>::arrival_token> token;
static void cluster_arrive() { token = whole_cluster->arrive(); }
static void cluster_wait() { whole_cluster->wait(std::move(*token)); }
