// A draw from a resident row: the weights that are left are summed by warps, blocks and the cluster, and the warp in whose part
// the running sum passes u walks that part again (part.cuh).
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"
#include "part.cuh"
#include "resident_row.cuh"
#include "short_list.cuh"

namespace tilewright {

// Logits from value `lo` on, of at least `least`; cut: distances from there on have smaller weights.
struct Kept {
    float lo, largest, steep, cut;
    u64 least;

    __device__ bool maybe(float x) const { return x >= lo && distance(x, largest, steep) < cut; }
    __device__ u64 weight(float x) const {
        const u64 w = weight_at(distance(x, largest, steep));
        return maybe(x) && w >= least ? w : 0;
    }
};

// The weights of a vector.
template <typename Element>
__device__ inline u64 weights_of(const Vector<Element>& vector, const Kept& kept, u64 (&weights)[Vector<Element>::kWidth]) {
    u64 sum = 0;
#pragma unroll
    for (u32 half = 0; half < Vector<Element>::kWidth; half += 4) {
        bool any = false;
#pragma unroll
        for (u32 i = half; i < half + 4; ++i) any |= kept.maybe(vector.x[i]), weights[i] = 0;
        if (!any) continue;
#pragma unroll
        for (u32 i = half; i < half + 4; ++i) sum += weights[i] = kept.weight(vector.x[i]);
    }
    return sum;
}

template <typename Row> __device__ inline u64 part_mass(const Row& row, const Part& part, const Kept& kept) {
    u64 sum = 0, weights[Row::kWidth];
    row.each_of_warp_from(kept.lo, part.begin, part.end,
                          [&](const typename Row::Elements& vector, u32) { sum += weights_of(vector, kept, weights); });
    return warp_sum(sum);
}

// write(token, logit, weight) is called by one lane of the warp.
template <typename Row, typename Write>
__device__ inline void draw_kept(const Row& row, const Part& part, const Kept& kept, u64 u, Write write) {
    draw_from_part<Row::kWidth>(
        part, u, [&](u32 v, u64 (&weights)[Row::kWidth]) { return weights_of(row.at(v), kept, weights); },
        [&](u32 v, u32 i, u64 weight) {
            const auto vector = row.at(v);
            float logit = vector.x[0];
#pragma unroll
            for (u32 other = 1; other < Row::kWidth; ++other) logit = other == i ? vector.x[other] : logit;
            write(row.token(v, i), logit, weight);
        });
}

}  // namespace tilewright
