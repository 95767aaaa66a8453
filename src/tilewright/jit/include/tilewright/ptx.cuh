// Single instructions that C++ has no word for.  PTX ISA sections in brackets.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// A generic pointer to shared memory as the 32-bit address that PTX wants.
__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Index of this thread's warp, as one value a warp: the compiler may then keep what follows in uniform registers.
__device__ inline u32 warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

__device__ inline u32 lane_index() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// True in exactly one lane of a converged warp.  [elect.sync]
__device__ inline bool elect_one() {
    u32 chosen;
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
    return chosen != 0;
}

// Waits for `threads` threads (a multiple of 32) that name the same `barrier`, 1 to 15; 0 is __syncthreads.  [bar.sync]
__device__ inline void sync_threads(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts this thread for those who wait at `barrier`, and goes on.  [bar.arrive]
__device__ inline void arrive_at(u32 barrier, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Between ordinary writes to shared memory and a read of them by the copy engine or the tensor cores: in each writing
// thread, before the barrier.  [fence.proxy.async]
__device__ inline void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Moves registers between the warpgroups of a kernel compiled with __launch_bounds__(threads, 1).  [setmaxnreg]
template <u32 kRegisters> __device__ inline void give_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24..256 by 8");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters> __device__ inline void take_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24..256 by 8");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Clusters.  [barrier.cluster, %cluster_ctarank]
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Programmatic dependent launch.  [griddepcontrol]
// Until the kernel before has ended: in each warp, before it reads or writes global memory that an earlier kernel may use;
// and in each grid, even where nothing is to be done, so that the kernel after, which waits for this one, waits for all.
// When all blocks have said the second, the kernel after may start; it waits for this one's end itself, so any time will do.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements to shared memory.  Lane i gives the address of row i % 8 of matrix i / 8, 16 bytes
// aligned; register m of lane i holds elements (i / 4, 2 * (i % 4)) and its right neighbour of matrix m.  [stmatrix]
__device__ inline void store_matrices(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

}  // namespace tilewright
