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

    // -infinity for keys from `problem.s_k` on and for those more than `right` behind the query's position.
    __device__ void cut_right(float (&s)[kCount], int key, const FmhaProblem& problem) const {
        const int first = key + int(fragment_column());
        int last[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const int there = problem.s_k - 1;
            last[h] = (problem.right < 0 ? there : min(there, position + int(8 * h) + problem.right)) - first;
        }
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) s[i] = int(i / 4 * 8 + i % 2) <= last[i % 4 / 2] ? s[i] : -infinity();
    }

    // -infinity for keys more than `left` before the query's position.
    __device__ void cut_left(float (&s)[kCount], int key, const FmhaProblem& problem) const {
        const int first = position - problem.left - key - int(fragment_column());
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            s[i] = int(i / 4 * 8 + i % 2) >= first + int(i % 4 / 2 * 8) ? s[i] : -infinity();
        }
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
