// Shared memory of a block, and where a byte of a row of keys or values lies.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

template <typename Config> struct Layout {
    static constexpr u32 kD = Config::kD, kRows = Config::kRows, kWarps = Config::kWarps, kStages = Config::kStages;
    static constexpr bool kInCluster = Config::kDivision == 2;
    static constexpr bool kWidened = !Same<typename Config::Cache, typename Config::Element>::value;  // e4m3
    static constexpr u32 kRowBytes = kD * (kWidened ? 1 : 2);
    static constexpr u32 kKeys = Config::kKeys;  // of a unit
    static constexpr u32 kLanesPerRow = kRowBytes / 16, kRowsPerCopy = 32 / kLanesPerRow;  // one copy of a warp: 512 bytes
    static constexpr u32 kCopies = kKeys / kRowsPerCopy;
    static_assert(kD == 64 || kD == 128 || kD == 256, "rows of 64 to 512 bytes");
    static_assert(kKeys % 16 == 0 && kKeys <= 32, "a lane looks up the page of one key");
    static_assert(kRows % 8 == 0, "query rows are columns of the matrix instruction, eight at a time");

    // A stage: keys, values, and with scales of tokens those of the keys and of the values.  Each warp has kStages of them.
    static constexpr u32 kTileBytes = kKeys * kRowBytes;
    static constexpr u32 kScalesOffset = 2 * kTileBytes;
    static constexpr u32 kStageBytes = kScalesOffset + (Config::kTokenScales ? 2 * kKeys * 4 : 0);
    static_assert(kStageBytes % 128 == 0, "the swizzle repeats within 1024 bytes, copies are of 16");

    // Sums of a warp, (kRows, kPitch) floats and the statistics of their rows: of the row tile with which it ends, in its
    // ring, which is empty then; of the one with which it begins, if it ends before, in a place of its own.  Four words
    // beyond a row: lanes that hold a row each begin in other banks.
    static constexpr u32 kPitch = kD + 4;
    static constexpr u32 kSumBytes = kRows * kPitch * 4 + kRows * 8;
    static constexpr u32 kRingBytes = kStages * kStageBytes;
    static_assert(kSumBytes % 16 == 0 && kSumBytes <= kRingBytes, "the sums of a warp replace its ring");
    static constexpr u32 kFirstOffset = kWarps * kRingBytes;
    static constexpr u32 kPartsOffset = kFirstOffset + (kInCluster ? 0 : kWarps * kSumBytes);
    // Clusters: from every block the pairs of columns that this one adds, and the statistics of all rows
    static constexpr u32 kExchangeOffset = kPartsOffset + kWarps * 2 * 20;
    static constexpr u32 kExchangeStatsOffset = kExchangeOffset + kRows * kD * 4;
    static constexpr u32 kBytes = kInCluster ? kExchangeStatsOffset + Config::kCluster * kRows * 8 : kExchangeOffset;
    static_assert(kExchangeOffset % 16 == 0, "vectors of 16 bytes");

    // Eight consecutive rows have the same 16 bytes in eight different groups of banks.
    __device__ static constexpr u32 offset(u32 row, u32 chunk) {
        constexpr u32 kChunks = kLanesPerRow < 8 ? kLanesPerRow : 8, kRowsPerLine = kRowBytes < 128 ? 128 / kRowBytes : 1;
        return row * kRowBytes + (chunk ^ (row / kRowsPerLine % kChunks)) * 16;
    }
};

}  // namespace tilewright
