// Four 8 x 8 blocks; lane 8i + j names row j of block i, and gets two neighbours of row lane / 4 of each block.
__device__ __forceinline__ uint4 load_blocks(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
