// Barriers in shared memory that count arrivals and bytes, and the ring of stages they guard.  [PTX ISA: mbarrier]
//
// A phase ends when the expected number of threads arrived and all announced bytes landed; then the next phase begins
// and the barrier's parity flips.  `wait(parity)` returns once the phase of that parity is over; so on a fresh barrier
// wait(1) returns at once and wait(0) waits for the first phase.
//
// A ring of kStages has two barriers a stage.  full: the producer announces bytes, the copy engine delivers them,
// consumers wait.  empty: consumers arrive when they have read, the producer waits before it overwrites:
//
//     Ring<kStages> ring;                                  // in the producer        // in a consumer
//     for (...; ring.advance()) {                          empty[s].wait(parity ^ 1) full[s].wait(parity)
//         ... ring.stage, ring.parity                      full[s].expect(bytes)     ... read the stage
//     }                                                    tma_load(..., full[s])    empty[s].arrive()
#pragma once

#include <tilewright/ptx.cuh>

namespace tilewright {

struct Barrier {
    u64 state;

    // By one thread, followed by `fence_barrier_init` and a barrier of the block (of the cluster, if others arrive).
    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }

    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }

    // Arrives, and makes the phase wait for `bytes` more from the copy engine.
    __device__ void expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }

    // Arrives at the same barrier of block `rank` of the cluster.
    __device__ void arrive_in_cluster(u32 rank) {
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(address()),
            "r"(rank)
            : "memory");
    }

    // The same without a fence of the whole GPU (MEMBAR.ALL.GPU) for ordinary writes: for one who has only read, with
    // instructions that are over (wgmma_wait), and says that the stage may be overwritten.
    __device__ void free_in_cluster(u32 rank) {
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(address()),
            "r"(rank)
            : "memory");
    }

    __device__ void wait(u32 parity) {
        while (!try_wait(parity)) {
        }
    }

    // False after a time the hardware chooses, during which the thread slept.
    __device__ bool try_wait(u32 parity) {
        u32 over;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(address()), "r"(parity)
            : "memory");
        return over != 0;
    }

    __device__ u32 address() const { return shared_address(&state); }
};

// Makes initialised barriers visible to the copy engine and to the other blocks of a cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A position in a ring of stages: `parity` flips with every turn.
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
