// Wrappers of single PTX instructions.  PTX ISA sections in brackets.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// The 32-bit shared-memory address of a generic pointer.
__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Index of this thread's warp.  The shuffle makes it warp-uniform for the compiler, which may then use uniform registers.
__device__ inline u32 warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

__device__ inline u32 lane_index() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// True in exactly one lane of a converged warp.  [elect.sync]
__device__ inline bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
    return elected != 0;
}

// Waits at named barrier `barrier` (1 to 15; 0 is __syncthreads) for `threads` threads, a multiple of 32.  [bar.sync]
__device__ inline void named_barrier_sync(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at named barrier `barrier` without waiting.  [bar.arrive]
__device__ inline void named_barrier_arrive(u32 barrier, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes ordinary writes to shared memory visible to the async proxy (TMA, WGMMA): each writing thread calls it before the
// barrier.  [fence.proxy.async]
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Set the registers per thread of this warpgroup, of a kernel compiled with __launch_bounds__(threads, 1): lower and release
// the rest, or wait for released ones and raise.  [setmaxnreg]
template <u32 kRegisters> __device__ inline void warpgroup_reg_dealloc() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24..256 by 8");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters> __device__ inline void warpgroup_reg_alloc() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24..256 by 8");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The lesser of two numbers; NaN if one is NaN.  [min.NaN]
__device__ inline float min_nan(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

// The larger of two numbers; NaN if one is NaN.  [max.NaN]
__device__ inline float max_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// The high word of a product, of the 64-bit product: twice as fast as __umulhi on Hopper.
__device__ inline u32 multiply_high(u32 a, u32 b) {
    u32 high;
    asm("{\n.reg .u64 p;\n.reg .u32 low;\nmul.wide.u32 p, %1, %2;\nmov.b64 {low, %0}, p;\n}\n" : "=r"(high) : "r"(a), "r"(b));
    return high;
}

// The dynamic shared memory of the block.
__device__ inline u8* dynamic_shared() {
    extern __shared__ __align__(1024) u8 dynamic_shared_bytes[];
    return dynamic_shared_bytes;
}

// Clusters.  [barrier.cluster, %cluster_ctarank, %cluster_nctarank]
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline u32 cluster_blocks() {
    u32 blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Programmatic dependent launch.  [griddepcontrol]
// griddepcontrol_wait: waits until the previous kernel has completed and its writes are visible.  Every warp calls it
// before it reads or writes global memory that an earlier kernel may use.  Every grid calls it, even one without work: the
// next kernel waits for this one only, and through it for all earlier ones.
// launch_dependents: the next kernel may be scheduled once every block has called it.  That kernel waits for the
// completion of this one itself, so any point of the kernel is safe.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Stores four 8x8 matrices of 16-bit elements to shared memory.  Lane i gives the 16-byte aligned address of row i % 8 of
// matrix i / 8; register m of lane i holds elements (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1) of matrix m.  [stmatrix]
__device__ inline void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

}  // namespace tilewright
