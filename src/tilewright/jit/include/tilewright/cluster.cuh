// Writing into the shared memory of the other blocks of a cluster.
//
// store_in_cluster sends 16 bytes from registers, and they are counted by a Barrier of the receiver, as the copy engine's
// are: the receiver announces them with expect() and waits with wait_in_cluster.  Nobody fences, and the sender may end
// before its bytes arrive.  The receiver may not, and must have started: arrive_at_cluster by all, then wait_for_cluster.
// [PTX ISA: mapa, st.async, barrier.cluster, mbarrier.try_wait]
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

// The two halves of a start: after the wait, every block has started and barriers that it made before its arrival are
// there (fence_barrier_init orders them; nothing else is ordered, which would take a fence of 500 cycles).  Between them a
// thread may do what concerns its own block alone.  Only in a kernel launched in clusters: elsewhere the compiler makes of
// the arrival nothing, and of the wait a barrier of the block.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where block `rank` keeps what this block keeps at the shared address `here`.
__device__ inline u32 address_in_cluster(u32 here, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

// Four floats to `address`, 16 bytes aligned, counted by `barrier`: both of one block, made by address_in_cluster.
__device__ inline void store_in_cluster(u32 address, u32 barrier, float v0, float v1, float v2, float v3) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(v0), "f"(v1), "f"(v2), "f"(v3), "r"(barrier)
                 : "memory");
}

// Barrier::wait for bytes or arrivals of other blocks: what they wrote is visible afterwards.
__device__ inline void wait_in_cluster(const Barrier& barrier, u32 parity) {
    u32 over = 0;
    while (over == 0) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(barrier.address()), "r"(parity)
            : "memory");
    }
}

}  // namespace tilewright
