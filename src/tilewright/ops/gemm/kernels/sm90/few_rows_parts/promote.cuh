// Promotion of 8-bit products.  The tensor cores accumulate with about 14 bits, so each 128 of K, which share their scales,
// are multiplied into a separate accumulator, and then promoted to float32: acc += scale * products.
//
// Two such accumulators take turns: while one is promoted, the tensor cores work on the other.  A stage is one turn of both.
#pragma once

#include "ring.cuh"

namespace tilewright {

// The scales of 128 x 128 blocks of weights: a float for each 128 of K of a tile.  Each lane holds one of kWindow
// consecutive scales, and loads one of the next window while these are used: a load from memory takes as long as that many
// k blocks.  Empty for other scalings.
template <typename Config> class BlockScales {
    static constexpr bool kByBlock = Layout<Config>::kScaling == Scaling::TokenByBlock;
    static constexpr u32 kWindow = 32;
    static_assert(kWindow % kChunks == 0, "a k block takes all of its scales from one window");

  public:
    // `first_window`: what load() returned for this tile, called early.
    __device__ BlockScales(const Operands<Config>& operands, const Tile& tile, float first_window)
        : operands_(operands), tile_(tile), window_(first_window), next_window_(load(operands, tile, kWindow)) {}

    // This lane's scale in the window that begins `skip` scales after the first one of this block's K.
    __device__ static float load(const Operands<Config>& operands, const Tile& tile, u32 skip) {
        if constexpr (kByBlock) {
            const u32 block = operands.k_block_begin * kChunks + skip + lane_index();
            const bool in_range = block < end(operands);
            // Not __ldg: its data must be constant while the kernel runs, and this kernel overlaps the previous one
            return in_range ? row(operands, tile)[block] : 0;
        }
        return 0;
    }

    // Prefetches them to the L2 before they may be read; called by one thread.
    __device__ static void prefetch_l2(const Operands<Config>& operands, const Tile& tile) {
        if constexpr (kByBlock) {
            constexpr u32 kSector = 32 / sizeof(float);
            for (u32 block = operands.k_block_begin * kChunks; block < end(operands); block += kSector) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(row(operands, tile) + block) : "memory");
            }
        }
    }

    // Gives the scales of a k block; called by whole warps, with the k blocks in order.
    __device__ void get(u32 k_block, float (&scales)[kChunks]) {
        if constexpr (kByBlock) {
            const u32 skip = (k_block - operands_.k_block_begin) * kChunks;
            if (skip > 0 && skip % kWindow == 0) {
                window_ = next_window_;
                next_window_ = load(operands_, tile_, skip + kWindow);
            }
#pragma unroll
            for (u32 i = 0; i < kChunks; ++i) scales[i] = __shfl_sync(~0u, window_, skip % kWindow + i);
        }
    }

  private:
    __device__ static u32 end(const Operands<Config>& operands) {
        return min(operands.k_block_end * kChunks, (operands.k + 127) / 128);
    }

    __device__ static const float* row(const Operands<Config>& operands, const Tile& tile) {
        return operands.scale_b + tile.weights * operands.scale_b_batch + tile.column / 128 * operands.scale_b_row;
    }

    const Operands<Config>& operands_;
    const Tile& tile_;
    float window_, next_window_;
};

// The scales that a thread needs to promote a chunk: of the tokens of its columns, and of its two rows of weights.
template <typename Config> struct Factors {
    using Shape = Layout<Config>;
    static constexpr bool kByToken = Shape::kScaling == Scaling::TokenByToken;
    float token[Shape::kScaledAlongK ? Config::kTokens / 4 : 1];
    float row[2];

    // `scales`: of this stage; `first_row`: the tile's; `block_scale`: of all weights of the chunk, if they share one.
    __device__ Factors(const u8* scales, u32 first_row, u32 chunk, float block_scale) {
        // Loads two neighbours at once if the tile begins where the copy does
        struct alignas(Config::kUnalignedRows ? 4 : 8) Pair { float values[2]; };
        const float* const tokens = reinterpret_cast<const float*>(scales) + chunk * Shape::kTokenPitch +
                                    (Config::kUnalignedRows ? first_row % kScaleAlign : 0) + fragment_column();
        if constexpr (Shape::kScaledAlongK) {
#pragma unroll
            for (u32 i = 0; i < Config::kTokens / 8; ++i) {
                const Pair pair = *reinterpret_cast<const Pair*>(tokens + 8 * i);
                token[2 * i] = kByToken ? pair.values[0] : block_scale * pair.values[0];
                token[2 * i + 1] = kByToken ? pair.values[1] : block_scale * pair.values[1];
            }
        }
        if constexpr (kByToken) {
            const auto weights = reinterpret_cast<const float*>(scales + Shape::kWeightScalesOffset) + chunk * kBlockN;
            row[0] = weights[fragment_row()], row[1] = weights[fragment_row() + 8];
        }
    }

    // acc += scales * products.
    __device__ void promote(float (&acc)[Config::kTokens / 2], const float (&products)[Config::kTokens / 2]) const {
#pragma unroll
        for (u32 i = 0; i < Config::kTokens / 2; ++i) {
            if constexpr (!Shape::kScaledAlongK) {
                acc[i] += products[i];
            } else {
                const float scale = token[i / 4 * 2 + i % 2];
                acc[i] += (kByToken ? scale * row[i % 4 / 2] : scale) * products[i];
            }
        }
    }
};

