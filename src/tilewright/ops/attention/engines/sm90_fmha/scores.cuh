// What happens to the scores of a tile before their softmax: softcap, ALiBi, the mask.
#pragma once

#include <tilewright/epilogue.cuh>
#include "mask_program.cuh"

#include "schedule.cuh"
#include "softmax.cuh"

namespace tilewright {

// Scores of keys [key, key + 2 * kCount) and this thread's rows, which stand at position and position + 8.
template <u32 kCount> struct FmhaScores {
    int position;

    // To units of log2: scale * s, softcapped if softcap > 0, less slope * |position - key|.  slope in units of log2.
    template <bool kSoftcap, bool kSlope>
    __device__ void modify(float (&s)[kCount], int key, float scale, float softcap, float slope) const {
        const float away = float(position - key - int(fragment_column()));
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            if constexpr (kSoftcap) {  // tanh(x) = 1 - 2 / (1 + e^2x)
                const float e = exp2_approximate(s[i] * (2 * kLog2E * scale / softcap));
                s[i] = softcap * kLog2E * (1 - 2 * reciprocal(1 + e));
            } else {
                s[i] *= scale * kLog2E;
            }
            if constexpr (kSlope) s[i] -= slope * fabsf(away + float(int(i % 4 / 2 * 8) - int(i / 4 * 8 + i % 2)));
        }
    }

    // -infinity for keys from `end` on and before `first`, of the two rows.
    __device__ static void cut_right(float (&s)[kCount], int key, int end0, int end8) {
        const int from = key + int(fragment_column()), end[2] = {end0 - from, end8 - from};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) s[i] = int(i / 4 * 8 + i % 2) < end[i % 4 / 2] ? s[i] : -infinity();
    }
    __device__ static void cut_left(float (&s)[kCount], int key, int first0, int first8) {
        const int from = key + int(fragment_column()), first[2] = {first0 - from, first8 - from};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) s[i] = int(i / 4 * 8 + i % 2) >= first[i % 4 / 2] ? s[i] : -infinity();
    }

    // -infinity for keys that the program does not allow, and for those from s_k on.
    template <typename Mask> __device__ void cut(float (&s)[kCount], int key, int s_k, const MaskData& data) const {
#pragma unroll
        for (u32 from = 0; from < kCount / 2; from += 32) {
            const MaskKeys keys{key + int(fragment_column() + from * 4), min(32u, kCount / 2 - from)};
            const u32 there = keys.before(s_k);
            const MaskBits seen = Mask::see(data, position, keys) & MaskBits{{there, there}};
#pragma unroll
            for (u32 i = 2 * from; i < 2 * (from + keys.count); ++i) {
                s[i] = seen.row[i % 4 / 2] >> (i / 4 * 2 + i % 2 - from) & 1 ? s[i] : -infinity();
            }
        }
    }
};

}  // namespace tilewright
