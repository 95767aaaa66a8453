// Search of a threshold: the largest key t so that at least `goal` of the row lies at keys >= t, exactly.
//
// The measure is a count (top-k) or a sum of integer weights (top-p).  A round narrows a bracket lo <= t < hi by the measures
// at seven pivots, summed over the cluster: first at distances from the maximum that double, then evenly between values, then
// between keys, so that it ends however the logits lie.  It ends early when all logits in the bracket are equal.
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"
#include "resident_row.cuh"

namespace tilewright {

constexpr u32 kPivots = 7, kMeasures = kPivots + 2;

template <typename Sum> struct Measured {
    Sum at[kPivots + 1];  // of keys at or above each pivot, and of all, inside the bracket
    int high, low;        // the largest and smallest key inside
};

// This thread's logits from value `lo` to below `hi`.
template <typename Sum, typename Row>
__device__ inline Measured<Sum> measure(const Row& row, typename Row::Scalar lo, typename Row::Scalar hi,
                                        const typename Row::Scalar (&pivots)[kPivots], float largest, float steep) {
    Measured<Sum> sums = {};
    auto high = lo, low = hi;  // as if there were none
    row.each([&](const typename Row::Elements& vector, u32) {
#pragma unroll
        for (u32 pair = 0; pair < Row::kWidth; pair += 2) {
            bool inside[2];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) inside[i] = vector.x[pair + i] >= lo && vector.x[pair + i] < hi;
            if (!inside[0] && !inside[1]) continue;
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const auto x = vector.x[pair + i];
                Sum m = 1;
                if constexpr (sizeof(Sum) == 8) m = weight_at(distance(x, largest, steep));
                m = inside[i] ? m : 0;
#pragma unroll
                for (u32 j = 0; j < kPivots; ++j) sums.at[j] += x >= pivots[j] ? m : 0;
                sums.at[kPivots] += m;
                high = inside[i] ? larger_of(high, x) : high;
                low = inside[i] ? lesser_of(low, x) : low;
            }
        }
    });
    sums.high = key_of(high), sums.low = key_of(low);
    return sums;
}

// The sums of the cluster: of measure j in lane j of every warp; in lane 8 the ends, the high one above.
// partial: kMeasures numbers a warp.
template <u32 kThreads, typename Sum, typename Rounds>
__device__ inline u64 sum_up(const Measured<Sum>& own, u64* partial, Rounds& rounds) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto joined = [](u32 j, u64 a, u64 b) {
        const u64 ends = u64(u32(max(int(a >> 32), int(b >> 32)))) << 32 | u32(min(int(a), int(b)));
        return j <= kPivots ? a + b : ends;
    };
    const u64 sum = warp_sum_8(own.at, lane);
    const int high = __reduce_max_sync(~0u, own.high), low = __reduce_min_sync(~0u, own.low);
    __syncthreads();  // all threads have sent and read the last round
    if (lane < kMeasures) partial[warp * kMeasures + lane] = lane <= kPivots ? sum : u64(u32(high)) << 32 | u32(low);
    __syncthreads();
    const u64* got = rounds.all(kMeasures, kThreads, [&](u32 j) {
        u64 total = partial[j];
        for (u32 w = 1; w < kThreads / 32; ++w) total = joined(j, total, partial[w * kMeasures + j]);
        return total;
    });
    const u32 j = min(lane, kMeasures - 1);
    u64 total = got[j];
    for (u32 b = 1; b < rounds.blocks; ++b) total = joined(j, total, got[b * kMeasures + j]);
    return total;
}

// Pivot `j` of a round, from high to low, in [lo, hi).
__device__ inline int choose_pivot(u32 round, u32 j, int lo, int hi, float unit) {
    const float top = value_of(hi - 1), bottom = fmaxf(value_of(lo), top - 64.0f * unit);
    const u32 width = u32(hi) - u32(lo), part = kPivots - j;  // of 8
    int key = int(u32(lo) + width / 8 * part + width % 8 * part / 8);
    if (round == 0) key = ordered(top - 0.5f * float(1 << j) * unit);
    if (round == 1 || round == 2) key = ordered(bottom + (top - bottom) * (0.125f * float(part)));
    return max(min(key, hi - 1), lo);
}

// goal_of(measure of all logits at keys >= lo) is what the threshold must leave; lo is the result where all is less than that.
// unit: the scale of the first distances; bounded: lo is near, these are not needed.
template <typename Sum, typename Row, typename Rounds, typename Goal>
__device__ inline int search(const Row& row, u64* partial, Rounds& rounds, int lo, int highest, float steep, float unit,
                             bool bounded, Goal goal_of) {
    using Scalar = typename Row::Scalar;
    const u32 lane = threadIdx.x % 32;
    const bool has_pivot = lane < kPivots;
    const float largest = value_of(highest);
    int hi = highest + 1;
    u64 base = 0, goal = 0;  // base: the measure at keys >= hi
    for (u32 round = bounded ? 1 : 0; u32(hi) - u32(lo) > 1; ++round) {
        const Scalar pivot = scalar_at<Scalar>(choose_pivot(round, min(lane, kPivots - 1), lo, hi, unit));
        Scalar pivots[kPivots];
#pragma unroll
        for (u32 j = 0; j < kPivots; ++j) pivots[j] = __shfl_sync(~0u, pivot, j);
        const Measured<Sum> own = measure<Sum>(row, scalar_at<Scalar>(lo), scalar_at<Scalar>(hi), pivots, largest, steep);
        const u64 sum = sum_up<Row::kThreads>(own, partial, rounds);
        const u64 total = __shfl_sync(~0u, sum, kPivots), ends = __shfl_sync(~0u, sum, kPivots + 1);
        if (goal == 0) goal = goal_of(total);
        if (base + total < goal) return lo;
        if (int(ends >> 32) == int(ends)) return int(ends);

        const int key = key_of(pivot);
        const u64 measured = base + sum;
        const bool enough = measured >= goal;
        lo = max(max(lo, int(ends)), __reduce_max_sync(~0u, has_pivot && enough ? key : kNothing));
        hi = min(min(hi, int(ends >> 32) + 1), __reduce_min_sync(~0u, has_pivot && !enough ? key : 0x7fffffff));
        const u32 at_hi = __ballot_sync(~0u, has_pivot && !enough && key == hi);
        const u64 next_base = __shfl_sync(~0u, measured, at_hi ? __ffs(at_hi) - 1 : 0);
        base = at_hi ? next_base : base;
    }
    return lo;
}

}  // namespace tilewright