// acc = this block's k blocks of a tile, with scales applied.
//
// The WGMMAs of one 128 of K run while others are promoted.  A block that has its multiprocessor to itself does so across
// stages, and releases a stage only once the next has landed.  With more blocks a multiprocessor, these fill the pauses, and
// their rings are too short to hold a stage longer.
template <typename Config>
__device__ inline void multiply_and_promote(
    float (&acc)[Config::kTokens / 2], const Stages<Config>& stages, Ring<Config::kStages>& ring,
    const Operands<Config>& operands, const Tile& tile, float first_block_scale) {
    static_assert(kChunks == 2, "two accumulators of products take turns");
    constexpr bool kOneCta = Config::kCtas == 1;
    constexpr u32 kChunkK = Layout<Config>::kChunkK;
    using Products = float[Config::kTokens / 2];
    Products even, odd;
#pragma unroll
    for (u32 i = 0; i < Config::kTokens / 2; ++i) acc[i] = 0;
    BlockScales<Config> blocks(operands, tile, first_block_scale);
    float block_scales[kChunks] = {};  // of the weights of a stage

    const auto issue = [&](Products& products, u32 chunk) {
        wgmma_fence();
        multiply_chunk<Config>(products, stages.operands(ring.stage), chunk, false);
        wgmma_commit();
    };
    const auto wait_and_issue_even = [&](u32 k_block) {
        blocks.get(k_block, block_scales);
        stages.full[ring.stage].wait(ring.parity);
        issue(even, 0);
    };
    const auto load_factors = [&](u32 chunk) {
        return Factors<Config>(stages.scales(ring.stage), tile.row, chunk, block_scales[chunk]);
    };
    // All lanes read scales with ordinary loads: __syncwarp orders these before the arrival, which lane 0 makes for all
    const auto release = [&](u32 stage) {
        if constexpr (Layout<Config>::kScaledAlongK) __syncwarp();
        if (lane_index() == 0) stages.empty[stage].arrive();
    };

    // The second chunk of the last stage may lie beyond K.  That case is handled after the loop: only so does ptxas leave
    // WGMMAs in flight from one iteration to the next; otherwise it serializes them all (C7514).
    const u32 chunks = min(operands.k_block_end * kChunks, (operands.k + kChunkK - 1) / kChunkK) -
                       operands.k_block_begin * kChunks;
    wait_and_issue_even(operands.k_block_begin);
    u32 chunk = 1;  // chunks issued so far; the last of them is not promoted yet
    for (; chunk + kChunks <= chunks; chunk += kChunks) {
        // Issue the odd chunk of this stage
        const u32 stage = ring.stage;
        issue(odd, 1);
        const Factors<Config> even_factors = load_factors(0), odd_factors = load_factors(1);

        // Promote the even chunk while the odd one is on the tensor cores
        wgmma_wait<1>(even);
        even_factors.promote(acc, even);
        if constexpr (!kOneCta) {
            wgmma_wait<0>(odd);
            release(stage);
            odd_factors.promote(acc, odd);
        }

        // Issue the even chunk of the next stage
        ring.advance();
        wait_and_issue_even(operands.k_block_begin + (chunk + 1) / kChunks);

        // Promote the odd chunk while the next even one is on the tensor cores
        if constexpr (kOneCta) {
            wgmma_wait<1>(odd);
            release(stage);
            odd_factors.promote(acc, odd);
        }
    }

    // Promote the chunks of the last stage
    const Factors<Config> even_factors = load_factors(0);
    if (chunk < chunks) {
        issue(odd, 1);
        const Factors<Config> odd_factors = load_factors(1);
        wgmma_wait<1>(even);
        even_factors.promote(acc, even);
        wgmma_wait<0>(odd);
        odd_factors.promote(acc, odd);
    } else {
        wgmma_wait<0>(even);
        even_factors.promote(acc, even);
    }
    release(ring.stage);
    ring.advance();
}

}  // namespace tilewright
