// Copies between global and shared memory without a tensor map: runs of bytes by the copy engine, single words where it asks
// for more alignment, pieces of 16 bytes that a thread fetches for itself; and the flags in global memory that put the
// copies of different blocks into an order.
// [PTX ISA: cp.async.bulk, cp.reduce.async.bulk, cp.async, cp.async.mbarrier.arrive, cp.async.wait_group, ld.acquire]
//
// Addresses and sizes of runs are multiples of 16 bytes.  Stores and sums form the groups of tma_commit(), as in tma.cuh.
#pragma once

#include <tilewright/tma.cuh>

namespace tilewright {

// The bytes are counted by `full`, which must have been told with expect().
__device__ inline void bulk_load(void* to, const void* from, u32 bytes, Barrier& full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(full.address())
                 : "memory");
}

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

// Pieces: no other thread reads them, so that a thread's own wait is all there is to synchronise, and it has more on its way
// than its registers hold.
constexpr u32 kPieceBytes = 16;

// Zeros if it is not `there`; then nothing is read.  Past the L1.
__device__ inline void copy_piece(u32 to, const void* from, bool there, Keep keep) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(there ? kPieceBytes : 0), "l"(u64(keep))
                 : "memory");
}

// What this thread has asked for since the last time is a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kLeft of this thread's groups have yet to land.
template <u32 kLeft> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ inline void load_piece(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline float load_word(u32 address) {
    float word;
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(word) : "r"(address) : "memory");
    return word;
}

// The line at an address comes to the L2.  Returns nothing, so that it may run ahead of the kernel before.
__device__ inline void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

}  // namespace tilewright
