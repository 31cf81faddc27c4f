// The NVFP4 quantiser over the host conversions of CUDA's own headers. Compile with -ffp-contract=off.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

extern "C" void quantize(const float *x, long rows, long k, uint8_t *codes, uint8_t *scales, float *outer) {
    const float sixth = 1.0f / 6.0f;
    for (long r = 0; r < rows; ++r) {
        const float *row = x + r * k;
        float g = 0.0f;
        for (long i = 0; i < k; ++i) g = std::fmax(g, std::fabs(row[i]));
        float s_enc = std::fmin(2688.0f / g, FLT_MAX);
        if (g == 0.0f || s_enc == 0.0f) s_enc = 1.0f;
        const float s_dec = 1.0f / s_enc;
        const float per_block = s_enc * sixth;
        outer[r] = s_dec;
        for (long b = 0; b < k / 16; ++b) {
            float top = 0.0f;
            for (long i = 0; i < 16; ++i) top = std::fmax(top, std::fabs(row[16 * b + i]));
            const float want = std::fmin(top * per_block, FLT_MAX);
            const __nv_fp8_storage_t d = __nv_cvt_float_to_fp8(want, __NV_SATFINITE, __NV_E4M3);
            const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(d, __NV_E4M3)));
            const float product = scale * s_dec;
            const float enc = std::fmin(1.0f / product, FLT_MAX);
            scales[r * (k / 16) + b] = d;
            for (long i = 16 * b; i < 16 * b + 16; i += 2) {
                const float low = row[i] * enc, high = row[i + 1] * enc;
                // The low nibble is .x.
                codes[(r * k + i) / 2] =
                    __nv_cvt_float2_to_fp4x2(make_float2(low, high), __NV_E2M1, cudaRoundNearest);
            }
        }
    }
}
