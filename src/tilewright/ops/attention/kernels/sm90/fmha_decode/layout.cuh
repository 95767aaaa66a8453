// Shared memory of a block, and where a byte of a row of keys or values lies.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

template <typename Config> struct Layout {
    static constexpr u32 kD = Config::kD, kRows = Config::kRows, kWarps = Config::kWarps, kStages = Config::kStages;
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

    // Sums of the warps for 8 rows and kColumns columns at a time.  Four words beyond a row: the lanes that hold a row each
    // begin in other banks.
    static constexpr u32 kColumns = 64, kPitch = kColumns + 4;
    static constexpr u32 kMergeOffset = kWarps * kStages * kStageBytes;
    static constexpr u32 kStatsOffset = kMergeOffset + kWarps * 8 * kPitch * 4;  // (kWarps, kRows): maximum, denominator
    static constexpr u32 kBlockOffset = kStatsOffset + kWarps * kRows * 8;       // clusters: the sum of the block
    static constexpr u32 kBlockStatsOffset = kBlockOffset + kRows * kD * 4;
    static constexpr u32 kBytes = Config::kDivision == 2 ? kBlockStatsOffset + kRows * 8 : kBlockOffset;

    // Eight consecutive rows have the same 16 bytes in eight different groups of banks.
    __device__ static constexpr u32 offset(u32 row, u32 chunk) {
        constexpr u32 kChunks = kLanesPerRow < 8 ? kLanesPerRow : 8, kRowsPerLine = kRowBytes < 128 ? 128 / kRowBytes : 1;
        return row * kRowBytes + (chunk ^ (row / kRowsPerLine % kChunks)) * 16;
    }
};

}  // namespace tilewright
