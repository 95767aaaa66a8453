// Scales of e4m3 operands on their way into float32 sums.
//
// The tensor cores add 128 products of K with about 14 bits, then ordinary code takes the result over: sums += scale *
// scratch.  Scales that change along K come with the stage that they belong to, those of Tensor and Row scale the sums at
// the end.
#pragma once

#include <tilewright/copies.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

// Of A x of B.  Token: one a row and 128 of K, rows side by side in memory; Block: one for 128 columns and 128 of K, those of
// K side by side.
enum class Scaling : int { Tensor = 0, Row = 1, TokenByBlock = 2, TokenByToken = 3 };

__device__ constexpr u32 common_divisor(u32 a, u32 b) { return b == 0 ? a : common_divisor(b, a % b); }

// Of two neighbouring columns.
struct alignas(8) ScalePair { float first, second; };

// Scales of a step of a tile of kRows x kColumns, in shared memory: of rows, in kCopies boxes of the copy engine, and behind
// them those of the blocks of columns, or of the columns.  Scales outside of the matrix are 0.
//
// kAnyRow: a tile may begin at any row, but a copy only at a multiple of four (16 bytes): it begins before the tile.
template <Scaling kScaling, u32 kRows, u32 kColumns, bool kAnyRow> struct StageScales {
    static constexpr bool kAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;
    static constexpr bool kByBlock = kScaling == Scaling::TokenByBlock, kByToken = kScaling == Scaling::TokenByToken;
    static constexpr u32 kAlike = common_divisor(kColumns, 128);  // columns of a tile that lie in one block for sure
    static constexpr u32 kBlocks = kByBlock ? (128 - kAlike + kColumns + 127) / 128 : 1;  // that a tile may touch
    static constexpr u32 kSpare = 4;                              // rows before the tile: there is room for them anyway
    static constexpr u32 kCopies = kRows + kSpare > 256 ? 2 : 1;  // a box has at most 256 rows
    static constexpr u32 kCopied = kRows / kCopies + (kAnyRow ? kSpare : 0);  // rows of a box
    static constexpr u32 kPart = ((kRows / kCopies + kSpare) * sizeof(float) + 127) / 128 * 128;  // bytes from box to box
    static constexpr u32 kOthers = kCopies * kPart;  // byte where the scales of B begin
    static constexpr u32 kBytes = kAlongK ? kOthers + (kByToken ? (kColumns * sizeof(float) + 127) / 128 * 128 : 128) : 0;
    static constexpr u32 kExpected = kAlongK ? (kCopies * kCopied + (kByToken ? kColumns : 0)) * sizeof(float) : 0;
    static constexpr u32 kArrivals = kByBlock ? 1 : 0;  // at the stage's barrier, besides those bytes
    static_assert(kBlocks <= 3, "a tile touches at most three blocks");

    // By the thread that loads the stage and has announced kExpected bytes; of row, column and 128 of K `step` of op(B).
    __device__ static void load(u8* to, Barrier& full, const TensorMap& of_a, const TensorMap& of_b, const float* blocks,
                                i64 pitch, u32 row, u32 column, u32 step, u32 batch_a, u32 batch_b, u32 columns) {
#pragma unroll
        for (u32 i = 0; i < (kAlongK ? kCopies : 0); ++i) {
            tma_load(to + i * kPart, of_a, full, row / kSpare * kSpare + i * (kRows / kCopies), step, batch_a);
        }
        if constexpr (kByToken) tma_load(to + kOthers, of_b, full, column, step, batch_b);
        if constexpr (kByBlock) {
#pragma unroll
            for (u32 i = 0; i < kBlocks; ++i) {
                const u32 block = column / 128 + i;
                copy_word(to + kOthers + i * sizeof(float), blocks + block * pitch + step, block * 128 < columns);
            }
            arrive_after_copies(full);
        }
    }

    // Where the scale of row `of` of the tile lies among these, if it begins at row `row` of A.
    __device__ static constexpr u32 place(u32 of, u32 row) {
        constexpr u32 kRowsOfPart = kRows / kCopies;
        return of / kRowsOfPart * kPart + (of % kRowsOfPart + (kAnyRow ? row % kSpare : 0)) * sizeof(float);
    }
};

