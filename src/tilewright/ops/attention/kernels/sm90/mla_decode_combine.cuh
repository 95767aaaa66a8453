// Joins the parts of row tiles that were cut (mla_decode_parts/schedule.cuh).
//
// A block has some rows of one row tile, and each row some warps, which read every second (third, ...) part.  The first of them
// adds their sums in order: the same bits every time.
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
        const bool by_tile = problem.batches * problem.tiles < problem.blocks;
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
    const float* sinks, int batches, int tiles, int rows, int heads, int s_q, int capacity, int each, bool causal,
    int blocks, int least, int cost, int warps_each) {
    using Element = typename Config::Element;
    constexpr int kWarps = Config::kThreads / 32, kDv = 512, kVectors = kDv / 128;
    __shared__ float weights[kWarps][kMostParts];
    __shared__ float4 sums[kWarps][kVectors][32];
    const DecodeProblem problem{lengths, batches, tiles, rows, heads, s_q, capacity, each, causal, blocks, least, cost};
    const int share = DecodePlan(problem).share;
    const SplitTile split(problem, share, int(blockIdx.x));
    griddepcontrol_wait();
    launch_dependents();
    if (!split.split) return;

    // A row for each `warps_each` warps, which share its parts
    const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), turn = warp % warps_each;
    const int r = (int(blockIdx.y) * kWarps + warp) / warps_each, row = split.tile * 64 + r;
    const bool exists = r < 64 && row < rows;
    const auto row_of = [&](int i) { return i64(split.slot(i, share)) * 64 + r; };
    float4 sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = make_float4(0, 0, 0, 0);
    if (exists) {
        // Weights of the parts: their share of the sum of exponentials
        const float sink = sinks == nullptr ? -infinity() : sinks[row % heads] * kLog2E;
        float most = sink;
        for (int i = lane; i < split.parts; i += 32) {
            const float part_lse = partial_lse[row_of(i)] * kLog2E;
            weights[warp][i] = part_lse, most = fmaxf(most, part_lse);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float base = most == -infinity() ? 0 : most;
        float total = 0;
        for (int i = lane; i < split.parts; i += 32) total += weights[warp][i] = exp2_approximate(weights[warp][i] - base);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        total += exp2_approximate(sink - base);
        const float inverse = total == 0 ? 0 : reciprocal(total);
        if (lane == 0 && turn == 0) {
            lse[i64(split.batch) * rows + row] = total == 0 ? -infinity() : kLn2 * (base + log2_approximate(total));
        }
        __syncwarp();
#pragma unroll 4
        for (int i = turn; i < split.parts; i += warps_each) {
            const float4* const part = reinterpret_cast<const float4*>(partial_o + row_of(i) * kDv) + lane;
            const float weight = weights[warp][i] * inverse;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const float4 x = part[32 * v];
                sum[v].x += weight * x.x, sum[v].y += weight * x.y, sum[v].z += weight * x.z, sum[v].w += weight * x.w;
            }
        }
    }
    if (warps_each > 1) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sums[warp][v][lane] = sum[v];
        __syncthreads();
        if (turn == 0) {
            for (int w = 1; w < warps_each; ++w) {
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    const float4 x = sums[warp + w][v][lane];
                    sum[v].x += x.x, sum[v].y += x.y, sum[v].z += x.z, sum[v].w += x.w;
                }
            }
        }
    }
    if (exists && turn == 0) {
        Element* const out = o + (i64(split.batch) * rows + row) * kDv + 4 * lane;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) store_four(out + 128 * v, sum[v]);
    }
}

}  // namespace tilewright
