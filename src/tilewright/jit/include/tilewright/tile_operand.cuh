// A and B of a tile in shared memory: TMA loads of one stage, and the descriptors by which WGMMA reads it.
//
// A stage holds kSpan = 128 bytes of K of every row, under the 128-byte swizzle.
#pragma once

#include <tilewright/swizzle.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;            // bytes of K in a stage, and the swizzle
constexpr u32 kBoxBytes = 64 * kSpan;  // a box of 64 rows of an operand or of D

// One operand, kRows rows (of M or N) in a stage.  kShared adjacent blocks of a cluster load it together, by multicast.
template <typename Element, Major kMajor, u32 kRows, u32 kShared> struct Operand {
    static constexpr u32 kBlockK = kSpan / sizeof(Element);
    // K-major: kRows rows of 128 bytes.  M- or N-major: boxes of 64 elements by kBlockK rows of K.
    static constexpr u32 kBoxes = (kRows * sizeof(Element) + kSpan - 1) / kSpan;
    static constexpr u32 kBytes = kMajor == Major::K ? kRows * kSpan : kBoxes * kBoxBytes;
    static constexpr u32 kPart = kMajor == Major::K ? kRows / kShared : kBlockK / kShared;  // rows of 128 bytes in one copy
    static constexpr u32 kAdvance = kMajor == Major::K ? kWgmmaKBytes : kWgmmaK<Element> * kSpan;  // bytes to the next wgmma
    static_assert(kPart % 8 == 0, "a block's share is whole atoms of the swizzle");

    // Loads rows from `row` and K from `k` on; of a shared operand, the part that the block of share `rank` loads.  The blocks
    // that share it are those of the cluster from `first` on.
    __device__ static void load(
        u8* stage, const TensorMap& map, Barrier& full, u32 row, u32 k, u32 batch, u32 rank, u32 first = 0) {
        const u32 part = kShared == 1 ? 0 : rank;
        stage += part * kPart * kSpan;
        if constexpr (kMajor == Major::K) {
            copy(stage, map, full, first, k, row + part * kPart, batch);
        } else {
#pragma unroll
            for (u32 i = 0; i < kBoxes; ++i) {
                copy(stage + i * kBoxBytes, map, full, first, row + i * 64, k + part * kPart, batch);
            }
        }
    }

    // Loads kRows rows, those of two halves of the operand in turn, each half's from its row `row` on.   map: (rows, 2, K)
    __device__ static void load_halves(
        u8* stage, const TensorMap& map, Barrier& full, u32 row, u32 k, u32 rank, u32 first = 0) {
        static_assert(kMajor == Major::K && kPart % 2 == 0, "rows of both halves in every part");
        const u32 part = kShared == 1 ? 0 : rank;
        copy(stage + part * kPart * kSpan, map, full, first, k, 0, row + part * kPart / 2);
    }

    // The same as load() without rows from `limit` on: the TMA takes longer for rows that are outside.  What they have in the stage stays,
    // so their results are undefined.  Boxes have `box` rows, which divides kPart and is a multiple of eight, unless it is all.
    __device__ static void load_rows(u8* stage, const TensorMap& map, Barrier& full, u32 row, u32 limit, u32 box, u32 k,
                                     u32 batch, u32 rank, u32 first = 0) {
        static_assert(kMajor == Major::K, "rows are those of the box");
        const u32 begin = kShared == 1 ? 0 : rank * kPart;
        for (u32 r = begin; r < begin + kPart && row + r < limit; r += box) {
            copy(stage + r * kSpan, map, full, first, k, row + r, batch);
        }
    }

    // The bytes of load_rows() in all blocks that share the operand.
    __device__ static u32 bytes_of_rows(u32 row, u32 limit, u32 box) {
        return row < limit ? (min(limit - row, kRows) + box - 1) / box * box * kSpan : 0;
    }

    // Prefetches to the L2 what load() will load.
    __device__ static void prefetch_l2(const TensorMap& map, u32 row, u32 k, u32 batch, u32 rank) {
        const u32 part = kShared == 1 ? 0 : rank;
        if constexpr (kMajor == Major::K) {
            tma_prefetch_l2(map, k, row + part * kPart, batch);
        } else {
#pragma unroll
            for (u32 i = 0; i < kBoxes; ++i) tma_prefetch_l2(map, row + i * 64, k + part * kPart, batch);
        }
    }

    // Zeroes the elements of K from `first` on, in rows [row, row + rows) of a stage that has landed (in all rows if K is not
    // contiguous).  Called by `threads` threads; follow it by fence_proxy_async_shared() and a barrier of all readers.
    __device__ static void clear(u8* stage, u32 first, u32 row, u32 rows, u32 thread, u32 threads) {
        struct alignas(16) Chunk { u32 words[4]; };
        constexpr u32 kElements = sizeof(Chunk) / sizeof(Element);
        if constexpr (kMajor == Major::K) {
            for (u32 r = row + thread; r < row + rows; r += threads) {
                for (u32 k = first; k < kBlockK; k = (k / kElements + 1) * kElements) {
                    u8* const chunk = stage + swizzle<kSpan>(r * kSpan + k / kElements * sizeof(Chunk));
                    if (k % kElements == 0) {
                        *reinterpret_cast<Chunk*>(chunk) = {};
                    } else {
                        for (u32 i = k % kElements; i < kElements; ++i) reinterpret_cast<Element*>(chunk)[i] = {};
                    }
                }
            }
        } else {  // a box has kBlockK rows of 128 bytes; the swizzle permutes within a row
            const u32 chunks = (kBlockK - first) * (kSpan / sizeof(Chunk));
            constexpr u32 kBoxRows = kSpan / sizeof(Element);  // of M or N
            for (u32 i = row / kBoxRows; i * kBoxRows < row + rows; ++i) {
                u8* const from = stage + i * kBoxBytes + first * kSpan;
                for (u32 j = thread; j < chunks; j += threads) reinterpret_cast<Chunk*>(from)[j] = {};
            }
        }
    }

    // The wgmma descriptor of 64 rows of A, or of all of B.
    __device__ static u64 descriptor(const u8* tile) {
        return wgmma_descriptor<kSpan>(tile, 8 * kSpan, kMajor == Major::K ? 0 : kBoxBytes);
    }

  private:
    __device__ static void copy(u8* to, const TensorMap& map, Barrier& full, u32 first, int x, int y, int z) {
        if constexpr (kShared == 1) {
            tma_load(to, map, full, x, y, z);
        } else {
            tma_load_multicast(to, map, full, ((1 << kShared) - 1) << first, x, y, z);
        }
    }
};

}  // namespace tilewright
