// The product of a stage: layout of shared memory, what each thread reads, and the accumulators.
//
// Weights.  A box is kRows rows of 128 bytes, with the 128-byte swizzle.  With g = lane / 4 and c = lane % 4, a thread reads
// the 16-byte chunks c and 4 + c of each of its rows.  Eight lanes read at once, two rows of four chunks; these cover all 32
// banks if bit 2 is set in one row's index and not in the other's: so row g of the MMA is weight row g / 2 + 4 (g % 2) of
// eight.  This order matters again only where results are written, and where a scale is read.
//
// Tokens.  A box is kTokens rows of 64 elements, 128 bytes, with the same swizzle.  The K of a thread's chunk begins at
//     8 bits, 16 elements:  box i, chunk 2 c              for weight chunk 4 i + c, i in {0, 1}
//     4 bits, 32 elements:  box 2 i + c / 2, chunk 4 (c % 2)
// and is read 8 elements at a time.  At 4 bits the lanes of one read access two boxes: a box is padded by 256 bytes, so that
// the swizzle, a function of the address, sends these two to different banks.
#pragma once

#include <tilewright/mma_sync.cuh>
#include <tilewright/ptx.cuh>
#include <tilewright/weight_convert.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;                         // bytes of a box row, and the swizzle
constexpr u32 kGroup = 128;                        // K that shares a scale
constexpr u32 kTokenK = 64;                        // K of a box of tokens
constexpr u32 kAllBarrier = 1, kMathBarrier = 2;   // named barriers

template <typename Config> struct Layout {
    static constexpr u32 kMathThreads = 32 * Config::kWarps, kThreads = kMathThreads + 32;  // + the producer warp
    static constexpr u32 kRows = 16 * Config::kTiles * Config::kWarps;   // weight rows of a tile
    static constexpr u32 kStageK = kSpan * 8 / Config::kBits, kGroups = kStageK / kGroup;
    static constexpr u32 kWeights = kRows * kSpan;                       // bytes
    static constexpr u32 kTokenBoxes = kStageK / kTokenK, kTokenBox = Config::kTokens * kSpan + 256;
    static constexpr u32 kScalesOffset = kWeights + kTokenBoxes * kTokenBox;
    static constexpr u32 kScales = kGroups * kRows * sizeof(typename Config::Scale);
    static constexpr u32 kStage = (kScalesOffset + kScales + 1023) / 1024 * 1024;
    static constexpr u32 kParcels = Config::kTokens / 8;            // of eight tokens
    static constexpr u32 kBlockParcels = (kParcels + Config::kSplit - 1) / Config::kSplit;  // that a block owns
    static constexpr u32 kParcel = kRows * 8 * sizeof(float);            // the accumulators of a tile's rows and 8 tokens
    static constexpr u32 kPitch = kRows + 4;                             // floats: no bank conflicts
    static constexpr u32 kParcelsOffset = Config::kStages * kStage;      // [kSplit][kBlockParcels] parcels
    static constexpr u32 kResultOffset =                                 // [8 kBlockParcels][kPitch] floats
        kParcelsOffset + (Config::kSplit > 1 ? Config::kSplit * kBlockParcels * kParcel : 0);
    static constexpr u32 kBarriersOffset = kResultOffset + kBlockParcels * 8 * kPitch * sizeof(float);
    static_assert(Config::kBits == 8 || Config::kBits == 4, "weights have 8 or 4 bits");
    static_assert(Config::kTokens % 8 == 0 && Config::kTokens <= 64, "accumulators of all tokens fit the registers");
    static_assert(Config::kTiles == 1 || Config::kTiles == 2, "a warp has 16 or 32 weight rows");
    static_assert(kRows % 64 == 0 && kRows <= 256, "a box has at most 256 rows, and is whole atoms of the swizzle");
    static_assert(Config::kSplit >= 1 && Config::kSplit <= 16, "a cluster has at most 16 blocks");
    static_assert(Config::kStages >= 2, "a stage is read while another one lands");
};

// values[p][t]: 16 weight rows by the eight tokens of parcel p, in the layout of D in mma_sync.cuh.
template <typename Config, u32 kCount> struct Parcels { float values[kCount][Config::kTiles][4]; };
template <typename Config> using Accumulators = Parcels<Config, Layout<Config>::kParcels>;

