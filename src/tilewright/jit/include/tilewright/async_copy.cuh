// Single words from global to shared memory without a register between, where the copy engine asks for more alignment.
// [PTX ISA: cp.async, cp.async.mbarrier.arrive]
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

// One word of four bytes, or zero if it is not `there`; then nothing is read.
__device__ inline void copy_word(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}

// Arrives at `barrier` when all copies that this thread has asked for have landed; one of the arrivals it was made for.
__device__ inline void arrive_after_copies(Barrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address()) : "memory");
}

}  // namespace tilewright
