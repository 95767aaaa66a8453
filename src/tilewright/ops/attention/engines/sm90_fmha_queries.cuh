// After the backward kernel: dQ = scale * its sums, from the layout of the registers that made them to rows.
//
// A block has a tile of queries.  A thread reads the 64 bytes that four threads of a warpgroup wrote side by side, which are
// 8 columns of two rows.
//
// Config: kD (a multiple of 16), kBlockM, kSpans, Element.
#pragma once

#include <tilewright/ptx.cuh>

#include "sm90_fmha_backward/schedule.cuh"

namespace tilewright {

constexpr u32 kQueriesThreads = 256;

template <typename Config>
__global__ void __launch_bounds__(kQueriesThreads) sm90_fmha_queries(
    const float* sums, typename Config::Element* dq, int s_q, int s_k, int d, int heads, int left, int right, float scale,
    i64 to_batch, i64 to_head, i64 to_row, const Interval* spans) {
    using Element = typename Config::Element;
    using Shape = BackwardShape<Config>;
    constexpr u32 kM = Shape::kM, kColumns = Shape::kPartColumns, kEights = kColumns / 8;
    struct alignas(16) Four { float of[4]; };
    struct alignas(16) Chunk { u32 of[4]; };

    griddepcontrol_wait();
    launch_dependents();
    const BackwardProblem<Config::kSpans> problem{{s_q, s_k, heads, 0, 1, left, right, 1, 0, spans}};
    const int tiles = problem.template tiles<kM>(), line = int(blockIdx.x) / tiles, m = int(blockIdx.x) - line * tiles;
    const bool seeing = problem.template first_keys<kM>(m) < problem.template end_keys<kM>(m);  // else nobody wrote the sums
    const Four* const from = reinterpret_cast<const Four*>(sums + i64(blockIdx.x) * kBackwardGroups * kRowsOfGroup * kColumns);
    Element* const to = dq + line / heads * to_batch + line % heads * to_head;
#pragma unroll
    for (u32 item = threadIdx.x; item < kBackwardGroups * kEights * 32; item += kQueriesThreads) {
        const u32 j = item % kEights, quad = item / kEights % 32, group = item / kEights / 32;
        const int column = int(j * 8 + (Shape::kByColumns ? group * kColumns : 0));
        const int row = m * int(kM) + int(quad / 8 * 16 + quad % 8 + (Shape::kByColumns ? 0 : group * kRowsOfGroup));
        Four x[4] = {};
        if (seeing && row < s_q && column < d) {
#pragma unroll
            for (u32 t = 0; t < 4; ++t) x[t] = from[(group * kEights + j) * 128 + quad * 4 + t];
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            Chunk chunk;
#pragma unroll
            for (u32 t = 0; t < 4; ++t) chunk.of[t] = pack<Element>(x[t].of[2 * h] * scale, x[t].of[2 * h + 1] * scale);
            if (row + int(8 * h) < s_q && column < d) {
                *reinterpret_cast<Chunk*>(to + (row + int(8 * h)) * to_row + column) = chunk;
            }
        }
    }
}

}  // namespace tilewright
