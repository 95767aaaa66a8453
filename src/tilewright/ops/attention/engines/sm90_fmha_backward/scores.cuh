// From S^T = K Q^T to P^T and from dP^T to dS^T, in the registers of the warpgroup that multiplied them: rows are keys,
// columns queries.
#pragma once

#include <tilewright/epilogue.cuh>

#include "schedule.cuh"
#include "sm90_fmha/softmax.cuh"

namespace tilewright {

// What the scores of a call have in common; all in units of log2.
struct BackwardScale {
    float score;     // of a score, or what a softcapped one is multiplied by within its tanh, twice
    float softcap;
    float slope;
};

// Of this thread's queries, counted as 8 j + e, those that see its key h: from `low` to `high`.  away: from that key to
// query 0.
struct BackwardSeen {
    int low[2], high[2];
    float away[2];
};

// Which queries see a thread's two keys; and which see all 64 of its warpgroup from `key` on.
template <bool kSpans> struct BackwardOwn {  // of a band, from distances
    __device__ BackwardOwn(const BackwardProblem<false>&, int) {}
};
template <> struct BackwardOwn<true> {
    Interval of[2], all;

    __device__ BackwardOwn(const BackwardProblem<true>& problem, int key) {
        const int last = problem.s_k - 1;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) of[h] = problem.spans[min(key + int(fragment_row() + 8 * h), last)];
        all = {problem.spans[min(key + int(kRowsOfGroup) - 1, last)].first, problem.spans[min(key, last)].end};
    }
};

template <u32 kM>
__device__ inline BackwardSeen seen_queries(
    const BackwardProblem<false>& problem, const BackwardOwn<false>&, int key, int row) {
    BackwardSeen seen;
    const int position = problem.position(row + int(fragment_column()));
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const int at = key + int(fragment_row() + 8 * h), away = position - at;
        seen.low[h] = problem.right < 0 ? 0 : -problem.right - away;
        seen.high[h] = at >= problem.s_k ? -1 : problem.left < 0 ? int(kM) : problem.left - away;
        seen.away[h] = float(away);
    }
    return seen;
}

template <u32 kM>
__device__ inline BackwardSeen seen_queries(
    const BackwardProblem<true>& problem, const BackwardOwn<true>& own, int key, int row) {
    BackwardSeen seen;
    const int column = row + int(fragment_column());
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const int at = key + int(fragment_row() + 8 * h);
        seen.low[h] = own.of[h].first - column;
        seen.high[h] = at >= problem.s_k ? -1 : own.of[h].end - 1 - column;
        seen.away[h] = float(problem.position(column) - at);
    }
    return seen;
}

// Has a warpgroup's 64 keys from `key` on one that a query of tile `row` does not see, or that is not there?
template <u32 kM>
__device__ inline bool must_cut(const BackwardProblem<false>& problem, const BackwardOwn<false>&, int key, int row) {
    const int last = key + int(kRowsOfGroup) - 1, position = problem.position(row);
    return last >= problem.s_k || (problem.right >= 0 && last > position + problem.right) ||
           (problem.left >= 0 && key < position + int(kM) - 1 - problem.left);
}
template <u32 kM>
__device__ inline bool must_cut(const BackwardProblem<true>& problem, const BackwardOwn<true>& own, int key, int row) {
    return key + int(kRowsOfGroup) > problem.s_k || own.all.first > row || own.all.end < min(row + int(kM), problem.s_q);
}

// s becomes P, and under kEarlyDv p holds it rounded; under a softcap, s becomes P times the derivative of the cap.  logs: of
// the sums, in units of log2, +infinity for queries that are not there or see nothing.
template <typename Config, bool kCut>
__device__ inline void to_probabilities(
    float (&s)[Config::kBlockM / 2], u32 (&p)[Config::kBlockM / 4], const float* logs, const BackwardScale& scale,
    const BackwardSeen& seen) {
    struct alignas(8) Pair { float of[2]; };
#pragma unroll
    for (u32 j = 0; j < Config::kBlockM / 8; ++j) {
        const Pair log = *reinterpret_cast<const Pair*>(logs + 8 * j + fragment_column());
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float factor[2];
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float& x = s[4 * j + 2 * h + e];
                if constexpr (Config::kSoftcap) {  // tanh(x) = 1 - 2 / (1 + e^2x)
                    const float t = 1 - 2 * reciprocal(1 + exp2_approximate(x * scale.score));
                    factor[e] = 1 - t * t;
                    x = t * scale.softcap - log.of[e];
                } else {
                    x = x * scale.score - log.of[e];
                }
                const int column = int(8 * j + e);
                if constexpr (Config::kSlope) x -= scale.slope * fabsf(seen.away[h] + float(column));
                if constexpr (kCut) x = column >= seen.low[h] && column <= seen.high[h] ? x : -infinity();
                x = exp2_approximate(x);
            }
            if constexpr (BackwardShape<Config>::kEarlyDv) {
                p[2 * j + h] = pack<typename Config::Element>(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
            }
            if constexpr (Config::kSoftcap) {
#pragma unroll
                for (u32 e = 0; e < 2; ++e) s[4 * j + 2 * h + e] *= factor[e];
            }
        }
    }
}

// ds = s (dP - delta), rounded; and p is s rounded, if it is not yet.
template <typename Config>
__device__ inline void to_score_gradients(
    u32 (&ds)[Config::kBlockM / 4], u32 (&p)[Config::kBlockM / 4], const float (&s)[Config::kBlockM / 2],
    const float (&dp)[Config::kBlockM / 2], const float* deltas) {
    struct alignas(8) Pair { float of[2]; };
#pragma unroll
    for (u32 j = 0; j < Config::kBlockM / 8; ++j) {
        const Pair delta = *reinterpret_cast<const Pair*>(deltas + 8 * j + fragment_column());
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 i = 4 * j + 2 * h;
            if constexpr (!BackwardShape<Config>::kEarlyDv) p[2 * j + h] = pack<typename Config::Element>(s[i], s[i + 1]);
            ds[2 * j + h] = pack<typename Config::Element>(s[i] * (dp[i] - delta.of[0]), s[i + 1] * (dp[i + 1] - delta.of[1]));
        }
    }
}

// ds to shared memory, to strips of 64 queries by the 64 keys of a warpgroup.
template <u32 kM> __device__ inline void stage_score_gradients(const u32 (&ds)[kM / 4], u32 strips) {
    const u32 lane = threadIdx.x % 32, to_row = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (u32 j = 0; j < kM / 16; ++j) {
        stmatrix_x4(strips + strip_offset<kSpan>(to_row, 32 * j + lane / 16 * 16), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                       ds[4 * j + 3]);
    }
}

}  // namespace tilewright
