// Scales of e4m3 operands on their way into float32 sums.
//
// The tensor cores add 128 products of K with about 14 bits, then ordinary code takes the result over: sums += scale *
// scratch.  Scales that change along K come through shared memory, those of Tensor and Row scale the sums at the end.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

// Of A x of B.  Token: one a row and 128 of K, rows side by side in memory; Block: one for 128 columns and 128 of K, those of
// K side by side.
enum class Scaling : int { Tensor = 0, Row = 1, TokenByBlock = 2, TokenByToken = 3 };

struct ScaleArgs {
    const float* a;
    i64 a_pitch, a_batch;  // from one 128 of K to the next, from one matrix to the next
    const float* b;
    i64 b_pitch, b_batch;  // the same; Block: from one 128 columns to the next
};

__device__ constexpr u32 common_divisor(u32 a, u32 b) { return b == 0 ? a : common_divisor(b, a % b); }

// The scales of the steps of a tile of kRows x kColumns, in a ring of kSlots slots in shared memory.  Each slot has a warp of
// its own that fills it, loads being asked for kSlots steps ahead: a thread that multiplies would wait for its loads at
// every step, whatever it has asked for in time, since the compiler puts the first use of a register where it likes.
//
// A slot holds, for Block, the products of row and block scales, [kBlocks][kRows]; for TokenByToken kRows scales of rows and
// then kColumns of columns.  Scales outside of the matrix are 0.
template <Scaling kScaling, u32 kRows, u32 kColumns> class StepScales {
    static constexpr bool kByBlock = kScaling == Scaling::TokenByBlock;

  public:
    static constexpr u32 kSlots = 2;
    static constexpr u32 kAlike = common_divisor(kColumns, 128);  // columns of a tile that lie in one block for sure
    static constexpr u32 kBlocks = kByBlock ? (128 - kAlike + kColumns + 127) / 128 : 1;  // that a tile may touch
    static constexpr u32 kFloats = kByBlock ? kBlocks * kRows : kRows + kColumns;
    static constexpr u32 kSlotBytes = (kFloats * sizeof(float) + 127) / 128 * 128;
    static_assert(kRows % 32 == 0, "rows are shared out among the lanes");
    static_assert(kBlocks <= 2, "a tile touches at most two blocks");

    // Of the tile whose first row, column and step these are, in matrices of `rows` rows and `columns` columns.
    __device__ StepScales(const ScaleArgs& args, u32 row, u32 column, u32 rows, u32 columns, u32 step, u32 batch_a, u32 batch_b)
        : rows_(args.a + batch_a * args.a_batch + step * args.a_pitch + row), pitch_(args.a_pitch), rows_left_(left(rows, row)) {
        if constexpr (kByBlock) {
            others_ = args.b + batch_b * args.b_batch + column / 128 * args.b_pitch + step;
            others_left_ = left((columns + 127) / 128, column / 128);
        } else {
            others_ = args.b + batch_b * args.b_batch + step * args.b_pitch + column;
            others_left_ = left(columns, column);
        }
        others_pitch_ = args.b_pitch;
    }

    // By a warp: asks for the scales of a step of the tile.
    __device__ void load(u32 step) {
#pragma unroll
        for (u32 i = 0; i < kRows / 32; ++i) {
            const u32 at = i * 32 + lane_index();
            row_[i] = at < rows_left_ ? __ldg(rows_ + step * pitch_ + at) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < kOthers; ++i) {
            const u32 at = kByBlock ? i : i * 32 + lane_index();
            const bool there = at < others_left_ && (kByBlock || at < kColumns);
            const i64 offset = kByBlock ? at * others_pitch_ + step : step * others_pitch_ + at;
            other_[i] = there ? __ldg(others_ + offset) : 0.0f;
        }
    }

    // And writes them to a slot.
    __device__ void store(float* slot) const {
#pragma unroll
        for (u32 i = 0; i < kRows / 32; ++i) {
#pragma unroll
            for (u32 b = 0; b < kBlocks; ++b) {
                slot[b * kRows + i * 32 + lane_index()] = kByBlock ? row_[i] * other_[b] : row_[i];
            }
        }
        if constexpr (!kByBlock) {
#pragma unroll
            for (u32 i = 0; i < kOthers; ++i) {
                if (i * 32 + lane_index() < kColumns) slot[kRows + i * 32 + lane_index()] = other_[i];
            }
        }
    }

  private:
    // Tiles of a cluster may begin outside of the matrix.
    __device__ static u32 left(u32 size, u32 from) { return size > from ? size - from : 0; }

    static constexpr u32 kOthers = kByBlock ? kBlocks : (kColumns + 31) / 32;

    const float *rows_, *others_;
    i64 pitch_, others_pitch_;
    u32 rows_left_, others_left_;
    float row_[kRows / 32], other_[kOthers];
};

// sums += scratch, both as WGMMA leaves them.
template <u32 kCount> __device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) sums[i] += scratch[i];
}

// sums += of[h][block] * scratch: the first `before` groups of kAlike columns are in block 0.
template <u32 kAlike, u32 kCount, u32 kOfPass>
__device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount], const float (&of)[2][kOfPass], u32 before) {
#pragma unroll
    for (u32 first = 0; first < kCount; first += kAlike / 2) {
        const bool second = kOfPass > 1 && first > 0 && first / (kAlike / 2) >= before;
        const float scale[2] = {second ? of[0][kOfPass - 1] : of[0][0], second ? of[1][kOfPass - 1] : of[1][0]};
#pragma unroll
        for (u32 i = first; i < first + kAlike / 2; ++i) sums[i] += scale[i % 4 / 2] * scratch[i];
    }
}

// Of two neighbouring columns.
struct alignas(8) ScalePair { float first, second; };

// Those of this thread in eight columns, whose scales begin at `columns` in shared memory.
__device__ inline ScalePair scale_pair(const float* columns) {
    return *reinterpret_cast<const ScalePair*>(columns + fragment_column());
}

// sums += of[h] * column scale * scratch: `columns` are the scales of these columns, in shared memory.
template <u32 kCount>
__device__ inline void promote(float (&sums)[kCount], const float (&scratch)[kCount], const float (&of)[2][1], const float* columns) {
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
        const ScalePair by = scale_pair(columns + 8 * j);
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            sums[4 * j + 2 * h] += of[h][0] * by.first * scratch[4 * j + 2 * h];
            sums[4 * j + 2 * h + 1] += of[h][0] * by.second * scratch[4 * j + 2 * h + 1];
        }
    }
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
    for (u32 i = threadIdx.x % 128; i < kAll; i += 128) staged[i] = column + i < columns ? __ldg(of_columns + column + i) : 0.0f;
    float of[2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 r = row + fragment_row() + 8 * h;
        of[h] = r < rows ? __ldg(of_rows + r) : 0.0f;
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