// sums += scratch, both as WGMMA leaves them.
template <u32 kCount> __device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) sums[i] += scratch[i];
}

// sums += factors * scratch.
template <u32 kCount>
__device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount], const float (&factors)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) sums[i] += factors[i] * scratch[i];
}

// sums += of[h][group] * scratch, of groups of columns that lie in one block.
template <u32 kCount, u32 kOf>
__device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount], const float (&of)[2][kOf]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) sums[i] += of[i % 4 / 2][i / (kCount / kOf)] * scratch[i];
}

// of[h][group], of groups of kAlike columns: scale of rows * scale of the block that the group lies in, if the first group
// begins `into` columns into the first block.  Made here, not where they are used.
template <u32 kAlike, u32 kOf, u32 kBlocks>
__device__ inline void join_blocks(float (&of)[2][kOf], const float (&rows)[2], const float (&blocks)[kBlocks], u32 into) {
#pragma unroll
    for (u32 i = 0; i < kOf; ++i) {
        float block = blocks[0];
#pragma unroll
        for (u32 b = 1; b < kBlocks; ++b) block = into + i * kAlike >= b * 128 ? blocks[b] : block;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            of[h][i] = rows[h] * block;
            asm volatile("" : "+f"(of[h][i]));
        }
    }
}

// Those of this thread in eight columns, whose scales begin at `columns` in shared memory.
__device__ inline ScalePair scale_pair(const float* columns) {
    return *reinterpret_cast<const ScalePair*>(columns + fragment_column());
}

// factors[i], that of scratch[i]: of[h] * column scale.  `columns` are the scales of these columns, in shared memory.  Made
// here if kNow, else where they are used.
template <bool kNow, u32 kCount>
__device__ inline void join_scales(float (&factors)[kCount], const float (&of)[2], const float* columns) {
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
        const ScalePair by = scale_pair(columns + 8 * j);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            factors[4 * j + 2 * h] = of[h] * by.first, factors[4 * j + 2 * h + 1] = of[h] * by.second;
        }
    }
#pragma unroll
    for (u32 i = 0; i < (kNow ? kCount : 0); ++i) asm volatile("" : "+f"(factors[i]));
}

// sums *= row scale * column scale, once, of the rows from `row` on and, in each pass, the columns from `column` + pass *
// 2 kCount on; absent scales are 0.  By a warpgroup, which meets at `barrier` and has the memory at `staged`, where earlier
// stores may still read: 32 column scales a thread in registers would be too many.
template <u32 kPasses, u32 kCount>
__device__ inline void scale_sums(float (&sums)[kPasses][kCount], const float* of_rows, const float* of_columns, u32 row,
                                  u32 column, u32 rows, u32 columns, float* staged, u32 barrier) {
    constexpr u32 kAll = kPasses * 2 * kCount;
    if (threadIdx.x % 128 == 0) tma_wait_read<0>();
    sync_threads(barrier, 128);
    for (u32 i = threadIdx.x % 128; i < kAll; i += 128) staged[i] = column + i < columns ? of_columns[column + i] : 0.0f;
    float of[2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 r = row + fragment_row() + 8 * h;
        of[h] = r < rows ? of_rows[r] : 0.0f;
    }
    sync_threads(barrier, 128);
#pragma unroll
    for (u32 j = 0; j < kAll / 8; ++j) {
        const ScalePair by = scale_pair(staged + 8 * j);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float* const pair = sums[j / (kCount / 4)] + j % (kCount / 4) * 4 + 2 * h;
            pair[0] *= of[h] * by.first, pair[1] *= of[h] * by.second;
        }
    }
}

}  // namespace tilewright
