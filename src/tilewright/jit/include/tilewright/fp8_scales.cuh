// Scales of e4m3 operands, and their promotion into float32 accumulators.
//
// The tensor cores accumulate 128 products of K with about 14 bits; then CUDA cores promote: acc += scale * acc_tmp.  Scales
// that change along K are loaded with their stage; those of Tensor and Row are applied once, after the main loop.
#pragma once

#include <tilewright/copies.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

// Granularity of A x of B.  Token: one scale per row and 128 of K, contiguous along rows.  Block: one per 128 columns and
// 128 of K, contiguous along K.
enum class Scaling : int { Tensor = 0, Row = 1, TokenByBlock = 2, TokenByToken = 3 };

__device__ constexpr u32 common_divisor(u32 a, u32 b) { return b == 0 ? a : common_divisor(b, a % b); }

// Scales of two adjacent columns.
struct alignas(8) ScalePair { float first, second; };

// The scales of one stage of a kRows x kColumns tile in shared memory: first the row scales, in kCopies TMA boxes, then the
// scales of column blocks or of columns.  Scales outside of the matrix are 0.
//
// kAnyRow: a tile may begin at any row, but a TMA copy only at a multiple of four (16 bytes); it then begins before the tile.
template <Scaling kScaling, u32 kRows, u32 kColumns, bool kAnyRow> struct StageScales {
    static constexpr bool kAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;
    static constexpr bool kByBlock = kScaling == Scaling::TokenByBlock, kByToken = kScaling == Scaling::TokenByToken;
    static constexpr u32 kGroupColumns = common_divisor(kColumns, 128);  // columns in a group, which lies in one block
    static constexpr u32 kBlocks = kByBlock ? (128 - kGroupColumns + kColumns + 127) / 128 : 1;  // blocks a tile may touch
    static constexpr u32 kAlignRows = 4;                              // rows that may precede the tile; always allocated
    static constexpr u32 kCopies = kRows + kAlignRows > 256 ? 2 : 1;  // a box has at most 256 rows
    static constexpr u32 kBoxRows = kRows / kCopies + (kAnyRow ? kAlignRows : 0);
    static constexpr u32 kBoxPitch = ((kRows / kCopies + kAlignRows) * sizeof(float) + 127) / 128 * 128;  // bytes
    static constexpr u32 kOffsetB = kCopies * kBoxPitch;  // offset of the scales of B
    static constexpr u32 kBytes = kAlongK ? kOffsetB + (kByToken ? (kColumns * sizeof(float) + 127) / 128 * 128 : 128) : 0;
    static constexpr u32 kTxBytes = kAlongK ? (kCopies * kBoxRows + (kByToken ? kColumns : 0)) * sizeof(float) : 0;
    static constexpr u32 kArrivals = kByBlock ? 1 : 0;  // at the stage's barrier, in addition to the bytes
    static_assert(kBlocks <= 3, "a tile touches at most three blocks");

    // Loads the scales of rows from `row`, columns from `column` and K block `k_block`.  Called by the producer thread, which
    // has announced kTxBytes bytes.
    __device__ static void load(u8* stage, Barrier& full, const TensorMap& map_a, const TensorMap& map_b, const float* blocks,
                                i64 pitch, u32 row, u32 column, u32 k_block, u32 batch_a, u32 batch_b, u32 columns) {
#pragma unroll
        for (u32 i = 0; i < (kAlongK ? kCopies : 0); ++i) {
            const u32 box_row = row / kAlignRows * kAlignRows + i * (kRows / kCopies);
            tma_load(stage + i * kBoxPitch, map_a, full, box_row, k_block, batch_a);
        }
        if constexpr (kByToken) tma_load(stage + kOffsetB, map_b, full, column, k_block, batch_b);
        if constexpr (kByBlock) {
#pragma unroll
            for (u32 i = 0; i < kBlocks; ++i) {
                const u32 block = column / 128 + i;
                cp_async_zfill(stage + kOffsetB + i * sizeof(float), blocks + block * pitch + k_block, block * 128 < columns);
            }
            cp_async_mbarrier_arrive_noinc(full);
        }
    }

    // Byte offset of the scale of the tile's row `row`, if the tile begins at row `first_row` of A.
    __device__ static constexpr u32 row_offset(u32 row, u32 first_row) {
        constexpr u32 kTileRows = kRows / kCopies;  // per box
        return row / kTileRows * kBoxPitch + (row % kTileRows + (kAnyRow ? first_row % kAlignRows : 0)) * sizeof(float);
    }
};

// acc += acc_tmp, both in the fragment layout of WGMMA.
template <u32 kCount> __device__ inline void promote(float (&acc)[kCount], const float (&acc_tmp)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) acc[i] += acc_tmp[i];
}

// acc += scales * acc_tmp.
template <u32 kCount>
__device__ inline void promote(float (&acc)[kCount], const float (&acc_tmp)[kCount], const float (&scales)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) acc[i] += scales[i] * acc_tmp[i];
}

