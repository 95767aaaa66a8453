// Sizes of a few-rows GEMM, and where things lie in its shared memory.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

constexpr u32 kBlockN = 64;                     // weight rows of a tile
constexpr u32 kSpan = 128;                      // bytes of a row of a box, and the swizzle
constexpr u32 kChunks = 2;                      // boxes of a stage, for weights and for tokens
constexpr u32 kBox = kBlockN * kSpan;           // bytes of one of weights
constexpr u32 kPitch = kBlockN + 4;             // floats from token to token of the result: writes fall into 32 banks
constexpr u32 kMath = 128, kThreads = kMath + 32;  // the warpgroup that multiplies, and the producer's warp
constexpr u32 kParcel = kMath * 16;             // bytes of the sums of 64 weight rows and eight tokens
constexpr u32 kScaleAlign = 4;                  // rows from which a copy of scales can begin: 16 bytes
constexpr u32 kAllThreads = 1, kMathThreads = 2;  // named barriers

// What scales there are: 16-bit operands have none; else as `Scaling` in ops/gemm/scaling.py numbers them.
enum class Scaling : int { None = -1, Tensor, Row, TokenByBlock, TokenByToken };

__device__ constexpr u32 round_up(u32 n, u32 multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a kernel adds to its parameters: kAnyRow, whether tiles of tokens begin at any row, as those of groups do.
template <typename Base> struct OfProduct : Base { static constexpr bool kAnyRow = false; };
template <typename Base> struct OfGroups : Base { static constexpr bool kAnyRow = true; };
template <typename Base> struct Unscaled : OfProduct<Base> { static constexpr int kScaling = int(Scaling::None); };

template <typename Config> struct Layout {
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    static constexpr u32 kChunk = kSpan / sizeof(typename Config::Element);  // K of a box
    static constexpr u32 kBlockK = kChunks * kChunk;                         // K of a stage
    static constexpr bool kScaledAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;

    static constexpr u32 kWeights = kChunks * kBox, kTokenBox = Config::kTokens * kSpan;
    static constexpr u32 kStage = kWeights + kChunks * kTokenBox;
    // Scales of a stage: [kChunks][kTokenPitch] floats of the tokens, then [kChunks][kBlockN] of the weights.  The copy
    // engine begins at multiples of 16 bytes (else it stops with an illegal instruction), hence at up to three rows before.
    static constexpr u32 kTokenPitch = Config::kTokens + (Config::kAnyRow ? kScaleAlign : 0);
    static constexpr u32 kTokenScales = kScaledAlongK ? kChunks * kTokenPitch * 4 : 0;
    static constexpr u32 kWeightScales = kScaling == Scaling::TokenByToken ? kChunks * kBlockN * 4 : 0;
    static constexpr u32 kWeightScalesAt = round_up(kTokenScales, 128);  // the copy engine's alignment
    static constexpr u32 kStageScales = kWeightScalesAt + kWeightScales;

    static constexpr u32 kParcels = Config::kTokens / 8, kShare = (kParcels + Config::kSplit - 1) / Config::kSplit;
    static constexpr u32 kScales = Config::kStages * kStage;                         // [kStages] kStageScales
    static constexpr u32 kReceived = kScales + Config::kStages * kStageScales;       // [kSplit][kShare] parcels
    static constexpr u32 kResult = kReceived + (Config::kSplit > 1 ? Config::kSplit * kShare * kParcel : 0);
    static constexpr u32 kBarriers = kResult + kShare * 8 * kPitch * sizeof(float);  // after [8 kShare][kPitch] floats

    static_assert(Config::kTokens % 8 == 0 && Config::kTokens <= 64, "tokens are the N of a WGMMA, and fit the registers");
    static_assert(Config::kTokens % kScaleAlign == 0 && kBlockN % kScaleAlign == 0, "copies of scales begin at 16 bytes");
    static_assert(Config::kSplit >= 1 && Config::kSplit <= 16, "a cluster has at most 16 blocks");
    static_assert(Config::kStages >= 2, "a stage may still be multiplied while the next one is");
    static_assert((kScaling == Scaling::None) == (sizeof(typename Config::Element) == 2), "8-bit operands have scales");
    static_assert(!kScaledAlongK || kChunk == 128, "128 of K share a scale");
};

}  // namespace tilewright
