// A block of a CUDA kernel on a CPU: a thread a lane, barriers for warps and blocks, and the instructions that the
// kernels name in PTX. Included before a kernel's text by emulated_product.py.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static thread_local Index threadIdx, blockIdx;
static thread_local char *block_memory;

struct Warp {
    std::barrier<> barrier{32};
    unsigned slot[32], a[32][4], b[32][2];
};
// A block, and the blocks that run at the same time and see each other's memory (a cluster; mostly one).
struct Block {
    std::vector<char> bytes;
    char *memory;
    std::vector<std::unique_ptr<Warp>> warps;
    std::barrier<> barrier;
    Block(int threads, int shared) : bytes(shared + 1024, (char)0xFF), barrier(threads) {  // memory starts as NaN
        memory = bytes.data() + (1024 - (size_t)bytes.data() % 1024) % 1024;
        for (int i = 0; i < threads / 32; i++) warps.push_back(std::make_unique<Warp>());
    }
};
static std::vector<std::unique_ptr<Block>> cluster;
static std::unique_ptr<std::barrier<>> whole_cluster;
static thread_local Block *block;

static Warp &warp() { return *block->warps[threadIdx.x >> 5]; }
static int lane() { return threadIdx.x & 31; }
static void wait() { warp().barrier.arrive_and_wait(); }
static void __syncthreads() { block->barrier.arrive_and_wait(); }

static int __shfl_sync(unsigned, int value, int source) {
    warp().slot[lane()] = value;
    wait();
    int got = warp().slot[source];
    wait();
    return got;
}
static int __shfl_up_sync(unsigned all, int value, int by) {
    return __shfl_sync(all, value, lane() < by ? lane() : lane() - by);
}
static unsigned __ballot_sync(unsigned all, bool value) {
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)__shfl_sync(all, value, i) << i;
    return bits;
}
static int __ffs(unsigned value) { return __builtin_ffs(value); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (pick >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
static float __fmul_rn(float a, float b) { return a * b; }

static float bf16(unsigned half) {
    unsigned bits = half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static unsigned exact_bf16(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    if (bits & 0xFFFF) fprintf(stderr, "a product that BF16 does not hold\n"), abort();
    return bits >> 16;
}
static unsigned mul_bf16x2(unsigned a, unsigned b) {
    return exact_bf16(bf16(a & 0xFFFF) * bf16(b & 0xFFFF)) | exact_bf16(bf16(a >> 16) * bf16(b >> 16)) << 16;
}
static unsigned short nearest_bf16(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// One step of hopper-k16-f25 for normal numbers: exact terms, truncated to 2^(E - 25), added, truncated to 24 bits.
static float chain_step(float c, const float *a, const float *b) {
    if (std::isnan(c)) return c;
    for (int k = 0; k < 16; k++)
        if (std::isnan(a[k] * b[k])) return NAN;  // a column past the rows, which nobody stores
    int top = c == 0 ? -1000 : std::ilogb(c);
    for (int k = 0; k < 16; k++)
        if (a[k] * b[k] != 0) top = std::max(top, std::ilogb(a[k]) + std::ilogb(b[k]));
    if (top == -1000) return 0;
    if (top < -100 || top > 100) fprintf(stderr, "out of the emulator's range\n"), abort();
    double unit = std::ldexp(1.0, top - 25), sum = std::trunc(c / unit);
    for (int k = 0; k < 16; k++) sum += std::trunc((double)a[k] * b[k] / unit);
    sum *= unit;  // exact so far: 30 bits
    float near = (float)sum;
    return std::fabs(near) > std::fabs(sum) ? std::nextafter(near, 0.0f) : near;
}
static void mma_m16n8k16(float *c, const unsigned *a, uint2 b) {
    Warp &w = warp();
    memcpy(w.a[lane()], a, 16);
    w.b[lane()][0] = b.x, w.b[lane()][1] = b.y;
    wait();
    for (int i = 0; i < 4; i++) {
        int row = lane() / 4 + (i & 2 ? 8 : 0), column = 2 * (lane() & 3) + (i & 1);
        float left[16], right[16];
        for (int k = 0; k < 16; k++) {
            unsigned x = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], y = w.b[column * 4 + k % 8 / 2][k / 8];
            left[k] = bf16(k & 1 ? x >> 16 : x & 0xFFFF), right[k] = bf16(k & 1 ? y >> 16 : y & 0xFFFF);
        }
        c[i] = chain_step(c[i], left, right);
    }
    wait();
}

static uint4 load_matrices(unsigned at) {
    Warp &w = warp();
    w.slot[lane()] = at;
    wait();
    unsigned v[4];
    for (int i = 0; i < 4; i++) memcpy(v + i, block_memory + w.slot[8 * i + lane() / 4] + 4 * (lane() & 3), 4);
    wait();
    return {v[0], v[1], v[2], v[3]};
}

// A barrier in shared memory: what is still to arrive, a sender in the upper bits and bytes in the lower ones.
static constexpr long long SENDER = 1LL << 40;
static std::atomic_ref<long long> barrier_at(unsigned at) { return std::atomic_ref(*(long long *)(block_memory + at)); }
static void copied(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    memcpy(block_memory + to, from, bytes);
    barrier_at(barrier) -= bytes;
}
static bool arrived(unsigned barrier) {
    std::this_thread::yield();
    return barrier_at(barrier) == 0;
}

// Every thread of every block, cluster after cluster; from the last to the first if `backwards`.
template <class Kernel> static void launch(
        int blocks, int threads, int shared, Kernel kernel, int together = 1, bool backwards = false) {
    for (int done = 0; done < blocks; done += together) {
        const int first = backwards ? blocks - together - done : done;
        cluster.clear();
        for (int i = 0; i < together; i++) cluster.push_back(std::make_unique<Block>(threads, shared));
        whole_cluster = std::make_unique<std::barrier<>>(together * threads);
        std::vector<std::thread> running;
        for (int i = 0; i < together * threads; i++)
            running.emplace_back([=] {
                block = cluster[i / threads].get(), block_memory = block->memory;
                threadIdx.x = i % threads, blockIdx.x = first + i / threads, kernel();
            });
        for (auto &thread : running) thread.join();
    }
}
