// Instructions that C++ has no words for: copies of 16 bytes, products of one warp, and what the blocks of a cluster tell
// each other. Included by attention_cluster.cu.

#include "basic.cuh"
#include "blocks.cuh"

__device__ __forceinline__ void copy16(u32 to, const void *from, bool valid) {  // zeros if not valid
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void finish() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// The same, turned: two neighbours of column lane / 4.
__device__ __forceinline__ uint4 load_turned(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void mma(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void in_turn() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ u32 load_early(const void *at) {  // asked for where it stands
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}

__device__ __forceinline__ void init(u64 *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u64 *barrier, u32 parity) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" :: "r"(address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ u32 there(const void *p, u32 rank) {  // the same place in another block of the cluster
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(p)), "r"(rank));
    return remote;
}

// Written there, and counted there.
__device__ __forceinline__ void give(u32 at, float value, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
        :: "r"(at), "f"(value), "r"(barrier) : "memory");
}

__device__ __forceinline__ void give(u32 at, u32 a, u32 b, u32 c, u32 d, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
        :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier) : "memory");
}

__device__ __forceinline__ void begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void done_reading() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void all_there() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// a / l and b / l in BF16; NaN is 0x7fc0.
__device__ __forceinline__ u32 quotients(float a, float b, float l) {
    const float x = __fdiv_rn(a, l), y = __fdiv_rn(b, l);
    u32 pair = pack(x, y);
    if (x != x) pair = pair & 0xffff0000 | 0x7fc0;
    if (y != y) pair = pair & 0xffff | 0x7fc00000;
    return pair;
}
