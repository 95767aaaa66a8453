// Copies from global to shared memory that a thread makes for itself: 16 bytes each, which no other thread reads, so that
// its own wait is all there is to synchronise.  Through them a thread has more on its way than its registers hold.
// [PTX ISA: cp.async, cp.async.commit_group, cp.async.wait_group, prefetch]
#pragma once

#include <tilewright/ptx.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

constexpr u32 kPieceBytes = 16;

// One piece, or zeros if it is not `there`; then nothing is read.  Past the L1.
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

// The line at an address comes to the L2.  Returns nothing, so that it may run ahead of the kernel before.
__device__ inline void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

}  // namespace tilewright
