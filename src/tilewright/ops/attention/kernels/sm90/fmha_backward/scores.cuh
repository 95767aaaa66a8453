// P^T from S^T = K Q^T, and dS^T from dP^T = V dO^T, in the accumulators: rows are keys, columns are queries.
//
//     P = exp2(scale * log2(e) * S - lse)        S is softcapped and biased first, if the call does
//     dS = P * (dP - delta)                      times the derivative of the softcap; `scale` is applied to dQ and dK at the end
#pragma once

#include <tilewright/epilogue.cuh>

#include "schedule.cuh"
#include "fmha_forward/softmax.cuh"

namespace tilewright {

// Factors of the scores, in units of log2.
struct ScoreUnits {
    float score;    // scale * log2(e); with a softcap, twice what the score is multiplied by inside tanh
    float softcap;
    float slope;    // ALiBi
};

// Which of this thread's queries see its key h: columns 8 j + e of the accumulators from low[h] to high[h].
struct VisibleQueries {
    int low[2], high[2];
    float distance[2];  // position of column 0 less that of key h
};

// What a warpgroup needs to know about its 64 keys from `key` on.
template <bool kPacked> struct KeyVisibility {  // a band needs nothing but distances
    __device__ KeyVisibility(const BackwardSizes&, const Interval*, int) {}
};
template <> struct KeyVisibility<true> {
    Interval queries[2];  // that see this thread's keys
    Interval common;      // that see all 64 keys

    // keys: the intervals of the batch.
    __device__ KeyVisibility(const BackwardSizes& problem, const Interval* keys, int key) {
        const int last = problem.s_k - 1;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) queries[h] = keys[min(key + int(fragment_row() + 8 * h), last)];
        common = {keys[min(key + int(kWarpgroupM) - 1, last)].first, keys[min(key, last)].end};
    }
};

template <u32 kM>
__device__ inline VisibleQueries visible_queries(
    const BackwardSizes& problem, const KeyVisibility<false>&, int key, int row) {
    VisibleQueries visible;
    const int position = problem.position(row + int(fragment_column()));
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const int key_h = key + int(fragment_row() + 8 * h), distance = position - key_h;
        visible.low[h] = problem.right < 0 ? 0 : -problem.right - distance;
        visible.high[h] = key_h >= problem.s_k ? -1 : problem.left < 0 ? int(kM) : problem.left - distance;
        visible.distance[h] = float(distance);
    }
    return visible;
}

template <u32 kM>
__device__ inline VisibleQueries visible_queries(
    const BackwardSizes& problem, const KeyVisibility<true>& keys, int key, int row) {
    VisibleQueries visible;
    const int column = row + int(fragment_column());
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const int key_h = key + int(fragment_row() + 8 * h);
        visible.low[h] = keys.queries[h].first - column;
        visible.high[h] = key_h >= problem.s_k ? -1 : keys.queries[h].end - 1 - column;
        visible.distance[h] = float(problem.position(column) - key_h);
    }
    return visible;
}

// True if a query of the tile from `row` on does not see one of the 64 keys from `key` on, or a key does not exist.
template <u32 kM>
__device__ inline bool needs_mask(const BackwardSizes& problem, const KeyVisibility<false>&, int key, int row) {
    const int last = key + int(kWarpgroupM) - 1, position = problem.position(row);
    return last >= problem.s_k || (problem.right >= 0 && last > position + problem.right) ||
           (problem.left >= 0 && key < position + int(kM) - 1 - problem.left);
}
template <u32 kM>
__device__ inline bool needs_mask(const BackwardSizes& problem, const KeyVisibility<true>& keys, int key, int row) {
    return key + int(kWarpgroupM) > problem.s_k || keys.common.first > row || keys.common.end < min(row + int(kM), problem.s_q);
}

