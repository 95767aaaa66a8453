// After the backward kernel: dQ = scale * dq_acc, rounded, from the layout of the wgmma accumulators to rows.
//
// One block has one query tile.  A thread reads the 64 consecutive bytes that four threads of a warpgroup wrote: 8 columns of
// two rows.
//
// Config: kD (a multiple of 16), kBlockM, kPacked, kByBatch, Element.
#pragma once

#include <tilewright/ptx.cuh>

#include "fmha_backward/schedule.cuh"

namespace tilewright {

constexpr u32 kPostprocessThreads = 256;

template <typename Config>
__global__ void __launch_bounds__(kPostprocessThreads) sm90_fmha_postprocess(
    const float* dq_acc, typename Config::Element* dq, int s_q, int s_k, int d, int heads, int left, int right, float scale,
    i64 dq_batch, i64 dq_head, i64 dq_row, const Interval* intervals) {
    using Element = typename Config::Element;
    using Shape = BackwardShape<Config>;
    constexpr u32 kM = Shape::kM, kColumns = Shape::kDqColumns, kEights = kColumns / 8;
    struct alignas(16) Floats { float x[4]; };
    struct alignas(16) Packed { u32 x[4]; };

    griddepcontrol_wait();
    launch_dependents();
    const BackwardProblemOf<Config> problem{{s_q, s_k, heads, 0, 1, left, right, 1, 0, intervals}};
    const int query_tiles = problem.template query_tile_count<kM>(), bh = int(blockIdx.x) / query_tiles;
    const int m = int(blockIdx.x) - bh * query_tiles;
    // If no key tile meets this query tile, dq_acc is uninitialised and dQ is 0
    const int batch = bh / heads;
    const bool written = problem.template first_key_tile<kM>(batch, m) < problem.template end_key_tile<kM>(batch, m);
    const Floats* const tile_acc =
        reinterpret_cast<const Floats*>(dq_acc + i64(blockIdx.x) * kBackwardWarpgroups * kWarpgroupM * kColumns);
    Element* const dq_rows = dq + bh / heads * dq_batch + bh % heads * dq_head;
#pragma unroll
    for (u32 item = threadIdx.x; item < kBackwardWarpgroups * kEights * 32; item += kPostprocessThreads) {
        const u32 j = item % kEights, quad = item / kEights % 32, group = item / kEights / 32;
        const int column = int(j * 8 + (Shape::kSplitColumns ? group * kColumns : 0));
        const int row = m * int(kM) + int(quad / 8 * 16 + quad % 8 + (Shape::kSplitColumns ? 0 : group * kWarpgroupM));

        // Load 8 columns of two rows, from the four threads that held them
        Floats acc[4] = {};
        if (written && row < s_q && column < d) {
#pragma unroll
            for (u32 t = 0; t < 4; ++t) acc[t] = tile_acc[(group * kEights + j) * 128 + quad * 4 + t];
        }

        // Scale, round, store
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            Packed packed;
#pragma unroll
            for (u32 t = 0; t < 4; ++t) packed.x[t] = pack<Element>(acc[t].x[2 * h] * scale, acc[t].x[2 * h + 1] * scale);
            if (row + int(8 * h) < s_q && column < d) {
                *reinterpret_cast<Packed*>(dq_rows + (row + int(8 * h)) * dq_row + column) = packed;
            }
        }
    }
}

}  // namespace tilewright
