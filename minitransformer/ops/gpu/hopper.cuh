// Instructions of Hopper that C++ has no words for: barriers in shared memory, loads by the copy engine, products of four
// warps.

#include "basic.cuh"

struct __align__(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ void init(u64 *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address(barrier)), "r"(count));
}

__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(u64 *barrier, int parity) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}"
        :: "r"(address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void expect(u64 *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load(char *to, const TensorMap *map, int column, int row, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(address(to)), "l"(map), "r"(column), "r"(row), "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ bool elected() {  // one lane, and the compiler knows
    u32 yes;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;}" : "=r"(yes));
    return yes;
}

__device__ __forceinline__ void load(char *to, const TensorMap *map, int x, int y, int z, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(address(to)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(address(barrier)) : "memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)

// d (64 x 64) = a (64 x 16) times 16 columns of a tile of 64 rows, + d if `more`. Both lie in shared memory.
__device__ __forceinline__ void mma(float (&d)[32], u64 a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
        : F16(d, 0), F16(d, 16) : "l"(a), "l"(b), "r"(more));
}

// d (64 x 64 or 128) += a (64 x 16), in registers, times 16 rows of a tile.
__device__ __forceinline__ void mma(float (&d)[32], const u32 *a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : F16(d, 0), F16(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void mma(float (&d)[64], const u32 *a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
        "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {  // values that the tensor core writes are not touched across this
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

template <int N>
__device__ __forceinline__ void hold(u32 (&v)[N]) {  // nor are these made anew behind this
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(v[i]));
}

// Waits for all groups of products but the last LEFT.
template <int LEFT>
__device__ __forceinline__ void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

__device__ __forceinline__ void write(void *at, u32 bits, bool valid) {  // without a branch
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0;\n@p st.global.u32 [%0], %1;}"
        :: "l"(at), "r"(bits), "r"((int)valid) : "memory");
}

__device__ __forceinline__ void write(void *at, uint4 v, bool valid) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};}"
        :: "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)valid) : "memory");
}

// What this thread has written to shared memory is there for the tensor core, once the group has met.
__device__ __forceinline__ void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void meet(int group) { asm volatile("bar.sync %0, 128;" :: "r"(3 + group) : "memory"); }
