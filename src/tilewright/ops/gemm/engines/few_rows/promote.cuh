// Sums of 8-bit products.  The tensor cores add them with about 14 bits, so each 128 of K, which share their scales, are
// summed by themselves and then added to float32: sums += scale * products.
//
// Two such sums take turns: while one is promoted, the tensor cores work on the other.  A stage is one turn of both.
#pragma once

#include "ring.cuh"

namespace tilewright {

// The weights' scales where 128 rows share them: one float for each 128 of K of a tile, asked for a step ahead.  Of other
// scales this is nothing.
template <typename Config> struct BlockScales {
    const float* row;
    u32 count;  // of blocks of K
    float next[kChunks] = {};

    __device__ BlockScales(const Operands<Config>& in, const Tile& at)
        : row(in.scale_b + at.weights * in.scale_b_batch + at.column / 128 * in.scale_b_row), count((in.depth + 127) / 128) {
        ask(in.begin);
    }
    __device__ void ask(u32 step) {
        if constexpr (Layout<Config>::kScaling == Scaling::TokenByBlock) {
#pragma unroll
            for (u32 i = 0; i < kChunks; ++i) {
                const u32 block = step * kChunks + i;
                next[i] = block < count ? __ldg(row + block) : 0;
            }
        }
    }
};

// What a thread needs to promote the sums of a chunk: of the tokens of its columns, and of its two rows of weights.
template <typename Config> struct Factors {
    using Shape = Layout<Config>;
    static constexpr bool kRows = Shape::kScaling == Scaling::TokenByToken;
    float token[Shape::kScaledAlongK ? Config::kTokens / 4 : 1];
    float row[2];

    // `scales`: of this stage; `first`: row of the tile's first token; `common`: of all weights of the chunk.
    __device__ Factors(const u8* scales, u32 first, u32 chunk, float common) {
        // Two neighbours at once, where the tile begins with the copy
        struct alignas(Config::kAnyRow ? 4 : 8) Pair { float values[2]; };
        const float* const tokens = reinterpret_cast<const float*>(scales) + chunk * Shape::kTokenPitch +
                                    (Config::kAnyRow ? first % kScaleAlign : 0) + fragment_column();
        if constexpr (Shape::kScaledAlongK) {
#pragma unroll
            for (u32 i = 0; i < Config::kTokens / 8; ++i) {
                const Pair pair = *reinterpret_cast<const Pair*>(tokens + 8 * i);
                token[2 * i] = kRows ? pair.values[0] : common * pair.values[0];
                token[2 * i + 1] = kRows ? pair.values[1] : common * pair.values[1];
            }
        }
        if constexpr (kRows) {
            const float* const weights = reinterpret_cast<const float*>(scales + Shape::kWeightScalesAt) + chunk * kBlockN;
            row[0] = weights[fragment_row()], row[1] = weights[fragment_row() + 8];
        }
    }

    // sums += scales * products.
    __device__ void promote(float (&sums)[Config::kTokens / 2], const float (&products)[Config::kTokens / 2]) const {
#pragma unroll
        for (u32 i = 0; i < Config::kTokens / 2; ++i) {
            if constexpr (!Shape::kScaledAlongK) {
                sums[i] += products[i];
            } else {
                const float scale = token[i / 4 * 2 + i % 2];
                sums[i] += (kRows ? scale * row[i % 4 / 2] : scale) * products[i];
            }
        }
    }
};

// sums = this block's part of K of a tile.
template <typename Config>
__device__ inline void multiply_and_promote(
    float (&sums)[Config::kTokens / 2], const Stages<Config>& stages, Ring<Config::kStages>& ring,
    const Operands<Config>& in, const Tile& at) {
    static_assert(kChunks == 2, "two sums of products take turns");
    float even[Config::kTokens / 2], odd[Config::kTokens / 2];
#pragma unroll
    for (u32 i = 0; i < Config::kTokens / 2; ++i) sums[i] = 0;
    BlockScales<Config> blocks(in, at);
    for (u32 step = in.begin; step < in.end; ++step, ring.advance()) {
        const u8 *const stage = stages.operands(ring.stage), *const scales = stages.scales(ring.stage);
        const float of_even = blocks.next[0], of_odd = blocks.next[1];
        blocks.ask(step + 1);
        stages.full[ring.stage].wait(ring.parity);
        // No group stays in flight beyond the loop's end: the assembler would serialise them all (C7514)
        wgmma_fence();
        multiply_chunk<Config>(even, stage, 0, false);
        wgmma_commit();
        multiply_chunk<Config>(odd, stage, 1, false);
        wgmma_commit();
        const Factors<Config> even_factors(scales, at.row, 0, of_even);
        wgmma_wait<1>(even);
        even_factors.promote(sums, even);
        const Factors<Config> odd_factors(scales, at.row, 1, of_odd);
        wgmma_wait<0>(odd);
        if (lane_index() == 0) stages.empty[ring.stage].arrive();
        odd_factors.promote(sums, odd);
    }
}

}  // namespace tilewright
