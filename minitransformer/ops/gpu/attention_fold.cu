// The fold of attention/2 (ops/attention.py) where each segment of keys was a piece of work of its own.
//
// Compiled with: WIDTH (head size, 64 or 128), SEGMENT (1024) keys.

#include "cluster.cuh"

#define START -1e30f
#define OWN (WIDTH / 32)  // columns of a lane

// m, l FP32 [segments, lines] and acc [segments, lines, WIDTH] of each segment.
struct Parts { const float *m, *l, *acc; int lines, line, count; };

// This lane's columns, asked for where it stands, without a branch; -0, which added changes nothing, if not valid.
__device__ __forceinline__ void load_or_nothing(float (&v)[OWN], const float *at, bool valid) {
#pragma unroll
    for (int j = 0; j < OWN; j++) v[j] = -0.f;
#if WIDTH == 128
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0;\n@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];}"
        : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3]) : "l"(at), "r"((int)valid) : "memory");
#else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0;\n@p ld.global.cg.v2.f32 {%0, %1}, [%2];}"
        : "+f"(v[0]), "+f"(v[1]) : "l"(at), "r"((int)valid) : "memory");
#endif
}

struct Folded {
    float m, l, acc[OWN];

    // N segments from s0 on, all loaded at once.
    template <int N>
    __device__ __forceinline__ void add(const Parts &in, int s0, int lane) {
        const int s_mine = s0 + lane % N;
        const i64 mine = (i64)min(s_mine, in.count - 1) * in.lines + in.line;
        const float m_s = __ldcg(in.m + mine), l_s = __ldcg(in.l + mine);
        float part[N][OWN];
#pragma unroll
        for (int s = 0; s < N; s++)
            load_or_nothing(part[s], in.acc + ((i64)(s0 + s) * in.lines + in.line) * WIDTH + lane * OWN, s0 + s < in.count);
        asm volatile("membar.cta;" ::: "memory");  // or the assembler asks for one after the other
        // Lane s: the largest m of segments 0 .. s, and the factors of those before s and of s.
        float top = fmaxf(m_s, m);
#pragma unroll
        for (int d = 1; d < N; d *= 2) {
            const float below = __shfl_up_sync(~0u, top, d, N);
            top = lane % N >= d ? fmaxf(top, below) : top;
        }
        const float before = __shfl_up_sync(~0u, top, 1, N);
        const float old = exp2_hw((lane % N ? before : m) - top), factor = exp2_hw(m_s - top);
        const float now = s_mine < in.count ? factor : 1, l_now = s_mine < in.count ? l_s * factor : -0.f;
#pragma unroll
        for (int s = 0; s < N; s++) {
            const float a = __shfl_sync(~0u, old, s), b = __shfl_sync(~0u, now, s);
            l = l * a + __shfl_sync(~0u, l_now, s);
#pragma unroll
            for (int j = 0; j < OWN; j++) acc[j] = acc[j] * a + part[s][j] * b;
        }
        m = __shfl_sync(~0u, top, N - 1);
        // Nobody reads them again: they need not go from the L2 cache to memory.
        __syncwarp();
        if (lane < N && s_mine < in.count)
#pragma unroll
            for (int j = 0; j < WIDTH; j += 32)
                asm volatile("discard.global.L2 [%0], 128;" :: "l"(in.acc + mine * WIDTH + j) : "memory");
    }
};

// A row's segments -> o, m, l; a block, of one warp, a row.
extern "C" __global__ void __launch_bounds__(32, 1) fold(const float *m_in, const float *l_in, const float *acc_in,
        const i64 *positions, u16 *o, float *m_out, float *l_out, int heads, int lines) {
    const int line = blockIdx.x, lane = threadIdx.x;
    const Parts in{m_in, l_in, acc_in, lines, line, (int)positions[line / heads] / SEGMENT + 1};
    in_turn();  // the position is older than the kernel in front, which writes the segments
    Folded all{START, 0};
    if (in.count <= 8) all.add<8>(in, 0, lane);
    else for (int s0 = 0; s0 < in.count; s0 += 32) all.add<32>(in, s0, lane);
    u32 pairs[OWN / 2];
#pragma unroll
    for (int j = 0; j < OWN; j += 2) pairs[j / 2] = quotients(all.acc[j], all.acc[j + 1], all.l);
    u16 *to = o + (i64)line * WIDTH + lane * OWN;
    if (OWN == 4) *(uint2 *)to = make_uint2(pairs[0], pairs[OWN / 2 - 1]);
    else *(u32 *)to = pairs[0];
    if (lane == 0) m_out[line] = all.m, l_out[line] = all.l;
}
