// SHA-256 (FIPS 180-4) of many pieces of PIECE bytes, a thread each: the 32 bytes of every digest one after another.
//
// A thread's message schedule is 16 words in registers: all 64 rounds are unrolled, so that each index is known.
//
// Compiled with: PIECE, a multiple of 64; THREADS a block.

typedef unsigned int u32;
typedef long long i64;

__device__ __forceinline__ u32 turned(u32 x, int by) { return x >> by | x << (32 - by); }

// The other byte order: messages and digests are big-endian.
__device__ __forceinline__ u32 swapped(u32 x) { return (turned(x, 24) & 0x00FF00FF) | (turned(x, 8) & 0xFF00FF00); }

// The first 32 bits behind the point of the cube roots of the first 64 primes, and of the square roots of the first 8.
__device__ __forceinline__ void compress(u32 (&state)[8], u32 (&w)[16]) {
    constexpr u32 roots[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    u32 a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        if (i >= 16) {
            u32 x = w[(i + 1) & 15], y = w[(i + 14) & 15];
            w[i & 15] += (turned(x, 7) ^ turned(x, 18) ^ x >> 3) + w[(i + 9) & 15] + (turned(y, 17) ^ turned(y, 19) ^ y >> 10);
        }
        u32 first = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + roots[i] + w[i & 15];
        u32 second = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

// data: 16-byte aligned, pieces * PIECE bytes -> out, 8 words a piece.
extern "C" __global__ void __launch_bounds__(THREADS) digests(const uint4 *data, u32 *out, int pieces) {
    i64 piece = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (piece >= pieces) return;
    const uint4 *from = data + piece * (PIECE / 16);
    u32 state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u32 w[16];
    for (int i = 0; i < PIECE / 64; i++, from += 4) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 four = from[j];
            w[4 * j] = swapped(four.x), w[4 * j + 1] = swapped(four.y);
            w[4 * j + 2] = swapped(four.z), w[4 * j + 3] = swapped(four.w);
        }
        compress(state, w);
    }
    // The end: a bit, zeros, the length in bits.
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = j == 0 ? 0x80000000u : j == 15 ? 8u * PIECE : 0;
    compress(state, w);
#pragma unroll
    for (int j = 0; j < 8; j++) out[8 * piece + j] = swapped(state[j]);
}
