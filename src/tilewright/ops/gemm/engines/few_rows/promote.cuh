// Sums of 8-bit products.  The tensor cores add them with about 14 bits, so each 128 of K, which share their scales, are
// summed by themselves and then added to float32: sums += scale * products.
//
// Two such sums take turns: while one is promoted, the tensor cores work on the other.  A stage is one turn of both.
#pragma once

#include "ring.cuh"

namespace tilewright {

// The weights' scales where 128 rows share them: a float for each 128 of K of a tile.  Each lane has one of kWindow that
// follow each other, and asks for one of the next while these are used: loads from memory take as long as many steps.
// Of other scales this is nothing.
template <typename Config> class BlockScales {
    static constexpr bool kThere = Layout<Config>::kScaling == Scaling::TokenByBlock;
    static constexpr u32 kWindow = 32;
    static_assert(kWindow % kChunks == 0, "a step takes all of its scales from one window");

  public:
    // What load() gave for this tile and the first window, long before, and the tile.
    __device__ BlockScales(const Operands<Config>& in, const Tile& at, float first)
        : in_(in), at_(at), now_(first), next_(load(in, at, kWindow)) {}

    // This lane's scale of the window that begins `skip` blocks after the first of this block of the cluster.
    __device__ static float load(const Operands<Config>& in, const Tile& at, u32 skip) {
        if constexpr (kThere) {
            const u32 block = in.begin * kChunks + skip + lane_index();
            const bool needed = block < min(in.end * kChunks, (in.depth + 127) / 128);
            // Not by __ldg: what that reads must not change while the kernel runs, which begins before the one before ends
            return needed ? row(in, at)[block] : 0;
        }
        return 0;
    }

    // The same to the L2, before they may be read.  By one thread.
    __device__ static void fetch(const Operands<Config>& in, const Tile& at) {
        if constexpr (kThere) {
            constexpr u32 kSector = 32 / sizeof(float);
            for (u32 block = in.begin * kChunks; block < min(in.end * kChunks, (in.depth + 127) / 128); block += kSector) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(row(in, at) + block) : "memory");
            }
        }
    }

    // Those of a step, one after the other from the first on.  By whole warps.
    __device__ void take(u32 step, float (&of_chunk)[kChunks]) {
        if constexpr (kThere) {
            const u32 skip = (step - in_.begin) * kChunks;
            if (skip > 0 && skip % kWindow == 0) {
                now_ = next_;
                next_ = load(in_, at_, skip + kWindow);
            }
#pragma unroll
            for (u32 i = 0; i < kChunks; ++i) of_chunk[i] = __shfl_sync(~0u, now_, skip % kWindow + i);
        }
    }

  private:
    __device__ static const float* row(const Operands<Config>& in, const Tile& at) {
        return in.scale_b + at.weights * in.scale_b_batch + at.column / 128 * in.scale_b_row;
    }

    const Operands<Config>& in_;
    const Tile& at_;
    float now_, next_;
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

//
// The products of one 128 of K are on the tensor cores while others are promoted.  A block alone on its multiprocessor keeps
// to that from stage to stage, and gives a stage back only once the next has landed.  With others beside it they fill the
// pauses, and their rings are too short for that.
template <typename Config>
__device__ inline void multiply_and_promote(
    float (&sums)[Config::kTokens / 2], const Stages<Config>& stages, Ring<Config::kStages>& ring,
    const Operands<Config>& in, const Tile& at, float first_block_scale) {
    static_assert(kChunks == 2, "two sums of products take turns");
    constexpr bool kAlone = Config::kCtas == 1;
    constexpr u32 kChunk = Layout<Config>::kChunk;
    using Sums = float[Config::kTokens / 2];
    Sums even, odd;
#pragma unroll
    for (u32 i = 0; i < Config::kTokens / 2; ++i) sums[i] = 0;
    BlockScales<Config> blocks(in, at, first_block_scale);
    float common[kChunks] = {};  // of the weights of a stage

    const auto start = [&](Sums& products, u32 chunk) {
        wgmma_fence();
        multiply_chunk<Config>(products, stages.operands(ring.stage), chunk, false);
        wgmma_commit();
    };
    const auto land = [&](u32 step) {
        blocks.take(step, common);
        stages.full[ring.stage].wait(ring.parity);
        start(even, 0);
    };
    const auto factors = [&](u32 chunk) {
        return Factors<Config>(stages.scales(ring.stage), at.row, chunk, common[chunk]);
    };
    // Scales are read by all lanes with ordinary loads: __syncwarp puts them before the arrival, which lane 0 makes for all
    const auto release = [&](u32 stage) {
        if constexpr (Layout<Config>::kScaledAlongK) __syncwarp();
        if (lane_index() == 0) stages.empty[stage].arrive();
    };

    // Of the last stage the second half may lie beyond K.  Only with this choice at the end does the assembler leave groups
    // in flight from one turn of the loop to the next; without it, it serialises them all (C7514).
    const u32 chunks = min(in.end * kChunks, (in.depth + kChunk - 1) / kChunk) - in.begin * kChunks;
    land(in.begin);
    u32 chunk = 1;  // begun, and not promoted the last of them
    for (; chunk + kChunks <= chunks; chunk += kChunks) {
        const u32 stage = ring.stage;
        start(odd, 1);
        const Factors<Config> of_even = factors(0), of_odd = factors(1);
        wgmma_wait<1>(even);
        of_even.promote(sums, even);
        if constexpr (!kAlone) {
            wgmma_wait<0>(odd);
            release(stage);
            of_odd.promote(sums, odd);
        }
        ring.advance();
        land(in.begin + (chunk + 1) / kChunks);
        if constexpr (kAlone) {
            wgmma_wait<1>(odd);
            release(stage);
            of_odd.promote(sums, odd);
        }
    }
    const Factors<Config> of_even = factors(0);
    if (chunk < chunks) {
        start(odd, 1);
        const Factors<Config> of_odd = factors(1);
        wgmma_wait<1>(even);
        of_even.promote(sums, even);
        wgmma_wait<0>(odd);
        of_odd.promote(sums, odd);
    } else {
        wgmma_wait<0>(even);
        of_even.promote(sums, even);
    }
    release(ring.stage);
    ring.advance();
}

}  // namespace tilewright
