// Copies between global and shared memory without a tensor map: runs of bytes by the copy engine, single words where it asks
// for more alignment; and the flags in global memory that put the copies of different blocks into an order.
// [PTX ISA: cp.async.bulk, cp.reduce.async.bulk, cp.async, cp.async.mbarrier.arrive, ld.acquire]
//
// Addresses and sizes of runs are multiples of 16 bytes.  Stores and sums form the groups of tma_commit(), as in tma.cuh.
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

__device__ inline void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// Floats, added to those that are there.
__device__ inline void bulk_add(float* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// Until at most kLeft of this thread's groups have yet to be seen in global memory.
template <u32 kLeft> __device__ inline void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

// One word of four bytes, or zero if it is not `there`; then nothing is read.
__device__ inline void copy_word(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}

// Arrives at `barrier` when all copies that this thread has asked for have landed; one of the arrivals it was made for.
__device__ inline void arrive_after_copies(Barrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address()) : "memory");
}

// Who reads a value that set_flag wrote sees all that its writer had seen.
__device__ inline int read_flag(const int* flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ inline void set_flag(int* flag, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Between copies that the copy engine made (and bulk_wait saw) and set_flag; and between read_flag and copies that it makes.
// [fence.proxy.async]
__device__ inline void fence_global_for_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace tilewright
