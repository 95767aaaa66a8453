// The ring of stages: what its producer brings, and how the warpgroup multiplies it.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

#include "layout.cuh"
#include "walks.cuh"

namespace tilewright {

// What is read.  Maps of scales that are not there are never used.
template <typename Config> struct Operands {
    const TensorMap &weights, &tokens;
    const TensorMap &weight_scales, &token_scales;  // (K / 128, rows): one for each 128 of K of a row
    const float *scale_a, *scale_b;
    i64 scale_a_batch, scale_b_batch, scale_b_row;
    u32 depth, token_rows;  // K, and rows of a box of tokens
    u32 begin, end;         // the stages of K of this block
};

template <typename Config> struct Stages {
    u8* shared;
    Barrier *full, *empty;  // [kStages]

    __device__ u8* operands(u32 stage) const { return shared + stage * Layout<Config>::kStage; }
    __device__ u8* scales(u32 stage) const {
        return shared + Layout<Config>::kScales + stage * Layout<Config>::kStageScales;
    }
};

// The weights of the first `count` stages of a tile, to the L2.
template <typename Config> __device__ inline void fetch(const Operands<Config>& in, const Tile& at, u32 count) {
    using Shape = Layout<Config>;
    for (u32 step = in.begin; step < min(in.end, in.begin + count); ++step) {
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            const u32 k = step * Shape::kBlockK + chunk * Shape::kChunk;
            if constexpr (Config::kMnMajor) tma_prefetch_l2(in.weights, at.column, k, at.weights);
            else tma_prefetch_l2(in.weights, k, at.column, at.weights);
        }
    }
}

// All stages of a tile, by one thread.
template <typename Config>
__device__ inline void fill(
    const Stages<Config>& stages, Ring<Config::kStages>& ring, const Operands<Config>& in, const Tile& at) {
    using Shape = Layout<Config>;
    for (u32 step = in.begin; step < in.end; ++step, ring.advance()) {
        u8* const stage = stages.operands(ring.stage);
        Barrier& landed = stages.full[ring.stage];
        stages.empty[ring.stage].wait(ring.parity ^ 1);
        // a box at an edge counts in full
        landed.arrive_and_expect_tx(Shape::kWeights + kChunks * in.token_rows * kSpan + Shape::kTokenScales + Shape::kWeightScales);
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            const u32 k = step * Shape::kBlockK + chunk * Shape::kChunk;
            u8* const to = stage + chunk * kBox;
            if constexpr (Config::kMnMajor) {
                tma_load(to, in.weights, landed, at.column, k, at.weights, CacheHint::EvictFirst);
            } else {
                tma_load(to, in.weights, landed, k, at.column, at.weights, CacheHint::EvictFirst);
            }
            tma_load(stage + Shape::kWeights + chunk * Shape::kTokenBox, in.tokens, landed, k, at.row, at.tokens,
                     CacheHint::EvictLast);
        }
        if constexpr (Shape::kTokenScales > 0) {
            tma_load(stages.scales(ring.stage), in.token_scales, landed, at.row / kScaleAlign * kScaleAlign,
                     step * kChunks, at.tokens, CacheHint::EvictLast);
        }
        if constexpr (Shape::kWeightScales > 0) {
            tma_load(stages.scales(ring.stage) + Shape::kWeightScalesAt, in.weight_scales, landed, at.column,
                     step * kChunks, at.weights, CacheHint::EvictFirst);
        }
    }
}

// sums (+)= chunk `chunk` of a stage, and the group is committed.
template <typename Config>
__device__ inline void multiply_chunk(float (&sums)[Config::kTokens / 2], const u8* stage, u32 chunk, bool add) {
    using Shape = Layout<Config>;
    using Element = typename Config::Element;
    const u64 a = wgmma_descriptor<kSpan>(stage + chunk * kBox, 8 * kSpan, kBox);
    const u64 b = wgmma_descriptor<kSpan>(stage + Shape::kWeights + chunk * Shape::kTokenBox);
#pragma unroll
    for (u32 k = 0; k < Shape::kChunk / kWgmmaK<Element>; ++k) {
        // 32 bytes of a row of K, or, where rows are K (16 bits), 16 rows of 128 bytes
        constexpr u32 kAdvance = Config::kMnMajor ? 16 * kSpan : kWgmmaKBytes;
        wgmma<Config::kTokens, Element, Config::kMnMajor ? Major::Mn : Major::K>(
            sums, wgmma_advance(a, k * kAdvance), wgmma_advance(b, k * kWgmmaKBytes), add || k > 0);
    }
}

// sums = this block's part of K of a tile, summed by the tensor cores.
//
// A block alone on its multiprocessor keeps one group of WGMMA in flight while it waits for the next stage.  With others
// beside it they fill the pauses, and their rings are too short to give a stage away.
template <typename Config>
__device__ inline void multiply(
    float (&sums)[Config::kTokens / 2], const Stages<Config>& stages, Ring<Config::kStages>& ring,
    const Operands<Config>& in) {
    constexpr bool kAlone = Config::kCtas == 1;
    u32 last = 0;  // the stage of the step before
    for (u32 step = in.begin; step < in.end; ++step, ring.advance()) {
        const u8* const stage = stages.operands(ring.stage);
        stages.full[ring.stage].wait(ring.parity);
        wgmma_fence();
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            multiply_chunk<Config>(sums, stage, chunk, step > in.begin || chunk > 0);
        }
        wgmma_commit();
        if constexpr (kAlone) {
            wgmma_wait<1>();  // the step before this one has read its stage
            if (step > in.begin && lane_index() == 0) stages.empty[last].arrive();
            last = ring.stage;
        } else {
            wgmma_wait<0>(sums);
            if (lane_index() == 0) stages.empty[ring.stage].arrive();
        }
    }
    if constexpr (kAlone) {
        wgmma_wait<0>(sums);
        if (lane_index() == 0) stages.empty[last].arrive();
    }
}

}  // namespace tilewright
