// Stores to the distributed shared memory of a cluster.
//
// store_shared_remote sends 16 bytes from registers and counts them at a Barrier of the receiving block, as a TMA load does:
// the receiver announces the bytes with arrive_and_expect_tx() and waits with wait_acquire_cluster().  No fence is needed.
// The sender may exit before its bytes arrive; the receiver must have started (cluster_arrive_relaxed by all blocks, then
// cluster_wait) and must not exit before.
// [PTX ISA: mapa, st.async, barrier.cluster, mbarrier.try_wait]
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

// A cluster barrier in two halves.  After the wait every block has started, and the mbarriers that it initialised before
// its arrival are visible (fence_barrier_init orders them).  The arrival is relaxed: it orders no other memory, which would
// cost a fence of 500 cycles.  Between the halves a thread may only touch its own block.  For kernels launched with
// clusters: in others the arrival compiles to nothing and the wait to a barrier of the block.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Address, in block `rank`, of what this block has at shared address `address`.
__device__ inline u32 map_shared_rank(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Stores two floats at an address from map_shared_rank; a cluster_sync of both blocks makes them visible.
__device__ inline void store_shared_remote(u32 address, float2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

// Stores four floats at `address` (16-byte aligned) and counts them at `barrier`.  Both are addresses in the same block,
// from map_shared_rank.
__device__ inline void store_shared_remote(u32 address, u32 barrier, float v0, float v1, float v2, float v3) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(v0), "f"(v1), "f"(v2), "f"(v3), "r"(barrier)
                 : "memory");
}

// The same for one number of 8 bytes, 8-byte aligned.
__device__ inline void store_shared_remote(u32 address, u32 barrier, u64 value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
                 "r"(barrier)
                 : "memory");
}

// Barrier::wait with acquire at cluster scope: afterwards, what other blocks wrote before they arrived is visible.
__device__ inline void wait_acquire_cluster(const Barrier& barrier, u32 parity) {
    u32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier.address()), "r"(parity)
            : "memory");
    }
}

}  // namespace tilewright
