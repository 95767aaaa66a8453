// Joins the parts of row tiles that were cut (mla_decode_parts/schedule.cuh).
//
// A block has some rows of one row tile.  Its groups of 128 threads read every second (third, ...) part, four columns a thread, and
// group 0 adds their sums in order: the same bits every time.
#pragma once

#include <tilewright/ptx.cuh>

#include "fmha_forward/softmax.cuh"
#include "mla_decode_parts/schedule.cuh"

namespace tilewright {

template <typename Element> __device__ inline void store_four(Element* out, const float4& v) {
    *reinterpret_cast<uint2*>(out) = make_uint2(pack<Element>(v.x, v.y), pack<Element>(v.z, v.w));
}

// The row tile of a block: the `index`-th of all, or, if there are more than shares, the first that the end of share
// `index` cuts.  False: nothing to join.
struct SplitTile {
    int batch, tile, first, count;  // its first unit, and how many it has
    int part, parts;                // the share of the first one
    bool split;

    __device__ SplitTile(const DecodeProblem& problem, int share, int index) {
        const bool by_tile = problem.batches * problem.tiles < problem.clusters;
        batch = tile = first = count = part = parts = 0, split = false;
        if (share == 0) return;
        if (by_tile) {
            batch = index / problem.tiles, tile = index % problem.tiles;
            int before = 0;
            for (int b = int(threadIdx.x % 32); b < batch; b += 32) before += problem.key_tiles(b);
            count = problem.key_tiles(batch);
            first = int(__reduce_add_sync(~0u, u32(before))) * problem.tiles + tile * count;
        } else {
            const int cut = (index + 1) * share;
            const UnitPlace place(problem, cut);
            if (place.batch == problem.batches) return;
            batch = place.batch, tile = place.tile, first = place.first, count = problem.key_tiles(batch);
            if (first == cut || first < cut - share) return;  // not cut here, or not here first
        }
        part = first / share, parts = (first + count - 1) / share - part + 1;
        split = parts > 1;
    }

    // The slot of the i-th part, see DecodeSchedule::next.
    __device__ int slot(int i, int share) const { return 2 * (part + i) + (i == 0 && first % share != 0 ? 1 : 0); }
};

constexpr int kMostParts = 160;  // shares: at most one for each multiprocessor

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads) sm90_mla_decode_combine(
    const float* partial_o, const float* partial_lse, typename Config::Element* o, float* lse, const int* lengths,
    const float* sinks, int batches, int tiles, int rows, int heads, int s_q, int capacity, int each, bool causal, int clusters,
    int least, int cost, int cluster_size, int rows_each) {
    using Element = typename Config::Element;
    constexpr int kGroups = Config::kThreads / 128, kDv = 512;
    __shared__ float weights[kMostParts];
    __shared__ float4 sums[kGroups][128];
    const DecodeProblem problem{lengths, batches, tiles, rows, heads, s_q, capacity, each, causal, clusters, least, cost};
    const int share = DecodePlan(problem).share;
    const SplitTile split(problem, share, int(blockIdx.x));
    griddepcontrol_wait();
    launch_dependents();
    if (!split.split) return;

    const int group = int(threadIdx.x / 128), column = int(threadIdx.x % 128) * 4;
    const int first_row = split.tile * cluster_size * 64, begin = int(blockIdx.y) * rows_each;
    const int end = min(begin + rows_each, min(cluster_size * 64, rows - first_row));
    for (int r = begin; r < end; ++r) {
        // Weights of the parts: their share of the sum of exponentials
        const i64 at = i64(r / 64) * 64 + r % 64;
        const auto row_of = [&](int i) { return i64(split.slot(i, share)) * cluster_size * 64 + at; };
        if (threadIdx.x < 32) {
            const float sink = sinks == nullptr ? -infinity() : sinks[(first_row + r) % heads] * kLog2E;
            float most = sink;
            for (int i = int(threadIdx.x); i < split.parts; i += 32) {
                const float part_lse = partial_lse[row_of(i)] * kLog2E;
                weights[i] = part_lse, most = fmaxf(most, part_lse);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            const float base = most == -infinity() ? 0 : most;
            float sum = 0;
            for (int i = int(threadIdx.x); i < split.parts; i += 32) sum += exp2_approximate(weights[i] - base);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            sum += exp2_approximate(sink - base);
            const float inverse = sum == 0 ? 0 : reciprocal(sum);
            for (int i = int(threadIdx.x); i < split.parts; i += 32) weights[i] = exp2_approximate(weights[i] - base) * inverse;
            if (threadIdx.x == 0) {
                lse[i64(split.batch) * rows + first_row + r] = sum == 0 ? -infinity() : kLn2 * (base + log2_approximate(sum));
            }
        }
        __syncthreads();

        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int i = group; i < split.parts; i += kGroups) {
            const float4 v = *reinterpret_cast<const float4*>(partial_o + row_of(i) * kDv + column);
            const float weight = weights[i];
            sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
        }
        if (group > 0) sums[group][threadIdx.x % 128] = sum;
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int g = 1; g < kGroups; ++g) {
                const float4 v = sums[g][threadIdx.x];
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            store_four(o + (i64(split.batch) * rows + first_row + r) * kDv + column, sum);
        }
        __syncthreads();
    }
}

}  // namespace tilewright