__device__ inline void load_words(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void load_element(float& value, u32 address, float) {
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}
template <typename T> __device__ inline void load_element(float& value, u32 address, T) {
    T stored;
    asm volatile("ld.shared::cta.u16 %0, [%1];" : "=h"(stored.bits) : "r"(address) : "memory");
    value = to_float(stored);
}

// True if weights are permuted into the order of tokens; else tokens are permuted each time a warp reads them.
template <typename Config> constexpr bool kPermuteWeights = Config::kTokens > 16;

// Converts eight consecutive K of a weight row for two 16 x 8 x 16 MMAs: pairs 0 and 1 for the first, 2 and 3 for the other.
// 8 bits: words 2 u and 2 u + 1 of the chunk.  4 bits: word u.
template <typename Config> __device__ inline void convert(const u32 (&words)[4], u32 unit, u32 (&pairs)[4]) {
    using Element = typename Config::Element;
    if constexpr (Config::kBits == 4) {
        convert_4bit<Element, kPermuteWeights<Config>>(words[unit], pairs);
    } else {
        u32 half[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            convert_8bit<Element, kPermuteWeights<Config>>(words[2 * unit + i], half);
            pairs[2 * i] = half[0];
            pairs[2 * i + 1] = half[1];
        }
    }
}

// Arranges the same eight K of a token in the order of `convert`.
template <typename Config> __device__ inline void arrange(const u32 (&x)[4], u32 (&pairs)[4]) {
    constexpr u32 kPartner = Config::kBits == 4 ? 2 : 1;  // pairs elements i and i + 4, or i and i + 2
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 first = Config::kBits == 4 ? i : 2 * i;
        pairs[2 * i] = kPermuteWeights<Config> ? x[2 * i] : pair_low(x[first], x[first + kPartner]);
        pairs[2 * i + 1] = kPermuteWeights<Config> ? x[2 * i + 1] : pair_high(x[first], x[first + kPartner]);
    }
}

// The addresses that a thread reads in every stage.
template <typename Config> struct Fragments {
    using Shape = Layout<Config>;
    using Scale = typename Config::Scale;
    u32 weight_row;           // in the tile: this thread's first; its rows are 8 apart
    u32 weight_offset;        // of its chunk c, in bytes; chunk 4 + c is at ^ 64
    u32 token_offset[2];      // for weight chunk 4 i + c: eight K of token g; the next eight are at ^ 16, ^ 32, ^ 48

    __device__ Fragments() {
        const u32 lane = lane_index(), g = lane / 4, c = lane % 4;
        const u32 row_of_eight = g / 2 + g % 2 * 4;
        weight_row = warp_index() * 16 * Config::kTiles + row_of_eight;
        weight_offset = weight_row * kSpan + (c ^ row_of_eight) * 16;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 box = Config::kBits == 4 ? 2 * i + c / 2 : i, chunk = Config::kBits == 4 ? c % 2 * 4 : 2 * c;
            const u32 row = box * Shape::kTokenBox + g * kSpan;  // bytes; stages and weights are whole atoms of 1024
            token_offset[i] = Shape::kWeights + row + (chunk ^ row / kSpan % 8) * 16;
        }
    }

    // acc += scale * (weights * tokens), for each group of 128 along K.
    __device__ void multiply(Accumulators<Config>& acc, u32 stage) const {
        constexpr u32 kGroups = Shape::kGroups, kChunks = 2 / kGroups;  // 16-byte chunks of a thread in a group
        // With many tokens there are no registers to load the second group during the first
#pragma unroll (Config::kTokens >= 32 ? 1 : kGroups)
        for (u32 group = 0; group < kGroups; ++group) {
            Accumulators<Config> acc_tmp = {};
#pragma unroll
            for (u32 chunk = 0; chunk < kChunks; ++chunk) {
                const u32 i = kGroups == 1 ? chunk : group;
                multiply_chunk(acc_tmp, stage + (weight_offset ^ 64 * i), stage, i == 0 ? token_offset[0] : token_offset[1]);
            }
            promote(acc, acc_tmp, stage + Shape::kScalesOffset, group);
        }
    }

    // acc_tmp += the product of one chunk of weights and tokens.
    __device__ void multiply_chunk(Accumulators<Config>& acc_tmp, u32 weights, u32 stage, u32 tokens) const {
        constexpr u32 kTiles = Config::kTiles, kUnits = Config::kBits == 4 ? 4 : 2;  // of eight K, in a chunk
        // Load the weights of the chunk
        u32 words[kTiles][2][4];
#pragma unroll
        for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) load_words(words[t][h], weights + (t * 16 + h * 8) * kSpan);
        }
#pragma unroll
        for (u32 unit = 0; unit < kUnits; ++unit) {
            // Convert eight K of them to 16 bits
            u32 a[kTiles][2][4];
#pragma unroll
            for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) convert<Config>(words[t][h], unit, a[t][h]);
            }

            // Multiply by the same K of each eight tokens
#pragma unroll
            for (u32 p = 0; p < Shape::kParcels; ++p) {
                u32 x[4], b[4];
                load_words(x, stage + (tokens ^ 16 * unit) + p * 8 * kSpan);
                arrange<Config>(x, b);
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
#pragma unroll
                    for (u32 t = 0; t < kTiles; ++t) {
                        mma_16x8x16<typename Config::Element>(
                            acc_tmp.values[p][t], a[t][0][2 * half], a[t][1][2 * half], a[t][0][2 * half + 1],
                            a[t][1][2 * half + 1], b[2 * half], b[2 * half + 1]);
                    }
                }
            }
        }
    }

    // acc += scale * acc_tmp.
    __device__ void promote(Accumulators<Config>& acc, const Accumulators<Config>& acc_tmp, u32 scales, u32 group) const {
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float scale;
                load_element(scale, scales + (group * Shape::kRows + weight_row + t * 16 + h * 8) * sizeof(Scale), Scale{});
#pragma unroll
                for (u32 p = 0; p < Shape::kParcels; ++p) {
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) acc.values[p][t][2 * h + e] += scale * acc_tmp.values[p][t][2 * h + e];
                }
            }
        }
    }
};

}  // namespace tilewright
