// A draw from a resident row: the weights that are left are summed by warps, blocks and the cluster, and the warp in whose part
// the running sum passes u walks that part again.
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"
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

// The part [begin, end) of the block's vectors that a warp takes: together in the order of tokens.
struct Part {
    u32 begin, end;
    __device__ Part(u32 vectors, u32 warps, u32 warp) {
        const u32 share = (vectors + warps - 1) / warps;
        begin = min(warp * share, vectors), end = min(begin + share, vectors);
    }
};

template <typename Row> __device__ inline u64 part_mass(const Row& row, const Part& part, const Kept& kept) {
    u64 sum = 0, weights[Row::kWidth];
    row.template visit_range<2>(part.begin + threadIdx.x % 32, part.end, 32, [&](const typename Row::Elements& vector, u32) {
        sum += weights_of(vector, kept, weights);
    });
    return warp_sum(sum);
}

// A warp finds the element at which the running sum of its part passes u; write(token, logit, weight) is called by one lane.
template <typename Row, typename Write>
__device__ inline void draw_from_part(const Row& row, const Part& part, const Kept& kept, u64 u, Write write) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = part.begin; first < part.end; first += 32) {
        const u32 v = first + lane;
        u64 weights[Row::kWidth], sum = 0;
        Vector<typename Row::Element> vector = {};
        if (v < part.end) vector = row.at(v), sum = weights_of(vector, kept, weights);
        u64 running = sum;
        for (u32 step = 1; step < 32; step *= 2) {
            const u64 before = __shfl_up_sync(~0u, running, step);
            running += lane >= step ? before : 0;
        }
        const u64 total = __shfl_sync(~0u, running, 31);
        if (u >= total) {
            u -= total;
            continue;
        }
        u64 before = running - sum;
        if (before <= u && u < running) {
#pragma unroll
            for (u32 i = 0; i < Row::kWidth; ++i) {
                if (before <= u && u < before + weights[i]) write(row.token(v, i), vector.x[i], weights[i]);
                before += weights[i];
            }
        }
        return;
    }
}

}  // namespace tilewright
