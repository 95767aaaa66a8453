// D (M x N) = A (M x K) * B (N x K)^T, one 64 x kN tile per block: the smallest kernel with every part of a Hopper GEMM.
//
// Warps 0 to 3 are the math warpgroup; one thread of warp 4 is the producer, which fills a pipeline of kStages stages of
// 128 bytes of K.  A float result is stored by the threads, a 16-bit one through shared memory by the TMA.
//
// Config: kN, kStages, Element, Out.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(160, 1) wgmma_tile(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, typename Config::Out* d, int m, int n, int k) {
    using Element = typename Config::Element;
    using Out = typename Config::Out;
    constexpr u32 kN = Config::kN, kStages = Config::kStages;
    constexpr u32 kSpan = 128;  // bytes of K in a stage, and the swizzle
    constexpr u32 kBlockK = kSpan / sizeof(Element);
    constexpr u32 kBytesA = 64 * kSpan, kBytesB = kN * kSpan;
    static_assert(kBytesB % 1024 == 0, "each tile begins at a multiple of 1024 bytes, where the swizzle repeats");

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, then kStages of B, then D
    u8* const stages_b = stages_a + kStages * kBytesA;
    u8* const strips_d = stages_b + kStages * kBytesB;
    __shared__ Barrier full[kStages], empty[kStages];

    const u32 row = blockIdx.x * 64, column = blockIdx.y * kN;
    const u32 k_blocks = (k + kBlockK - 1) / kBlockK;  // the TMA reads zeros beyond K

    // Initialise the barriers
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(4);  // one arrival per warp
        }
        fence_barrier_init();
    }
    __syncthreads();

    // Producer: load A and B stage by stage
    if (warp_index() == 4) {
        if (!elect_one()) return;
        Ring<kStages> ring;
        for (u32 k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
            const u32 s = ring.stage;
            empty[s].wait(ring.parity ^ 1);
            full[s].arrive_and_expect_tx(kBytesA + kBytesB);
            tma_load(stages_a + s * kBytesA, map_a, full[s], k_block * kBlockK, row);
            tma_load(stages_b + s * kBytesB, map_b, full[s], k_block * kBlockK, column, CacheHint::EvictLast);
        }
        return;
    }

    // Math warpgroup
    float acc[kN / 2];
    Ring<kStages> ring;
    for (u32 k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
        const u32 s = ring.stage;
        // Wait for the stage
        full[s].wait(ring.parity);

        // Multiply
        const u64 a = wgmma_descriptor<kSpan>(stages_a + s * kBytesA);
        const u64 b = wgmma_descriptor<kSpan>(stages_b + s * kBytesB);
        wgmma_fence();
#pragma unroll
        for (u32 byte = 0; byte < kSpan; byte += kWgmmaKBytes) {
            wgmma<kN, Element>(acc, wgmma_advance(a, byte), wgmma_advance(b, byte), k_block > 0 || byte > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(acc);

        // Release the stage
        if (lane_index() == 0) empty[s].arrive();
    }

    // Store D
    if constexpr (Same<Out, float>::value) {
        write_tile(acc, d, n, row, column, m, n);
    } else {
        stage_tile<Out, kSpan>(acc, strips_d);
        fence_proxy_async_shared();
        named_barrier_sync(1, 128);
        if (threadIdx.x == 0) {
            for (u32 strip = 0; strip < kN * sizeof(Out) / kSpan; ++strip) {
                tma_store(map_d, strips_d + strip * 64 * kSpan, column + strip * kSpan / sizeof(Out), row);
            }
            tma_commit();
            tma_wait_read<0>();
        }
    }
}

}  // namespace tilewright
