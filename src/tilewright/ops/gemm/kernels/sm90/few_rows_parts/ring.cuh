// The ring of stages: how the producer loads it, and how the math warpgroup multiplies it.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

#include "layout.cuh"
#include "schedulers.cuh"

namespace tilewright {

// The inputs.  Maps of absent scales are never used.
template <typename Config> struct Operands {
    const TensorMap &weights, &tokens;
    const TensorMap &weight_scales, &token_scales;  // (K / 128, rows): one scale for each 128 of K of a row
    const float *scale_a, *scale_b;
    i64 scale_a_batch, scale_b_batch, scale_b_row;
    u32 k, token_rows;               // K, and rows of a box of tokens
    u32 k_block_begin, k_block_end;  // the k blocks of this block of the cluster
    u32 weight_rows;                 // kHalves: of one matrix of weights
};

template <typename Config> struct Stages {
    u8* shared;
    Barrier *full, *empty;  // [kStages]

    __device__ u8* operands(u32 stage) const { return shared + stage * Layout<Config>::kStage; }
    __device__ u8* scales(u32 stage) const {
        return shared + Layout<Config>::kScalesOffset + stage * Layout<Config>::kStageScales;
    }
};

// Prefetches the weights of the first `count` stages of a tile to the L2.
template <typename Config>
__device__ inline void prefetch_l2(const Operands<Config>& operands, const Tile& tile, u32 count) {
    using Shape = Layout<Config>;
    const u32 end = min(operands.k_block_end, operands.k_block_begin + count);
    for (u32 k_block = operands.k_block_begin; k_block < end; ++k_block) {
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            const u32 k = k_block * Shape::kBlockK + chunk * Shape::kChunkK;
            if constexpr (Config::kMnMajor) tma_prefetch_l2(operands.weights, tile.column, k, tile.weights);
            else tma_prefetch_l2(operands.weights, k, tile.column, tile.weights);
        }
    }
}

// Loads all stages of a tile; called by one thread.
template <typename Config>
__device__ inline void load_tile(
    const Stages<Config>& stages, Ring<Config::kStages>& ring, const Operands<Config>& operands, const Tile& tile) {
    using Shape = Layout<Config>;
    for (u32 k_block = operands.k_block_begin; k_block < operands.k_block_end; ++k_block, ring.advance()) {
        u8* const stage = stages.operands(ring.stage);
        Barrier& full = stages.full[ring.stage];

        // Wait until the consumers have released the stage
        stages.empty[ring.stage].wait(ring.parity ^ 1);

        // Issue the TMA loads of weights and tokens; a box at an edge counts in full
        full.arrive_and_expect_tx(Shape::kWeights + kChunks * operands.token_rows * kSpan + Shape::kTokenScales + Shape::kWeightScales);
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            const u32 k = k_block * Shape::kBlockK + chunk * Shape::kChunkK;
            u8* const smem_weights = stage + chunk * kWeightBox;
            if constexpr (Config::kMnMajor) {
                tma_load(smem_weights, operands.weights, full, tile.column, k, tile.weights, CacheHint::EvictFirst);
            } else if constexpr (Config::kHalves) {
                tma_load(smem_weights, operands.weights, full, k, 0, tile.weights * operands.weight_rows + tile.column / 2,
                         CacheHint::EvictFirst);
            } else {
                tma_load(smem_weights, operands.weights, full, k, tile.column, tile.weights, CacheHint::EvictFirst);
            }
            tma_load(stage + Shape::kWeights + chunk * Shape::kTokenBox, operands.tokens, full, k, tile.row, tile.tokens,
                     CacheHint::EvictLast);
        }

        // Issue the TMA loads of the scales
        if constexpr (Shape::kTokenScales > 0) {
            tma_load(stages.scales(ring.stage), operands.token_scales, full, tile.row / kScaleAlign * kScaleAlign,
                     k_block * kChunks, tile.tokens, CacheHint::EvictLast);
        }
        if constexpr (Shape::kWeightScales > 0) {
            tma_load(stages.scales(ring.stage) + Shape::kWeightScalesOffset, operands.weight_scales, full, tile.column,
                     k_block * kChunks, tile.weights, CacheHint::EvictFirst);
        }
    }
}

// Issues the WGMMAs of chunk `chunk` of a stage: acc = or, if `add`, acc += their products.
template <typename Config>
__device__ inline void multiply_chunk(float (&acc)[Config::kTokens / 2], const u8* stage, u32 chunk, bool add) {
    using Shape = Layout<Config>;
    using Element = typename Config::Element;
    const u64 desc_a = wgmma_descriptor<kSpan>(stage + chunk * kWeightBox, 8 * kSpan, kWeightBox);
    const u64 desc_b = wgmma_descriptor<kSpan>(stage + Shape::kWeights + chunk * Shape::kTokenBox);
#pragma unroll
    for (u32 k = 0; k < Shape::kChunkK / kWgmmaK<Element>; ++k) {
        // Along K: 32 bytes of a row.  Along N (16 bits): 16 rows of 128 bytes
        constexpr u32 kAdvance = Config::kMnMajor ? 16 * kSpan : kWgmmaKBytes;
        wgmma<Config::kTokens, Element, Config::kMnMajor ? Major::Mn : Major::K>(
            acc, wgmma_advance(desc_a, k * kAdvance), wgmma_advance(desc_b, k * kWgmmaKBytes), add || k > 0);
    }
}

// acc = this block's k blocks of a tile, accumulated by the tensor cores.
//
// A block that has its multiprocessor to itself keeps one group of WGMMAs in flight while it waits for the next stage.  With
// more blocks a multiprocessor, these fill the pauses, and their rings are too short to hold a stage longer.
template <typename Config>
__device__ inline void multiply(
    float (&acc)[Config::kTokens / 2], const Stages<Config>& stages, Ring<Config::kStages>& ring,
    const Operands<Config>& operands) {
    constexpr bool kOneCta = Config::kCtas == 1;
    u32 last_stage = 0;
    for (u32 k_block = operands.k_block_begin; k_block < operands.k_block_end; ++k_block, ring.advance()) {
        const u8* const stage = stages.operands(ring.stage);
        // Wait for the stage
        stages.full[ring.stage].wait(ring.parity);

        // Issue and commit the WGMMAs of the stage
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            multiply_chunk<Config>(acc, stage, chunk, k_block > operands.k_block_begin || chunk > 0);
        }
        wgmma_commit();

        // Release the stage that has been read: the previous one, or this one
        if constexpr (kOneCta) {
            wgmma_wait<1>();
            if (k_block > operands.k_block_begin && lane_index() == 0) stages.empty[last_stage].arrive();
            last_stage = ring.stage;
        } else {
            wgmma_wait<0>(acc);
            if (lane_index() == 0) stages.empty[ring.stage].arrive();
        }
    }
    if constexpr (kOneCta) {
        wgmma_wait<0>(acc);
        if (lane_index() == 0) stages.empty[last_stage].arrive();
    }
}

}  // namespace tilewright
