// Before the backward kernel: lse and delta of each query, and the initial state of everything that kernel counts with.
//
//     delta = rowsum(dO * O) - dlse
//
// stats[query tile][0]: lse in units of log2; +infinity for a query that sees no key or does not exist, so that its P is 0.
// stats[query tile][1]: delta.
// One block has one tile of kBlockM queries, 16 threads a row, and clears the tile's flag.  Packed: it also finds the key
// tiles that meet its query tile.
//
// Config: kBlockM, kPacked, kByBatch, Element.
#pragma once

#include <tilewright/ptx.cuh>

#include "fmha_forward/softmax.cuh"
#include "fmha_backward/schedule.cuh"

namespace tilewright {

constexpr u32 kPreprocessThreads = 256, kIntervalsThreads = 128;

template <typename Config>
__global__ void __launch_bounds__(kPreprocessThreads) sm90_fmha_preprocess(
    const typename Config::Element* d_o, const typename Config::Element* o, const float* lse, const float* dlse, float* stats,
    int* flags, int s_q, int d_v, int heads, i64 do_batch, i64 do_head, i64 do_row, i64 o_batch, i64 o_head, i64 o_row,
    Interval* intervals, int s_k) {
    using Element = typename Config::Element;
    constexpr u32 kM = Config::kBlockM, kLanes = 16, kVector = 8;
    struct alignas(16) Vector { Element x[kVector]; };

    griddepcontrol_wait();
    launch_dependents();
    const int query_tiles = (s_q + int(kM) - 1) / int(kM), bh = int(blockIdx.x) / query_tiles;
    const int first = (int(blockIdx.x) - bh * query_tiles) * int(kM), lane = int(threadIdx.x % kLanes);
    const Element* const do_rows = d_o + bh / heads * do_batch + bh % heads * do_head;
    const Element* const o_rows = o + bh / heads * o_batch + bh % heads * o_head;

    // delta and lse of each row
    for (u32 r = threadIdx.x / kLanes; r < kM; r += kPreprocessThreads / kLanes) {
        const int row = first + int(r);
        const bool in_range = row < s_q;
        float delta = 0;
        if (in_range) {
            for (int c = lane * int(kVector); c < d_v; c += int(kLanes * kVector)) {
                const Vector a = *reinterpret_cast<const Vector*>(do_rows + row * do_row + c);
                const Vector b = *reinterpret_cast<const Vector*>(o_rows + row * o_row + c);
#pragma unroll
                for (u32 i = 0; i < kVector; ++i) delta += to_float(a.x[i]) * to_float(b.x[i]);
            }
        }
#pragma unroll
        for (u32 lane_mask = kLanes / 2; lane_mask > 0; lane_mask /= 2) delta += __shfl_xor_sync(~0u, delta, lane_mask);
        if (lane != 0) continue;
        const i64 query = i64(bh) * s_q + row;
        const float row_lse = in_range ? lse[query] : -infinity();
        if (in_range && dlse != nullptr) delta -= dlse[query];
        float* const tile_stats = stats + i64(blockIdx.x) * (2 * kM) + r;
        tile_stats[0] = row_lse == -infinity() ? infinity() : row_lse * kLog2E;
        tile_stats[kM] = delta;
    }

    // Clear the flags and the counter of work items; find the key tiles of this query tile
    if (threadIdx.x == 0) flags[blockIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) flags[gridDim.x] = 0;
    if constexpr (Config::kPacked) {
        const BackwardProblemOf<Config> problem{{s_q, s_k, heads, 0, 1, -1, -1, 1, false, intervals}};
        const int batch = bh / heads, tile = int(blockIdx.x) - bh * query_tiles;
        if (bh == (Config::kByBatch ? batch * heads : 0) && threadIdx.x == 0) {
            Interval* const key_tiles = intervals + (Config::kByBatch ? batch * (s_k + query_tiles) : 0) + s_k;
            key_tiles[tile] = problem.template key_tiles<kM>(batch, tile);
        }
    }
}

// Before that, packed sequences only: the interval of queries that sees each key.
//
// Each query sees an interval of keys, and neither of its ends decreases from query to query.  So the queries that see key j
// go from the first one whose interval ends after j to the first one whose interval begins after j; binary search finds both.
// Whatever `mask_data` holds, the result does not decrease from key to key, and the order of dQ relies on that alone.
//
// A row of blocks for each batch that has its own sequences; intervals of one are `batch_stride` apart.
// mask_data: numbers of the program `seq:0` or `seq.b:0` (mask/program.py).
template <typename Config>
__global__ void __launch_bounds__(kIntervalsThreads) sm90_fmha_intervals(
    const int* mask_data, Interval* intervals, int s_q, int s_k, int batch_stride) {
    griddepcontrol_wait();
    launch_dependents();
    const int* const first = mask_data + mask_data[2] + int(blockIdx.y) * 3 * s_q;
    const int* const end = first + s_q;
    const int key = int(blockIdx.x * kIntervalsThreads + threadIdx.x);
    if (key >= s_k) return;
    const auto first_after = [&](const int* bounds) {
        return partition_point(s_q, [&](int query) { return bounds[query] <= key; });
    };
    intervals[int(blockIdx.y) * batch_stride + key] = {first_after(end), first_after(first)};
}

}  // namespace tilewright
