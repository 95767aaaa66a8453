// Search of a threshold: the largest key t so that at least `goal` of the row lies at keys >= t, exactly.
//
// The measure is a count (top-k) or a sum of integer weights (top-p).  A round narrows a bracket lo <= t < hi by the measures
// at some pivots, summed over the cluster: first at distances from the maximum that double, then evenly between values, then
// between keys, so that it ends however the logits lie.  As soon as few of a block's logits lie inside, it lists them and
// leaves the row alone.  The search ends early when all logits in the bracket are equal.
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"
#include "resident_row.cuh"

namespace tilewright {

constexpr u32 kPivots = 7, kFirstPivots = 4, kMeasures = kPivots + 2, kNear = 1024;

// What a search needs in shared memory.
template <u32 kThreads, typename Scalar> struct SearchMemory {
    u64 of_warps[kMeasures * kThreads / 32], sums[kMeasures];
    Scalar near[kNear];  // this block's elements inside the bracket
    u32 near_count;
};

template <typename Sum> struct Measured {
    Sum at[kPivots + 1];  // of keys at or above each pivot, and of all, inside the bracket
    int high, low;        // the largest and smallest key inside
};

// Measures of elements from `lo` to below `hi`, at the first kUsed pivots.
template <typename Sum, u32 kUsed, typename Scalar> struct Measuring {
    const Scalar lo, hi, (&pivots)[kPivots];
    const float largest, steep;
    Measured<Sum> sums = {};
    Scalar high = lo, low = hi;

    template <u32 kCount> __device__ void take(const Scalar (&x)[kCount]) {
        Sum m[kCount];
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            m[i] = 1;
            if constexpr (sizeof(Sum) == 8) m[i] = weight_at(distance(x[i], largest, steep));
        }
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            const bool inside = x[i] >= lo && x[i] < hi;
            m[i] = inside ? m[i] : 0;
#pragma unroll
            for (u32 j = 0; j < kUsed; ++j) sums.at[j] += x[i] >= pivots[j] ? m[i] : 0;
            sums.at[kPivots] += m[i];
            high = inside ? larger_of(high, x[i]) : high;
            low = inside ? lesser_of(low, x[i]) : low;
        }
    }

    __device__ Measured<Sum> result() {
        sums.high = key_of(high), sums.low = key_of(low);
        return sums;
    }
};

// Of this block's share of the row.
template <typename Sum, u32 kUsed, typename Row, typename Scalar>
__device__ inline Measured<Sum> measure_row(const Row& row, Scalar lo, Scalar hi, const Scalar (&pivots)[kPivots], float largest,
                                            float steep) {
    Measuring<Sum, kUsed, Scalar> measuring{lo, hi, pivots, largest, steep};
    row.each_from(lo, [&](const typename Row::Elements& vector, u32) {
#pragma unroll
        for (u32 pair = 0; pair < Row::kWidth; pair += 2) {
            const Scalar two[2] = {vector.x[pair], vector.x[pair + 1]};
            measuring.take(two);
        }
    });
    return measuring.result();
}

// Of the list of those inside.
template <typename Sum, u32 kThreads, typename Scalar>
__device__ inline Measured<Sum> measure_near(const SearchMemory<kThreads, Scalar>& memory, u32 count, Scalar lo, Scalar hi,
                                             const Scalar (&pivots)[kPivots], float largest, float steep) {
    Measuring<Sum, kPivots, Scalar> measuring{lo, hi, pivots, largest, steep};
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const Scalar one[1] = {memory.near[i]};
        measuring.take(one);
    }
    return measuring.result();
}

// Lists this block's elements inside the bracket; returns how many there are, of which the first kNear are listed.
template <typename Row, typename Memory, typename Scalar>
__device__ inline u32 list_near(const Row& row, Memory& memory, Scalar lo, Scalar hi) {
    __syncthreads();
    if (threadIdx.x == 0) memory.near_count = 0;
    __syncthreads();
    row.each_from(lo, [&](const typename Row::Elements& vector, u32) {
#pragma unroll
        for (u32 i = 0; i < Row::kWidth; ++i) {
            if (!(vector.x[i] >= lo && vector.x[i] < hi)) continue;
            const u32 at = atomicAdd(&memory.near_count, 1u);
            if (at < kNear) memory.near[at] = vector.x[i];
        }
    });
    __syncthreads();
    return memory.near_count;
}

