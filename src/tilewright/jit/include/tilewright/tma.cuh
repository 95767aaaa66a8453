// TMA copies: boxes of tensors between global and shared memory, each issued by one thread.
// [PTX ISA: cp.async.bulk.tensor]
//
// A tensor map (from tilewright.jit.tensor_map, passed as `const __grid_constant__ TensorMap`) holds shape, strides, box and
// swizzle.  Coordinates are those of the box's first element, innermost dimension first.  What lies outside of the tensor is
// read as zero and not written.  Shared addresses are 128-byte aligned, 1024-byte under the 128-byte swizzle.
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

struct alignas(64) TensorMap { u8 opaque[128]; };

// L2 eviction priority of a copy's lines: the encodings that createpolicy returns.
enum class CacheHint : u64 {
    EvictNormal = 0x1000000000000000,
    EvictFirst = 0x12F0000000000000,
    EvictLast = 0x14F0000000000000,
};

// Prefetches the tensor map itself; call it early in the kernel.
__device__ inline void tma_prefetch_descriptor(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// For each rank, 1 to 5:
//   tma_load            box -> shared memory; the bytes count at `full`, where arrive_and_expect_tx() must announce them.
//   tma_load_multicast  the same to the same offset in each block of the cluster whose bit is set in `blocks`; the bytes
//                       count at that block's barrier at the offset of `full`.
//   tma_store           shared memory -> box.
//   tma_reduce_add      adds to the box in global memory, in the tensor's type.
//   tma_prefetch_l2     box -> L2 only.  Also safe for memory that another kernel still writes: the L2 is coherent.
// Operands: %0 shared address, %1 map, %2 cache hint; then a store has its coordinates, a load %3 barrier, a multicast also
// %4 mask, and then the coordinates.
#define TILEWRIGHT_LIST(...) __VA_ARGS__
#define TILEWRIGHT_TMA(RANK, COORDINATES, STORE_AT, LOAD_AT, MULTICAST_AT, ...)                                        \
    __device__ inline void tma_load(                                                                                   \
        void* to, const TensorMap& map, Barrier& full, COORDINATES, CacheHint hint = CacheHint::EvictNormal) {         \
        asm volatile("cp.async.bulk.tensor." RANK                                                                      \
                     ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"                             \
                     " [%0], [%1, " LOAD_AT "], [%3], %2;" ::"r"(shared_address(to)),                                  \
                     "l"(&map), "l"(u64(hint)), "r"(full.address()), __VA_ARGS__                                       \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ inline void tma_load_multicast(                                                                         \
        void* to, const TensorMap& map, Barrier& full, u16 blocks, COORDINATES, CacheHint hint = CacheHint::EvictNormal) {\
        asm volatile("cp.async.bulk.tensor." RANK                                                                      \
                     ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"          \
                     " [%0], [%1, " MULTICAST_AT "], [%3], %4, %2;" ::"r"(shared_address(to)),                         \
                     "l"(&map), "l"(u64(hint)), "r"(full.address()), "h"(blocks), __VA_ARGS__                          \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ inline void tma_store(                                                                                  \
        const TensorMap& map, const void* from, COORDINATES, CacheHint hint = CacheHint::EvictNormal) {                \
        asm volatile("cp.async.bulk.tensor." RANK ".global.shared::cta.bulk_group.L2::cache_hint"                      \
                     " [%1, " STORE_AT "], [%0], %2;" ::"r"(shared_address(from)),                                     \
                     "l"(&map), "l"(u64(hint)), __VA_ARGS__                                                            \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ inline void tma_reduce_add(                                                                             \
        const TensorMap& map, const void* from, COORDINATES, CacheHint hint = CacheHint::EvictNormal) {                \
        asm volatile("cp.reduce.async.bulk.tensor." RANK ".global.shared::cta.add.bulk_group.L2::cache_hint"           \
                     " [%1, " STORE_AT "], [%0], %2;" ::"r"(shared_address(from)),                                     \
                     "l"(&map), "l"(u64(hint)), __VA_ARGS__                                                            \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ inline void tma_prefetch_l2(const TensorMap& map, COORDINATES, CacheHint hint = CacheHint::EvictNormal) {\
        asm volatile("cp.async.bulk.prefetch.tensor." RANK ".L2.global.L2::cache_hint [%1, " STORE_AT "], %2;" ::"r"(0),\
                     "l"(&map), "l"(u64(hint)), __VA_ARGS__                                                            \
                     : "memory");                                                                                      \
    }

TILEWRIGHT_TMA("1d", TILEWRIGHT_LIST(int x), "{%3}", "{%4}", "{%5}", "r"(x))
TILEWRIGHT_TMA("2d", TILEWRIGHT_LIST(int x, int y), "{%3, %4}", "{%4, %5}", "{%5, %6}", "r"(x), "r"(y))
TILEWRIGHT_TMA("3d", TILEWRIGHT_LIST(int x, int y, int z), "{%3, %4, %5}", "{%4, %5, %6}", "{%5, %6, %7}", "r"(x), "r"(y), "r"(z))
TILEWRIGHT_TMA("4d", TILEWRIGHT_LIST(int x, int y, int z, int u), "{%3, %4, %5, %6}", "{%4, %5, %6, %7}", "{%5, %6, %7, %8}", "r"(x), "r"(y), "r"(z), "r"(u))
TILEWRIGHT_TMA("5d", TILEWRIGHT_LIST(int x, int y, int z, int u, int v), "{%3, %4, %5, %6, %7}", "{%4, %5, %6, %7, %8}", "{%5, %6, %7, %8, %9}", "r"(x), "r"(y), "r"(z), "r"(u), "r"(v))
#undef TILEWRIGHT_TMA
#undef TILEWRIGHT_LIST

// Stores of one thread form bulk groups that complete in order; a kernel ends only when all of them are complete.
// [cp.async.bulk.commit_group, wait_group]
__device__ inline void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's bulk groups have not yet read their shared memory; that of the others may be
// overwritten.
template <u32 kPending> __device__ inline void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace tilewright
