// The product of a stage: where operands lie in shared memory, who reads what, and the sums.
//
// Weights.  A box is kRows rows of 128 bytes, swizzled by 128.  With g = lane / 4 and c = lane % 4, a thread takes the
// 16-byte chunks c and 4 + c of each of its rows.  Eight lanes read at a time, two rows of four chunks; these fall into all
// 32 banks if one row's number has bit 2 set and the other's has not: so row g of the matrix instruction is weight row
// g / 2 + 4 (g % 2) of eight.  It shows again only where results are written, and where a scale is read.
//
// Tokens.  A box is kTokens rows of 64 elements, 128 bytes, swizzled by 128.  The K of a thread's chunk begins at
//     8 bits, 16 elements:  box i, chunk 2 c              for weight chunk 4 i + c, i in {0, 1}
//     4 bits, 32 elements:  box 2 i + c / 2, chunk 4 (c % 2)
// and is read 8 elements at a time.  At 4 bits lanes of one read are in two boxes: a box is 256 bytes longer than its rows,
// so that the swizzle, which is a function of the address, puts these two apart.
#pragma once

#include <tilewright/mma_sync.cuh>
#include <tilewright/ptx.cuh>
#include <tilewright/weight_convert.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;                         // bytes of a row of a box, and the swizzle
constexpr u32 kGroup = 128;                        // K that shares a scale
constexpr u32 kTokenK = 64;                        // K of a box of tokens
constexpr u32 kAllThreads = 1, kMathThreads = 2;   // named barriers

template <typename Config> struct Layout {
    static constexpr u32 kMath = 32 * Config::kWarps, kThreads = kMath + 32;  // those who multiply, and the producer's warp
    static constexpr u32 kRows = 16 * Config::kTiles * Config::kWarps;   // weight rows of a tile
    static constexpr u32 kStageK = kSpan * 8 / Config::kBits, kGroups = kStageK / kGroup;
    static constexpr u32 kWeights = kRows * kSpan;                       // bytes
    static constexpr u32 kTokenBoxes = kStageK / kTokenK, kTokenBox = Config::kTokens * kSpan + 256;
    static constexpr u32 kScalesAt = kWeights + kTokenBoxes * kTokenBox;
    static constexpr u32 kScales = kGroups * kRows * sizeof(typename Config::Scale);
    static constexpr u32 kStage = (kScalesAt + kScales + 1023) / 1024 * 1024;
    static constexpr u32 kParcels = Config::kTokens / 8, kShare = (kParcels + Config::kSplit - 1) / Config::kSplit;
    static constexpr u32 kParcel = kRows * 8 * sizeof(float);            // the sums of a tile's rows and eight tokens
    static constexpr u32 kPitch = kRows + 4;                             // floats: writes of the result meet 32 banks
    static constexpr u32 kReceived = Config::kStages * kStage;           // [kSplit][kShare] parcels
    static constexpr u32 kResult = kReceived + (Config::kSplit > 1 ? Config::kSplit * kShare * kParcel : 0);
    static constexpr u32 kBarriers = kResult + kShare * 8 * kPitch * sizeof(float);  // after [8 kShare][kPitch] floats
    static_assert(Config::kBits == 8 || Config::kBits == 4, "weights have 8 or 4 bits");
    static_assert(Config::kTokens % 8 == 0 && Config::kTokens <= 64, "sums of all tokens fit the registers");
    static_assert(Config::kTiles == 1 || Config::kTiles == 2, "a warp has 16 or 32 weight rows");
    static_assert(kRows % 64 == 0 && kRows <= 256, "a box has at most 256 rows, and is whole atoms of the swizzle");
    static_assert(Config::kSplit >= 1 && Config::kSplit <= 16, "a cluster has at most 16 blocks");
    static_assert(Config::kStages >= 2, "a stage is read while another one lands");
};

// of[p][t]: 16 weight rows by the eight tokens of parcel p, as mma_sync.cuh has D.
template <typename Config, u32 kCount> struct Parcels { float of[kCount][Config::kTiles][4]; };
template <typename Config> using Sums = Parcels<Config, Layout<Config>::kParcels>;

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

// Are weights put into the order of the tokens, or tokens, each time a warp reads them, into that of the weights?
template <typename Config> constexpr bool kNeighbours = Config::kTokens > 16;

