// D (64 x 128) = A^T B for A (64 x 64) and B (64 x 128) whose rows are K: both operands run along M or N in shared memory.
// Proves wgmma_descriptor for Major::Mn, leading and stride, in one block and one step of 64 rows.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(128, 1) product_mn(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* d) {
    using Element = typename Config::Element;
    constexpr u32 kBox = 64 * 128;  // bytes of a box: 64 rows of K, each 64 elements of M or N
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        full.init(1);
        fence_barrier_init();
        full.arrive_and_expect_tx(3 * kBox);
        tma_load(shared, map_a, full, 0, 0);
        tma_load(shared + kBox, map_b, full, 0, 0);
        tma_load(shared + 2 * kBox, map_b, full, 64, 0);
    }
    __syncthreads();
    full.wait(0);

    float sums[64];
    const u64 a = wgmma_descriptor<128>(shared, 1024, kBox);
    const u64 b = wgmma_descriptor<128>(shared + kBox, 1024, kBox);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {  // 16 rows of K are two atoms
        wgmma<128, Element, Major::Mn, Major::Mn>(
            sums, wgmma_advance(a, step * 2048), wgmma_advance(b, step * 2048), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(sums);
    write_tile(sums, d, 128, 0, 0, 64, 128);
}

}  // namespace tilewright