// The sums of the cluster: of measure j in lane j of every warp; in lane 8 the ends, the high one above.  A warp joins the
// numbers of one measure, of warps and then of blocks.
template <u32 kThreads, typename Sum, typename Scalar, typename Rounds>
__device__ inline u64 sum_up(const Measured<Sum>& own, SearchMemory<kThreads, Scalar>& memory, Rounds& rounds) {
    constexpr u32 kWarps = kThreads / 32;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto ends_of = [](int high, int low) { return u64(u32(high)) << 32 | u32(low); };
    const auto join = [&](u32 j, bool there, u64 number) {
        if (j < kMeasures - 1) return warp_sum(there ? number : 0);
        const int high = there ? int(number >> 32) : -2147483647 - 1, low = there ? int(number) : 2147483647;
        return ends_of(__reduce_max_sync(~0u, high), __reduce_min_sync(~0u, low));
    };
    const u64 sum = warp_sum_8(own.at, lane);
    const u64 ends = ends_of(__reduce_max_sync(~0u, own.high), __reduce_min_sync(~0u, own.low));
    __syncthreads();  // all threads have sent and read the last round
    if (lane < kMeasures) memory.of_warps[lane * kWarps + warp] = lane < kMeasures - 1 ? sum : ends;
    __syncthreads();
    rounds.begin(kMeasures);
    for (u32 j = warp; j < kMeasures; j += kWarps) {
        const u64 number = join(j, lane < kWarps, memory.of_warps[j * kWarps + min(lane, kWarps - 1)]);
        rounds.post(j, number);
    }
    const u64* got = rounds.wait();
    for (u32 j = warp; j < kMeasures; j += kWarps) {
        const u64 number = join(j, lane < rounds.blocks, got[j * kMostBlocks + min(lane, kMostBlocks - 1)]);
        if (lane == 0) memory.sums[j] = number;
    }
    __syncthreads();
    return memory.sums[min(lane, kMeasures - 1)];
}

// Pivot `j` of a round, from high to low, in [lo, hi).
__device__ inline int choose_pivot(u32 round, u32 j, int lo, int hi, float unit) {
    const float top = value_of(hi - 1), bottom = fmaxf(value_of(lo), top - 64.0f * unit);
    const u32 width = u32(hi) - u32(lo), part = kPivots - j;  // of 8
    int key = int(u32(lo) + width / 8 * part + width % 8 * part / 8);
    if (round == 0) key = ordered(top - 2.0f * float(1 << j) * unit);
    if (round == 1 || round == 2) key = ordered(bottom + (top - bottom) * (0.125f * float(part)));
    return max(min(key, hi - 1), lo);
}

// goal_of(measure of all logits at keys >= lo) is what the threshold must leave; lo is the result where all is less than that.
// unit: the scale of the first distances; bounded: lo is near, these are not needed.
template <typename Sum, typename Row, typename Memory, typename Rounds, typename Goal>
__device__ inline int search(const Row& row, Memory& memory, Rounds& rounds, int lo, int highest, float steep, float unit,
                             bool bounded, Goal goal_of) {
    using Scalar = typename Row::Scalar;
    constexpr u32 kFirst = sizeof(Sum) == 8 ? kFirstPivots : kPivots;  // weights of all logits take long enough
    const u32 lane = threadIdx.x % 32;
    const float largest = value_of(highest);
    int hi = highest + 1;
    u64 base = 0, goal = 0;  // base: the measure at keys >= hi
    u32 near = kNear + 1;
    for (u32 round = bounded ? 1 : 0; u32(hi) - u32(lo) > 1; ++round) {
        if (near > kNear && round > 0) near = list_near(row, memory, scalar_at<Scalar>(lo), scalar_at<Scalar>(hi));
        const bool listed = near <= kNear;
        const u32 used = round == 0 ? kFirst : kPivots;  // the same in all blocks, whichever of them have lists
        const Scalar pivot = scalar_at<Scalar>(choose_pivot(round, min(lane, used - 1), lo, hi, unit));
        Scalar pivots[kPivots];
#pragma unroll
        for (u32 j = 0; j < kPivots; ++j) pivots[j] = __shfl_sync(~0u, pivot, j);
        const Scalar low = scalar_at<Scalar>(lo), high = scalar_at<Scalar>(hi);
        Measured<Sum> own;
        if (listed) {
            own = measure_near<Sum>(memory, near, low, high, pivots, largest, steep);
        } else if (used == kPivots) {
            own = measure_row<Sum, kPivots>(row, low, high, pivots, largest, steep);
        } else {
            own = measure_row<Sum, kFirst>(row, low, high, pivots, largest, steep);
        }
        const u64 sum = sum_up(own, memory, rounds);
        const u64 total = __shfl_sync(~0u, sum, kPivots), ends = __shfl_sync(~0u, sum, kPivots + 1);
        if (goal == 0) goal = goal_of(total);
        if (base + total < goal) return lo;
        if (int(ends >> 32) == int(ends)) return int(ends);

        const int key = key_of(pivot);
        const u64 measured = base + sum;
        const bool has_pivot = lane < used, enough = measured >= goal;
        lo = max(max(lo, int(ends)), __reduce_max_sync(~0u, has_pivot && enough ? key : kNothing));
        hi = min(min(hi, int(ends >> 32) + 1), __reduce_min_sync(~0u, has_pivot && !enough ? key : 0x7fffffff));
        const u32 at_hi = __ballot_sync(~0u, has_pivot && !enough && key == hi);
        const u64 next_base = __shfl_sync(~0u, measured, at_hi ? __ffs(at_hi) - 1 : 0);
        base = at_hi ? next_base : base;
    }
    return lo;
}

}  // namespace tilewright
