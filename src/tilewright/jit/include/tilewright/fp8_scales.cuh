// Scales of e4m3 operands on their way into float32 sums.
//
// The tensor cores add 128 products of K with about 14 bits, then ordinary code takes the result over: sums += scale *
// scratch.  Scales of the three kinds below that change along K come in time for that: of rows and of blocks by ordinary
// loads some steps ahead, of columns through the ring, since every thread needs a quarter of them.
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
    i64 b_pitch, b_batch;  // Block: from one 128 columns to the next
};

__device__ constexpr u32 common_divisor(u32 a, u32 b) { return b == 0 ? a : common_divisor(b, a % b); }

// What one thread multiplies its results by, in kPasses passes over a step: kDown over 64 rows of each of kGroups
// warpgroups, and as many times over kColumns columns.  Values are loaded kAhead steps before they are used.
template <Scaling kScaling, u32 kGroups, u32 kDown, u32 kPasses, u32 kColumns, u32 kAhead> class StepScales {
    static constexpr bool kBlocks = kScaling == Scaling::TokenByBlock;

  public:
    // Columns of a pass that lie in one block of 128 for sure, and the blocks that a pass may touch.
    static constexpr u32 kAlike = common_divisor(kColumns, 128);
    static constexpr u32 kOfPass = !kBlocks || kColumns % 128 == 0 || 128 % kColumns == 0 ? 1 : 2;
    using Values = float[kPasses][2][kOfPass];  // for row 8 h of the thread in a pass, and block i of columns: [pass][h][i]
    static_assert(kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken, "others do not change along K");
    static_assert(!kBlocks || 128 - kAlike + kColumns <= 128 * kOfPass, "a pass touches at most two blocks");

    // row, column: of this thread's first element and of the tile, in matrices of `rows` rows and `columns` columns.
    __device__ StepScales(const ScaleArgs& args, u32 row, u32 column, u32 rows, u32 columns, u32 step, u32 steps, u32 batch_a,
                          u32 batch_b)
        : rows_(args.a + batch_a * args.a_batch + step * args.a_pitch + row), pitch_(args.a_pitch), left_(steps) {
#pragma unroll
        for (u32 i = 0; i < 2 * kDown; ++i) row_exists_[i] = row + row_of(i) < rows;
        if constexpr (kBlocks) {
            blocks_ = args.b + batch_b * args.b_batch + column / 128 * args.b_pitch + step;
            block_pitch_ = args.b_pitch;
            before_ = (128 - column % 128) / kAlike;
#pragma unroll
            for (u32 i = 0; i < kTouched; ++i) block_exists_[i] = (column / 128 + i) * 128 < columns;
        }
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) load(i);
    }

    // Those of the next step; and loads for a later one.
    __device__ void take(Values& values) {
#pragma unroll
        for (u32 pass = 0; pass < kPasses; ++pass) {
#pragma unroll
            for (u32 i = 0; i < 2 * kOfPass; ++i) {
                const float block = kBlocks ? block_[0][pass / kDown * kOfPass + i % kOfPass] : 1.0f;
                values[pass][i / kOfPass][i % kOfPass] = row_[0][pass % kDown * 2 + i / kOfPass] * block;
            }
        }
#pragma unroll
        for (u32 i = 1; i < kAhead; ++i) {
#pragma unroll
            for (u32 j = 0; j < 2 * kDown; ++j) row_[i - 1][j] = row_[i][j];
#pragma unroll
            for (u32 j = 0; j < kTouched; ++j) block_[i - 1][j] = block_[i][j];
        }
        load(kAhead - 1);
    }

    // Groups of kAlike columns of a pass that lie in its first block.
    __device__ u32 before() const { return before_; }

  private:
    static constexpr u32 kTouched = kPasses / kDown * kOfPass;

    const float *rows_, *blocks_;
    i64 pitch_, block_pitch_;
    u32 left_, before_ = 0;
    bool row_exists_[2 * kDown], block_exists_[kTouched];
    float row_[kAhead][2 * kDown], block_[kAhead][kTouched];

    __device__ static constexpr u32 row_of(u32 i) { return i / 2 * 64 * kGroups + i % 2 * 8; }

    __device__ void load(u32 slot) {
        if (left_ == 0) return;
#pragma unroll
        for (u32 i = 0; i < 2 * kDown; ++i) row_[slot][i] = row_exists_[i] ? __ldg(rows_ + row_of(i)) : 0.0f;
        rows_ += pitch_;
        if constexpr (kBlocks) {
#pragma unroll
            for (u32 i = 0; i < kTouched; ++i) block_[slot][i] = block_exists_[i] ? __ldg(blocks_ + i * block_pitch_) : 0.0f;
            ++blocks_;
        }
        --left_;
    }
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

// sums *= row scale * column scale, once: sums[across * kDown + down] of the rows from `row` + down * kRows on and the columns
// from `column` + across * 2 kCount on; absent scales are 0.  By a warpgroup, which meets at `barrier` and has the memory at
// `staged`, where earlier stores may still read: 32 column scales a thread in registers would be too many.
template <u32 kDown, u32 kRows, u32 kPasses, u32 kCount>
__device__ inline void scale_sums(float (&sums)[kPasses][kCount], const float* of_rows, const float* of_columns, u32 row,
                                  u32 column, u32 rows, u32 columns, float* staged, u32 barrier) {
    constexpr u32 kAll = kPasses / kDown * 2 * kCount;
    if (threadIdx.x % 128 == 0) tma_wait_read<0>();
    sync_threads(barrier, 128);
    for (u32 i = threadIdx.x % 128; i < kAll; i += 128) staged[i] = column + i < columns ? __ldg(of_columns + column + i) : 0.0f;
    float of[kDown][2];
#pragma unroll
    for (u32 i = 0; i < 2 * kDown; ++i) {
        const u32 r = row + i / 2 * kRows + fragment_row() + i % 2 * 8;
        of[i / 2][i % 2] = r < rows ? __ldg(of_rows + r) : 0.0f;
    }
    sync_threads(barrier, 128);
#pragma unroll
    for (u32 j = 0; j < kAll / 8; ++j) {
        const ScalePair by = scale_pair(staged + 8 * j);
        const u32 pass = j / (kCount / 4) * kDown, at = j % (kCount / 4) * 4;
#pragma unroll
        for (u32 i = 0; i < 2 * kDown; ++i) {
            float* const pair = sums[pass + i / 2] + at + i % 2 * 2;
            pair[0] *= of[i / 2][i % 2] * by.first, pair[1] *= of[i / 2][i % 2] * by.second;
        }
    }
}

}  // namespace tilewright