// Overwrites s with P, and under kEarlyDv writes P rounded to p.  With a softcap s becomes P times its derivative.
// lse: in units of log2, +infinity for queries that do not exist or see no key.
template <typename Config, bool kMasked>
__device__ inline void compute_p(
    float (&s)[Config::kBlockM / 2], u32 (&p)[Config::kBlockM / 4], const float* lse, const ScoreUnits& units,
    const VisibleQueries& visible) {
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (u32 j = 0; j < Config::kBlockM / 8; ++j) {
        const Pair row_lse = *reinterpret_cast<const Pair*>(lse + 8 * j + fragment_column());
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float derivative[2];
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float& x = s[4 * j + 2 * h + e];
                if constexpr (Config::kSoftcap) {  // tanh(x) = 1 - 2 / (1 + e^2x)
                    const float t = 1 - 2 * reciprocal(1 + exp2_approximate(x * units.score));
                    derivative[e] = 1 - t * t;
                    x = t * units.softcap - row_lse.x[e];
                } else {
                    x = x * units.score - row_lse.x[e];
                }
                const int column = int(8 * j + e);
                if constexpr (Config::kSlope) x -= units.slope * fabsf(visible.distance[h] + float(column));
                if constexpr (kMasked) x = column >= visible.low[h] && column <= visible.high[h] ? x : -infinity();
                x = exp2_approximate(x);
            }
            if constexpr (BackwardShape<Config>::kEarlyDv) {
                p[2 * j + h] = pack<typename Config::Element>(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
            }
            if constexpr (Config::kSoftcap) {
#pragma unroll
                for (u32 e = 0; e < 2; ++e) s[4 * j + 2 * h + e] *= derivative[e];
            }
        }
    }
}

// ds = s * (dP - delta), rounded; without kEarlyDv also p = s, rounded.
template <typename Config>
__device__ inline void compute_ds(
    u32 (&ds)[Config::kBlockM / 4], u32 (&p)[Config::kBlockM / 4], const float (&s)[Config::kBlockM / 2],
    const float (&dp)[Config::kBlockM / 2], const float* deltas) {
    using Element = typename Config::Element;
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (u32 j = 0; j < Config::kBlockM / 8; ++j) {
        const Pair delta = *reinterpret_cast<const Pair*>(deltas + 8 * j + fragment_column());
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 i = 4 * j + 2 * h;
            if constexpr (!BackwardShape<Config>::kEarlyDv) p[2 * j + h] = pack<Element>(s[i], s[i + 1]);
            ds[2 * j + h] = pack<Element>(s[i] * (dp[i] - delta.x[0]), s[i + 1] * (dp[i + 1] - delta.x[1]));
        }
    }
}

// Stores ds to shared memory, in boxes of 64 queries by the 64 keys of one warpgroup.
template <u32 kM> __device__ inline void stage_ds(const u32 (&ds)[kM / 4], u32 boxes) {
    const u32 lane = threadIdx.x % 32, smem_row = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (u32 j = 0; j < kM / 16; ++j) {
        stmatrix_x4(boxes + strip_offset<kSwizzle>(smem_row, 32 * j + lane / 16 * 16), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                       ds[4 * j + 3]);
    }
}

// kWide: stores dS = P * (dP - delta), rounded, of P rounded.  There are no registers for P in fp32, or for all of dS.
template <typename Config>
__device__ inline void stage_ds_of_p(
    const u32 (&p)[Config::kBlockM / 4], const float (&dp)[Config::kBlockM / 2], const float* deltas, u32 boxes) {
    using Element = typename Config::Element;
    struct alignas(8) Pair { float x[2]; };
    const u32 lane = threadIdx.x % 32, smem_row = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (u32 j = 0; j < Config::kBlockM / 16; ++j) {
        u32 ds[4];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
            const Pair delta = *reinterpret_cast<const Pair*>(deltas + 16 * j + r / 2 * 8 + fragment_column());
            const u32 i = 8 * j + 2 * r, pair = p[4 * j + r];
            const float low = to_float(Element{u16(pair)}), high = to_float(Element{u16(pair >> 16)});
            ds[r] = pack<Element>(low * (dp[i] - delta.x[0]), high * (dp[i + 1] - delta.x[1]));
        }
        stmatrix_x4(boxes + strip_offset<kSwizzle>(smem_row, 32 * j + lane / 16 * 16), ds[0], ds[1], ds[2], ds[3]);
    }
}

}  // namespace tilewright
