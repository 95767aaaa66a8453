// Copies between global and shared memory without a tensor map: cp.async.bulk for aligned runs of bytes, cp.async for single
// words.  Also flags in global memory, by which blocks order their copies.
// [PTX ISA: cp.async.bulk, cp.reduce.async.bulk, cp.async, cp.async.mbarrier.arrive, ld.acquire]
//
// Addresses and sizes of bulk copies are multiples of 16 bytes.  Bulk stores and reductions belong to the bulk groups that
// tma_commit() of tma.cuh closes.
#pragma once

#include <tilewright/mbarrier.cuh>

namespace tilewright {

// Counts its bytes at `barrier`, which announced them.
__device__ inline void bulk_load(void* to, const void* from, u32 bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(barrier.address())
                 : "memory");
}

__device__ inline void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// Adds floats in shared memory to floats in global memory.
__device__ inline void bulk_reduce_add(float* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// Waits until at most kPending of this thread's bulk groups have not yet written global memory.
template <u32 kPending> __device__ inline void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads 16 bytes that are read once, past the L1.
struct alignas(16) Word4 { u32 x[4]; };
__device__ inline Word4 load_once(const void* from) {
    Word4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x[0]), "=r"(w.x[1]), "=r"(w.x[2]), "=r"(w.x[3])
                 : "l"(from));
    return w;
}

// Copies 4 bytes, or writes zeros if not `valid`; then `from` is not read.
__device__ inline void cp_async_zfill(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
}

// Copies 16 bytes past the L1, or writes zeros if not `valid`; then `from` is not read.  The L2 evicts the line first: for
// what is read once.
__device__ inline void cp_async_16_once(u32 to, const void* from, bool valid) {
    constexpr u64 kEvictFirst = 0x12F0000000000000;  // as createpolicy encodes it
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0),
                 "l"(kEvictFirst)
                 : "memory");
}

// Fetches the line of an address into the L2.  Safe for memory that an earlier kernel still writes: the L2 is coherent.
__device__ inline void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Groups of this thread's copies: a commit closes one, the wait returns when all but the last kPending are complete.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 kPending> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at `barrier` when all earlier cp.async of this thread have completed.  It is one of the arrivals that the barrier
// was initialised with.
__device__ inline void cp_async_mbarrier_arrive_noinc(Barrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address()) : "memory");
}

// An acquire load and a release store at GPU scope: a thread that loads the stored value also sees all writes that the storing
// thread had made or seen.
__device__ inline int load_acquire(const int* flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ inline void store_release(int* flag, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Orders async-proxy copies and flags: goes between bulk_wait and store_release, and between load_acquire and the next copy.
// [fence.proxy.async]
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace tilewright
