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
__device__ inline Measured<Sum> measure(const Row& row, float lo, float hi, const float (&pivots)[kPivots], float largest,
                                        float steep) {
    Measured<Sum> sums = {};
    float high = minus_infinity<float>(), low = kLargest;
    row.each([&](const Vector<typename Row::Element>& vector, u32) {
#pragma unroll
        for (u32 pair = 0; pair < Row::kWidth; pair += 2) {
            bool inside[2];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) inside[i] = vector.x[pair + i] >= lo && vector.x[pair + i] < hi;
            if (!inside[0] && !inside[1]) continue;
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const float x = vector.x[pair + i];
                Sum m = 1;
                if constexpr (sizeof(Sum) == 8) m = weight_at(distance(x, largest, steep));
                m = inside[i] ? m : 0;
#pragma unroll
                for (u32 j = 0; j < kPivots; ++j) sums.at[j] += x >= pivots[j] ? m : 0;
                sums.at[kPivots] += m;
                high = inside[i] ? fmaxf(high, x) : high;
                low = inside[i] ? fminf(low, x) : low;
            }
        }
    });
    sums.high = ordered(high), sums.low = ordered(low);
    return sums;
}

// The sums of the cluster, in all threads.  partial: kMeasures numbers a warp.
template <u32 kThreads, typename Sum, typename Rounds>
__device__ inline Measured<u64> sum_up(const Measured<Sum>& own, u64* partial, Rounds& rounds) {
    constexpr u32 kWarps = kThreads / 32;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 sum = warp_sum_8(own.at, lane);
    const int high = __reduce_max_sync(~0u, own.high), low = __reduce_min_sync(~0u, own.low);
    __syncthreads();  // all threads have sent and read the last round
    if (lane < 8) partial[warp * kMeasures + lane] = sum;
    if (lane == 8) partial[warp * kMeasures + 8] = u64(u32(high)) << 32 | u32(low);
    __syncthreads();
    const u64* got = rounds.all(kMeasures, kThreads, [&](u32 j) {
        u64 total = partial[j];
        for (u32 w = 1; w < kWarps; ++w) {
            const u64 more = partial[w * kMeasures + j];
            total = j < 8 ? total + more
                          : u64(u32(max(int(total >> 32), int(more >> 32)))) << 32 | u32(min(int(total), int(more)));
        }
        return total;
    });
    Measured<u64> all = {{}, kNothing, 0x7fffffff};
    for (u32 b = 0; b < rounds.blocks; ++b) {
#pragma unroll
        for (u32 j = 0; j <= kPivots; ++j) all.at[j] += got[b * kMeasures + j];
        const u64 ends = got[b * kMeasures + kPivots + 1];
        all.high = max(all.high, int(ends >> 32)), all.low = min(all.low, int(ends));
    }
    return all;
}

// The pivots of a round, from high to low, in [lo, hi).
__device__ inline void choose_pivots(u32 round, int lo, int hi, float unit, float (&pivots)[kPivots]) {
    const float top = value_of(hi - 1), bottom = fmaxf(value_of(lo), top - 64.0f * unit);
    const u32 width = u32(hi) - u32(lo);
#pragma unroll
    for (u32 j = 0; j < kPivots; ++j) {
        const u32 part = kPivots - j;  // of 8
        int key = int(u32(lo) + width / 8 * part + width % 8 * part / 8);
        if (round == 0) key = ordered(top - 0.5f * float(1 << j) * unit);
        if (round == 1 || round == 2) key = ordered(bottom + (top - bottom) * (0.125f * float(part)));
        pivots[j] = value_of(max(min(key, hi - 1), lo));
    }
}

// goal_of(measure of all logits at keys >= lo) is what the threshold must leave; lo is the result where all is less than that.
// unit: the scale of the first distances; bounded: lo is near, these are not needed.
template <typename Sum, typename Row, typename Rounds, typename Goal>
__device__ inline int search(const Row& row, u64* partial, Rounds& rounds, int lo, int highest, float steep, float unit,
                             bool bounded, Goal goal_of) {
    const float largest = value_of(highest);
    int hi = highest + 1;
    u64 base = 0, goal = 0;  // the measure at keys >= hi
    for (u32 round = bounded ? 1 : 0; u32(hi) - u32(lo) > 1; ++round) {
        float pivots[kPivots];
        choose_pivots(round, lo, hi, unit, pivots);
        const Measured<Sum> own = measure<Sum>(row, value_of(lo), value_of(hi), pivots, largest, steep);
        const Measured<u64> all = sum_up<Row::kThreads>(own, partial, rounds);
        if (goal == 0) goal = goal_of(all.at[kPivots]);
        if (base + all.at[kPivots] < goal) return lo;
        if (all.high == all.low) return all.high;
        const u64 above = base;
        lo = max(lo, all.low), hi = min(hi, all.high + 1);
#pragma unroll
        for (u32 j = 0; j < kPivots; ++j) {
            const int key = ordered(pivots[j]);
            const u64 measured = above + all.at[j];
            if (measured >= goal) {
                lo = max(lo, key);
            } else if (key < hi) {
                hi = key, base = measured;
            }
        }
    }
    return lo;
}

}  // namespace tilewright
