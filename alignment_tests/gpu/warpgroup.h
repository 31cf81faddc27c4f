// Beside warp.h, what attention_prefill.cu names in PTX: products of four warps that read a tile in shared memory as it
// lies there, swizzled, loads by the copy engine, and barriers that count. A product is done where it is asked for.
#include "warp.h"
#include "arithmetic.h"
#include <map>
#include <mutex>
using std::max;
#define __grid_constant__
#define INFINITE_WAIT 200000000

static thread_local Index gridDim;
static const float *exp2_table;  // T of rounding.py
static float __shfl_sync(unsigned all, float value, int source) {
    int bits;
    memcpy(&bits, &value, 4);
    bits = __shfl_sync(all, bits, source);
    memcpy(&value, &bits, 4);
    return value;
}
static float __shfl_xor_sync(unsigned all, float value, int by) { return __shfl_sync(all, value, lane() ^ by); }
// Of both halves: a + b, then the least or the most.
static unsigned halves(unsigned a, unsigned b, unsigned c, bool least) {
    unsigned both = 0;
    for (int h = 0; h < 32; h += 16) {
        unsigned sum = (a >> h) + (b >> h) & 0xFFFF, other = c >> h & 0xFFFF;
        both |= (least ? std::min(sum, other) : std::max(sum, other)) << h;
    }
    return both;
}
static unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) { return halves(a, b, c, true); }
static unsigned __viaddmax_u16x2(unsigned a, unsigned b, unsigned c) { return halves(a, b, c, false); }
static bool __any_sync(unsigned all, bool value) { return __ballot_sync(all, value) != 0; }
static bool __all_sync(unsigned all, bool value) { return __ballot_sync(all, value) == ~0u; }
static float __int_as_float(int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static float ex2(float x) {
    if (std::isnan(x)) return x;
    double size = std::min((double)std::fabs(x), 160.0);
    long long t = (long long)(size * 8388608.0);
    t = x < 0 ? -t : t;
    long long whole = t >> 23, part = t & 0x7FFFFF;
    if (x < 0 && part) part--;
    if (whole < -126) return 0;
    return whole > 127 ? INFINITY : std::ldexp(exp2_table[part], (int)whole);
}
static unsigned packed(float value) { return std::isnan(value) ? 0x7FFF : nearest_bf16(value); }  // as the GPU's cvt
static unsigned pack_bf16(float low, float high) { return packed(low) | packed(high) << 16; }

// Which block of its cluster this is.
static int block_rank() {
    int i = 0;
    while (cluster[i].get() != block) i++;
    return i;
}

// Barriers in shared memory, by block and address: a phase ends when all have arrived and all bytes are there.
struct Phase { int count, pending; long long bytes; unsigned phase; };
static std::map<std::pair<int, unsigned>, Phase> phases;
static std::mutex guard;
// A block's own addresses hold its rank above these bits, where kernels are written for clusters.
#define OFFSET 0xFFFFFFu
static Phase &phase_of(unsigned at, int block = block_rank()) { return phases[{block, at & OFFSET}]; }
static void settle(Phase &p) {
    if (p.pending == 0 && p.bytes == 0) p.pending = p.count, p.phase++;
}
static void barrier_init(unsigned at, int count) {
    std::lock_guard<std::mutex> lock(guard);
    phase_of(at) = {count, count, 0, 0};
}
static void barrier_arrive(unsigned at, int expected, int block = block_rank()) {
    std::lock_guard<std::mutex> lock(guard);
    Phase &p = phase_of(at, block);
    p.bytes += expected, p.pending--;
    settle(p);
}
static bool barrier_passed(unsigned at, unsigned parity) {
    std::lock_guard<std::mutex> lock(guard);
    return ((phase_of(at).phase - 1) & 1) == parity;
}
static void barrier_wait(unsigned at, unsigned parity) {
    for (long long tries = 0; !barrier_passed(at, parity); tries++) {
        if (tries > INFINITE_WAIT) fprintf(stderr, "a barrier that nobody ends\n"), abort();
        std::this_thread::yield();
    }
}

static char &shared_byte(unsigned at, char *memory = block_memory) {  // swizzled by 128 bytes
    return memory[(at ^ (at >> 7 & 7) << 4) & OFFSET];
}
// For a block or for all of a cluster. Words of a map: address, rows, columns, rows and columns of a block, bytes of a value
// (2: swizzled).
static void copy_tile(unsigned to, const unsigned long long *map, int column, int row, unsigned barrier, bool all = false) {
    const int size = map[5];
    const int own = block_rank();
    for (int block = all ? 0 : own; block < (all ? (int)cluster.size() : own + 1); block++) {
        char *memory = cluster[block]->memory;
        for (int r = 0; r < map[3]; r++)
            for (int c = 0; c < map[4]; c++) {
                bool inside = row + r >= 0 && row + r < (long long)map[1] && column + c < (long long)map[2];
                unsigned at = to + (r * map[4] + c) * size, value = 0;
                if (inside) memcpy(&value, (const char *)map[0] + ((row + r) * map[2] + column + c) * size, size);
                memcpy(size == 2 ? &shared_byte(at, memory) : memory + (at & OFFSET), &value, size);
            }
        std::lock_guard<std::mutex> lock(guard);
        phase_of(barrier, block).bytes -= map[3] * map[4] * size;
        settle(phase_of(barrier, block));
    }
}

// The same of three sizes: 64 columns of some heads of some tokens; words: address, tokens, heads, columns, tokens and heads.
static void copy_box(unsigned to, const unsigned long long *map, int x, int y, int z, unsigned barrier) {
    for (int t = 0; t < map[4]; t++)
        for (int h = 0; h < map[5]; h++)
            for (int c = 0; c < 64; c++) {
                bool inside = z + t < map[1] && y + h < map[2] && x + c < map[3];
                unsigned value = 0;
                if (inside) memcpy(&value, (const char *)map[0] + (((z + t) * map[2] + y + h) * map[3] + x + c) * 2, 2);
                memcpy(&shared_byte(to + ((t * map[5] + h) * 64 + c) * 2), &value, 2);
            }
    std::lock_guard<std::mutex> lock(guard);
    phase_of(barrier).bytes -= map[4] * map[5] * 128;
    settle(phase_of(barrier));
}

struct Four { std::barrier<> barrier{128}; unsigned a[4][32][4]; };
static std::map<std::pair<int, int>, std::unique_ptr<Four>> fours;
static Four &four() {
    std::lock_guard<std::mutex> lock(guard);
    auto &mine = fours[{block_rank(), threadIdx.x / 128}];
    if (!mine) mine = std::make_unique<Four>();
    return *mine;
}
// d (64 x 2 * N) of a (64 x 16) and 16 rows, or TURNED columns, of what the descriptor b names.
template <int N> static void wgmma(float (&d)[N], const unsigned *a, unsigned long long b, int more, bool turned) {
    Four &f = four();
    const int warp = threadIdx.x / 32 % 4;
    memcpy(f.a[warp][lane()], a, 16);
    f.barrier.arrive_and_wait();
    const unsigned start = (b & 0x3FFF) << 4, lead = (b >> 16 & 0x3FFF) << 4, stride = (b >> 32 & 0x3FFF) << 4;
    for (int i = 0; i < N; i++) {
        const int row = lane() / 4 + (i & 2 ? 8 : 0), column = i / 4 * 8 + 2 * (lane() & 3) + (i & 1);
        float left[16], right[16];
        for (int k = 0; k < 16; k++) {
            unsigned x = f.a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            unsigned at = turned ? column / 64 * lead + column % 64 * 2 + k / 8 * stride + k % 8 * 128
                                 : column / 8 * stride + column % 8 * 128 + k * 2;
            unsigned short y;
            memcpy(&y, &shared_byte(start + at), 2);
            left[k] = bf16(k & 1 ? x >> 16 : x & 0xFFFF), right[k] = bf16(y);
        }
        d[i] = chain_step(more ? d[i] : 0, left, right);
    }
    f.barrier.arrive_and_wait();
}
// The same with a in shared memory: row r, 16 columns from the descriptor's start.
template <int N> static void wgmma(float (&d)[N], unsigned long long a, unsigned long long b, int more) {
    const unsigned start = (a & 0x3FFF) << 4, stride = (a >> 32 & 0x3FFF) << 4;
    unsigned own[4];
    for (int i = 0; i < 4; i++) {
        const int row = threadIdx.x / 32 % 4 * 16 + lane() / 4 + (i & 1) * 8, k = 2 * (lane() & 3) + (i & 2) * 4;
        memcpy(&own[i], &shared_byte(start + row / 8 * stride + row % 8 * 128 + k * 2), 4);
    }
    wgmma(d, own, b, more, false);
}
