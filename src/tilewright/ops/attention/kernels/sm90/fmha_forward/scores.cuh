// Softcap, ALiBi and mask of a tile of scores, before the softmax.
#pragma once

#include <tilewright/epilogue.cuh>

#include "mask_program.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

namespace tilewright {

// A thread's scores of keys [key, key + 2 * kCount) and two queries, at position and position + 8.
template <u32 kCount> struct FmhaScores {
    int position;

    // s = scale * s, softcapped, minus slope * |position - key|; s and slope in units of log2.
    template <bool kSoftcap, bool kSlope>
    __device__ void apply_softcap_alibi(float (&s)[kCount], int key, float scale, float softcap, float slope) const {
        const float distance = float(position - key - int(fragment_column()));
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            if constexpr (kSoftcap) {  // tanh(x) = 1 - 2 / (1 + e^2x)
                const float e = exp2_approximate(s[i] * (2 * kLog2E * scale / softcap));
                s[i] = softcap * kLog2E * (1 - 2 * reciprocal(1 + e));
            } else {
                s[i] *= scale * kLog2E;
            }
            if constexpr (kSlope) s[i] -= slope * fabsf(distance + float(int(i % 4 / 2 * 8) - int(i / 4 * 8 + i % 2)));
        }
    }

    // -infinity for keys from `end` on, or before `first`; one bound per row.
    __device__ static void mask_right(float (&s)[kCount], int key, int end0, int end8) {
        const int column = key + int(fragment_column()), end[2] = {end0 - column, end8 - column};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) s[i] = int(i / 4 * 8 + i % 2) < end[i % 4 / 2] ? s[i] : -infinity();
    }
    __device__ static void mask_left(float (&s)[kCount], int key, int first0, int first8) {
        const int column = key + int(fragment_column()), first[2] = {first0 - column, first8 - column};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) s[i] = int(i / 4 * 8 + i % 2) >= first[i % 4 / 2] ? s[i] : -infinity();
    }

    // -infinity for keys that the mask program does not allow, and from s_k on.
    template <typename Mask> __device__ void mask_program(float (&s)[kCount], int key, int s_k, const MaskData& data) const {
#pragma unroll
        for (u32 offset = 0; offset < kCount / 2; offset += 32) {
            const MaskKeys keys{key + int(fragment_column() + offset * 4), min(32u, kCount / 2 - offset)};
            const u32 in_range = keys.before(s_k);
            const MaskBits allowed = Mask::visible(data, position, keys) & MaskBits{{in_range, in_range}};
#pragma unroll
            for (u32 i = 2 * offset; i < 2 * (offset + keys.count); ++i) {
                s[i] = allowed.row[i % 4 / 2] >> (i / 4 * 2 + i % 2 - offset) & 1 ? s[i] : -infinity();
            }
        }
    }
};

}  // namespace tilewright
