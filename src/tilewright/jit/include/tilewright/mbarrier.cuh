// Barriers in shared memory that count arrivals and bytes, and the pipeline stages they guard.  [PTX ISA: mbarrier]
//
// A phase completes when the expected number of threads has arrived and all announced bytes have landed; then the next
// phase begins and the parity flips.  `wait(parity)` returns once the phase of that parity is complete: on a fresh barrier
// wait(1) returns at once and wait(0) waits for the first phase.
//
// A pipeline of kStages has two barriers per stage.  full: the producer announces bytes, the TMA delivers them, consumers
// wait.  empty: consumers arrive when they have read the stage, the producer waits before it overwrites it:
//
//     Ring<kStages> ring;               // in the producer                   // in a consumer
//     for (...; ring.advance()) {       empty[s].wait(parity ^ 1)            full[s].wait(parity)
//         ... ring.stage, ring.parity   full[s].arrive_and_expect_tx(bytes)  ... read the stage
//     }                                 tma_load(..., full[s])               empty[s].arrive()
#pragma once

#include <tilewright/ptx.cuh>

namespace tilewright {

struct Barrier {
    u64 state;

    // Called by one thread; follow it by fence_barrier_init and a barrier of the block (of the cluster, if other blocks
    // arrive at this one).
    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }

    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }

    // Arrives, and makes the phase wait for `bytes` more bytes from the TMA.
    __device__ void arrive_and_expect_tx(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }

    // Arrives at this barrier's counterpart in block `rank` of the cluster, with release at cluster scope.
    __device__ void arrive_remote(u32 rank) {
        asm volatile(
            "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(address()),
            "r"(rank)
            : "memory");
    }

    // The same without the fence of the whole GPU (MEMBAR.ALL.GPU) that orders earlier writes: for a consumer that has only
    // read the stage, with instructions that are complete (wgmma_wait), and frees it.
    __device__ void arrive_remote_after_reads(u32 rank) {
        asm volatile(
            "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(address()),
            "r"(rank)
            : "memory");
    }

    __device__ void wait(u32 parity) {
        while (!try_wait(parity)) {
        }
    }

    // Sleeps until the phase completes (true), or until a time limit of the hardware (false).
    __device__ bool try_wait(u32 parity) {
        u32 done;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(address()), "r"(parity)
            : "memory");
        return done != 0;
    }

    __device__ u32 address() const { return shared_address(&state); }
};

// Makes initialised barriers visible to the TMA and to the other blocks of a cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The stage and phase of one thread's position in the pipeline: `parity` flips each time `stage` wraps around.
template <u32 kStages> struct Ring {
    u32 stage = 0, parity = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace tilewright
