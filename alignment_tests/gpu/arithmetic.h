// CUDA's scalar functions on a CPU; included by cuda_host.py after warp.h.
#include <atomic>
#include <cfloat>
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From> static To same_bits(From value) {
    To out;
    memcpy(&out, &value, sizeof(To));
    return out;
}
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __frcp_rn(float a) { return 1.0f / a; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned __vmaxu2(unsigned a, unsigned b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static int __shfl_xor_sync(unsigned all, int value, int by) { return __shfl_sync(all, value, lane() ^ by); }
static unsigned __reduce_max_sync(unsigned all, unsigned value) {
    unsigned top = 0;
    for (int i = 0; i < 32; i++) top = max(top, (unsigned)__shfl_sync(all, value, i));
    return top;
}
static void __syncwarp() { wait(); }
static void atomicMin(int *at, int value) {
    std::atomic_ref<int> cell(*at);
    for (int old = cell; value < old && !cell.compare_exchange_weak(old, value);) {}
}
static float saturated_fma(float a, float b, float c) {  // .sat takes a NaN to 0
    float r = __fmaf_rn(a, b, c);
    return r > 1.0f ? 1.0f : r > 0.0f ? r : 0.0f;
}
// cvt.rn.satfinite.e4m3x2.f32 of a non-negative value, by search: the nearest of all, of two the even one.
static unsigned e4m3_code(float value) {
    if (value != value) return 0x7F;
    int best = 0;
    double least = INFINITY;
    for (int code = 0; code < 0x7F; code++) {
        int exponent = code >> 3, mantissa = code & 7;
        double at = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        double away = std::fabs((value > 448 ? 448 : (double)value) - at);
        if (away < least || (away == least && code % 2 == 0)) best = code, least = away;
    }
    return best;
}