// acc += scales[h][group] * acc_tmp, one scale for each group of columns within a block.
template <u32 kCount, u32 kGroups>
__device__ inline void promote(float (&acc)[kCount], const float (&acc_tmp)[kCount], const float (&scales)[2][kGroups]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) acc[i] += scales[i % 4 / 2][i / (kCount / kGroups)] * acc_tmp[i];
}

// acc += row scale * column scale * acc_tmp; columns[2 j + e]: of columns 8 j + fragment_column() + e.
template <u32 kCount>
__device__ inline void promote(float (&acc)[kCount], const float (&acc_tmp)[kCount], const float (&rows)[2],
                               const float (&columns)[kCount / 2]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) acc[i] += rows[i % 4 / 2] * columns[i / 4 * 2 + i % 2] * acc_tmp[i];
}

// Loads the scales of this thread's rows, 8 apart, in each of kWaves waves, `wave_bytes` apart, and of its columns.  Both lie
// in shared memory: those of rows from this thread's first one on.  In asm, so that the loads stay where they are written.
template <u32 kWaves, u32 kColumns>
__device__ inline void load_scales(float (&rows)[kWaves][2], float (&columns)[kColumns], const u8* smem_rows, u32 wave_bytes,
                                   const float* smem_columns) {
    const u32 first_row = shared_address(smem_rows), first_column = shared_address(smem_columns + fragment_column());
#pragma unroll
    for (u32 i = 0; i < 2 * kWaves; ++i) {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[i / 2][i % 2]) : "r"(first_row + i / 2 * wave_bytes + i % 2 * 32));
    }
#pragma unroll
    for (u32 j = 0; j < kColumns / 2; ++j) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(columns[2 * j]), "=f"(columns[2 * j + 1])
                     : "r"(first_column + j * 32));
    }
}

// scales[h][group] = row scale * scale of the group's block, for groups of kGroupColumns columns.  The first group begins
// `offset` columns into the first block.  The asm makes ptxas compute them here, not at their use.
template <u32 kGroupColumns, u32 kGroups, u32 kBlocks>
__device__ inline void combine_block_scales(float (&scales)[2][kGroups], const float (&rows)[2],
                                            const float (&blocks)[kBlocks], u32 offset) {
#pragma unroll
    for (u32 i = 0; i < kGroups; ++i) {
        float block = blocks[0];
#pragma unroll
        for (u32 b = 1; b < kBlocks; ++b) block = offset + i * kGroupColumns >= b * 128 ? blocks[b] : block;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            scales[h][i] = rows[h] * block;
            asm volatile("" : "+f"(scales[h][i]));
        }
    }
}

// The scales of this thread's two of eight columns; those of the eight begin at `columns`, in shared memory.
__device__ inline ScalePair scale_pair(const float* columns) {
    return *reinterpret_cast<const ScalePair*>(columns + fragment_column());
}

// scales[i] = row scale * column scale of acc_tmp[i].  `columns`: the column scales, in shared memory.  kEager: computed
// here, else where ptxas chooses.
template <bool kEager, u32 kCount>
__device__ inline void combine_scales(float (&scales)[kCount], const float (&rows)[2], const float* columns) {
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
        const ScalePair pair = scale_pair(columns + 8 * j);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            scales[4 * j + 2 * h] = rows[h] * pair.first, scales[4 * j + 2 * h + 1] = rows[h] * pair.second;
        }
    }
#pragma unroll
    for (u32 i = 0; i < (kEager ? kCount : 0); ++i) asm volatile("" : "+f"(scales[i]));
}

// acc *= row scale * column scale, for rows from `row` on and, in pass p, columns from `column` + p * 2 kCount on; scales
// outside of the matrix are 0.  Called by a warpgroup with named barrier `barrier`.  Column scales go through the shared
// memory at `staged`, which earlier TMA stores may still read: 32 per thread would be too many registers.
template <u32 kPasses, u32 kCount>
__device__ inline void scale_accumulators(float (&acc)[kPasses][kCount], const float* row_scales,
                                          const float* column_scales, u32 row, u32 column, u32 rows, u32 columns,
                                          float* staged, u32 barrier) {
    constexpr u32 kColumns = kPasses * 2 * kCount;
    if (threadIdx.x % 128 == 0) tma_wait_read<0>();
    named_barrier_sync(barrier, 128);
    for (u32 i = threadIdx.x % 128; i < kColumns; i += 128) {
        staged[i] = column + i < columns ? column_scales[column + i] : 0.0f;
    }
    float scales[2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 r = row + fragment_row() + 8 * h;
        scales[h] = r < rows ? row_scales[r] : 0.0f;
    }
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (u32 j = 0; j < kColumns / 8; ++j) {
        const ScalePair column_pair = scale_pair(staged + 8 * j);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float* const pair = acc[j / (kCount / 4)] + j % (kCount / 4) * 4 + 2 * h;
            pair[0] *= scales[h] * column_pair.first, pair[1] *= scales[h] * column_pair.second;
        }
    }
}

}  // namespace tilewright