// Eight consecutive K of a weight row and the 16 x 8 x 16 products that take them: two pairs each for the first and for the
// second.  8 bits: words 2 u and 2 u + 1 of the chunk.  4 bits: word u.
template <typename Config> __device__ inline void convert(const u32 (&words)[4], u32 unit, u32 (&pairs)[4]) {
    using Element = typename Config::Element;
    if constexpr (Config::kBits == 4) {
        convert_4bit<Element, kNeighbours<Config>>(words[unit], pairs);
    } else {
        u32 half[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            convert_8bit<Element, kNeighbours<Config>>(words[2 * unit + i], half);
            pairs[2 * i] = half[0];
            pairs[2 * i + 1] = half[1];
        }
    }
}

// The same eight K of a token, in the order of `convert`.
template <typename Config> __device__ inline void arrange(const u32 (&x)[4], u32 (&pairs)[4]) {
    constexpr u32 kPartner = Config::kBits == 4 ? 2 : 1;  // elements i and i + 4, or i and i + 2
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 first = Config::kBits == 4 ? i : 2 * i;
        pairs[2 * i] = kNeighbours<Config> ? x[2 * i] : pair_low(x[first], x[first + kPartner]);
        pairs[2 * i + 1] = kNeighbours<Config> ? x[2 * i + 1] : pair_high(x[first], x[first + kPartner]);
    }
}

// What a thread reads of every stage.
template <typename Config> struct Fragments {
    using Shape = Layout<Config>;
    using Scale = typename Config::Scale;
    u32 weight_row;           // of the tile: the first of this thread's, which are 8 apart
    u32 weight_at;            // chunk c of it; chunk 4 + c is at ^ 64
    u32 token_at[2];          // for weight chunk 4 i + c: eight K of token g; the next eight are at ^ 16, ^ 32, ^ 48

    __device__ Fragments() {
        const u32 lane = lane_index(), g = lane / 4, c = lane % 4;
        const u32 row_of_eight = g / 2 + g % 2 * 4;
        weight_row = warp_index() * 16 * Config::kTiles + row_of_eight;
        weight_at = weight_row * kSpan + (c ^ row_of_eight) * 16;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 box = Config::kBits == 4 ? 2 * i + c / 2 : i, chunk = Config::kBits == 4 ? c % 2 * 4 : 2 * c;
            const u32 row = box * Shape::kTokenBox + g * kSpan;  // bytes; stages and weights are whole atoms of 1024
            token_at[i] = Shape::kWeights + row + (chunk ^ row / kSpan % 8) * 16;
        }
    }

    // sums += scale * (weights * tokens), group by group.
    __device__ void multiply(Sums<Config>& sums, u32 stage) const {
        constexpr u32 kGroups = Shape::kGroups, kChunks = 2 / kGroups;  // 16-byte chunks of a thread in a group
        // Many tokens leave no registers for loading the second group during the first
#pragma unroll (Config::kTokens >= 32 ? 1 : kGroups)
        for (u32 group = 0; group < kGroups; ++group) {
            Sums<Config> part = {};
#pragma unroll
            for (u32 chunk = 0; chunk < kChunks; ++chunk) {
                const u32 i = kGroups == 1 ? chunk : group;
                multiply_chunk(part, stage + (weight_at ^ 64 * i), stage, i == 0 ? token_at[0] : token_at[1]);
            }
            add_scaled(sums, part, stage + Shape::kScalesAt, group);
        }
    }

    // part += the product of one chunk.
    __device__ void multiply_chunk(Sums<Config>& part, u32 weights, u32 stage, u32 tokens) const {
        constexpr u32 kTiles = Config::kTiles, kUnits = Config::kBits == 4 ? 4 : 2;  // of eight K, in a chunk
        u32 words[kTiles][2][4];
#pragma unroll
        for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) load_words(words[t][h], weights + (t * 16 + h * 8) * kSpan);
        }
#pragma unroll
        for (u32 unit = 0; unit < kUnits; ++unit) {
            u32 a[kTiles][2][4];
#pragma unroll
            for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) convert<Config>(words[t][h], unit, a[t][h]);
            }
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
                            part.of[p][t], a[t][0][2 * half], a[t][1][2 * half], a[t][0][2 * half + 1],
                            a[t][1][2 * half + 1], b[2 * half], b[2 * half + 1]);
                    }
                }
            }
        }
    }

    __device__ void add_scaled(Sums<Config>& sums, const Sums<Config>& part, u32 scales, u32 group) const {
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float scale;
                load_element(scale, scales + (group * Shape::kRows + weight_row + t * 16 + h * 8) * sizeof(Scale), Scale{});
#pragma unroll
                for (u32 p = 0; p < Shape::kParcels; ++p) {
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) sums.of[p][t][2 * h + e] += scale * part.of[p][t][2 * h + e];
                }
            }
        }
    }
};

}  // namespace tilewright
