// Sizes of a few-rows GEMM, and its layout of shared memory.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

constexpr u32 kBlockN = 64;                     // weight rows of a tile
constexpr u32 kSpan = 128;                      // bytes of a box row, and the swizzle
constexpr u32 kChunks = 2;                      // boxes of a stage, for weights and for tokens
constexpr u32 kWeightBox = kBlockN * kSpan;     // bytes of a box of weights
constexpr u32 kPitch = kBlockN + 4;             // floats from token to token of the staged result: no bank conflicts
constexpr u32 kMathThreads = 128, kThreads = kMathThreads + 32;  // the math warpgroup, and the producer warp
constexpr u32 kParcel = kMathThreads * 16;      // bytes of the accumulators of 64 weight rows and 8 tokens
constexpr u32 kScaleAlign = 4;                  // a copy of scales begins at multiples of four rows, 16 bytes
constexpr u32 kAllBarrier = 1, kMathBarrier = 2;  // named barriers

// The scales: none for 16-bit operands, else numbered as `Scaling` in ops/gemm/scaling.py.
enum class Scaling : int { None = -1, Tensor, Row, TokenByBlock, TokenByToken };

__device__ constexpr u32 round_up(u32 n, u32 multiple) { return (n + multiple - 1) / multiple * multiple; }

// Adds kUnalignedRows to a Config: tiles of tokens may begin at any row, as those of groups do.  Groups choose kHalves.
template <typename Base> struct Batched : Base { static constexpr bool kUnalignedRows = false, kHalves = false; };
template <typename Base> struct Grouped : Base { static constexpr bool kUnalignedRows = true; };
template <typename Base> struct Unscaled : Batched<Base> { static constexpr int kScaling = int(Scaling::None); };

template <typename Config> struct Layout {
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    static constexpr u32 kChunkK = kSpan / sizeof(typename Config::Element);  // K of a box
    static constexpr u32 kBlockK = kChunks * kChunkK;                         // K of a stage
    static constexpr bool kScaledAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;

    static constexpr u32 kWeights = kChunks * kWeightBox, kTokenBox = Config::kTokens * kSpan;
    static constexpr u32 kStage = kWeights + kChunks * kTokenBox;
    // Scales of a stage: [kChunks][kTokenPitch] floats of the tokens, then [kChunks][kBlockN] of the weights.  A TMA
    // box begins at multiples of 16 bytes (else: illegal instruction), so up to three rows before the tile.
    static constexpr u32 kTokenPitch = Config::kTokens + (Config::kUnalignedRows ? kScaleAlign : 0);
    static constexpr u32 kTokenScales = kScaledAlongK ? kChunks * kTokenPitch * 4 : 0;
    static constexpr u32 kWeightScales = kScaling == Scaling::TokenByToken ? kChunks * kBlockN * 4 : 0;
    static constexpr u32 kWeightScalesOffset = round_up(kTokenScales, 128);  // TMA's alignment
    static constexpr u32 kStageScales = kWeightScalesOffset + kWeightScales;

    static constexpr u32 kParcels = Config::kTokens / 8;
    static constexpr u32 kBlockParcels = (kParcels + Config::kSplit - 1) / Config::kSplit;  // that a block owns
    static constexpr u32 kScalesOffset = Config::kStages * kStage;                       // [kStages] kStageScales
    static constexpr u32 kParcelsOffset = kScalesOffset + Config::kStages * kStageScales;  // [kSplit][kBlockParcels] parcels
    static constexpr u32 kResultOffset =                                                 // [8 kBlockParcels][kPitch] floats
        kParcelsOffset + (Config::kSplit > 1 ? Config::kSplit * kBlockParcels * kParcel : 0);
    static constexpr u32 kBarriersOffset = kResultOffset + kBlockParcels * 8 * kPitch * sizeof(float);

    static_assert(Config::kTokens % 8 == 0 && Config::kTokens <= 64, "tokens are the N of a WGMMA, and fit the registers");
    static_assert(Config::kTokens % kScaleAlign == 0 && kBlockN % kScaleAlign == 0, "copies of scales begin at 16 bytes");
    static_assert(Config::kSplit >= 1 && Config::kSplit <= 16, "a cluster has at most 16 blocks");
    static_assert(Config::kStages >= 2, "WGMMAs of a stage overlap those of the next");
    static_assert((kScaling == Scaling::None) == (sizeof(typename Config::Element) == 2), "8-bit operands have scales");
    static_assert(!kScaledAlongK || kChunkK == 128, "128 of K share a scale");
};

}  // namespace tilewright
