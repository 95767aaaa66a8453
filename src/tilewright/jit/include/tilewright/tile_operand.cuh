// A and B of a tile in shared memory: how the copy engine brings a stage of them, and how WGMMA reads it.
//
// A stage holds kSpan = 128 bytes of K of every row, under the 128-byte swizzle.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;            // bytes of K in a stage, and the swizzle
constexpr u32 kBoxBytes = 64 * kSpan;  // a box of 64 rows, of an operand or of D

// One operand of `kRows` rows (of M or N) in a stage, loaded by kShared blocks.
template <typename Element, Major kMajor, u32 kRows, u32 kShared> struct Operand {
    static constexpr u32 kBlockK = kSpan / sizeof(Element);
    // Along K: kRows rows of 128 bytes.  Along M or N: boxes of 64 elements by kBlockK rows of K.
    static constexpr u32 kBoxes = (kRows * sizeof(Element) + kSpan - 1) / kSpan;
    static constexpr u32 kBytes = kMajor == Major::K ? kRows * kSpan : kBoxes * kBoxBytes;
    static constexpr u32 kPart = kMajor == Major::K ? kRows / kShared : kBlockK / kShared;  // rows of a copy, of 128 bytes
    static constexpr u32 kAdvance = kMajor == Major::K ? kWgmmaKBytes : kWgmmaK<Element> * kSpan;  // to the next wgmma
    static_assert(kPart % 8 == 0, "a block's share is whole atoms of the swizzle");

    // Rows `row` .. and K from `k` on: of a shared operand, the part of the block of this rank in its cluster.
    __device__ static void load(u8* stage, const TensorMap& map, Barrier& full, u32 row, u32 k, u32 batch, u32 rank) {
        const u32 part = kShared == 1 ? 0 : rank;
        stage += part * kPart * kSpan;
        if constexpr (kMajor == Major::K) {
            copy(stage, map, full, k, row + part * kPart, batch);
        } else {
#pragma unroll
            for (u32 i = 0; i < kBoxes; ++i) {
                copy(stage + i * kBoxBytes, map, full, row + i * 64, k + part * kPart, batch);
            }
        }
    }

    // Of 64 rows of A or all of B.
    __device__ static u64 descriptor(const u8* tile) {
        return wgmma_descriptor<kSpan>(tile, 8 * kSpan, kMajor == Major::K ? 0 : kBoxBytes);
    }

  private:
    __device__ static void copy(u8* to, const TensorMap& map, Barrier& full, int x, int y, int z) {
        if constexpr (kShared == 1) {
            tma_load(to, map, full, x, y, z);
        } else {
            tma_multicast(to, map, full, (1 << kShared) - 1, x, y, z);
        }
    }
};

}  // namespace tilewright
