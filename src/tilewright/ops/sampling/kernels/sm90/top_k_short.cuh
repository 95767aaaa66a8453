// The k largest of each short row, k <= 32: a warp holds a row in registers, and takes its largest element k times.
//
// Config: kWarps of a block, kEach elements of a lane, Element.
#pragma once
#include "sample_parts/resident_row.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(Config::kWarps * 32)
    top_k_short(typename Config::Element* values, i64* indices, const typename Config::Element* x, i64 stride, int rows, int n,
                int k) {
    constexpr int kTaken = -2147483647 - 1;
    const u32 lane = lane_index();
    const i64 row = i64(blockIdx.x) * Config::kWarps + threadIdx.x / 32;
    griddepcontrol_wait();
    launch_dependents();
    if (row >= rows) return;
    const auto* elements = x + row * stride;
    int keys[Config::kEach];  // element i of lane l is i * 32 + l of the row
#pragma unroll
    for (u32 i = 0; i < Config::kEach; ++i) {
        const int index = int(i * 32 + lane);
        keys[i] = index < n ? scalar_of<int>(to_float(elements[index])) : kTaken;
    }
    u32 mine = 0;  // the index that is to be written by this lane
    for (u32 place = 0; place < u32(k); ++place) {
        int best = keys[0];
#pragma unroll
        for (u32 i = 1; i < Config::kEach; ++i) best = max(best, keys[i]);
        const int best_of_all = __reduce_max_sync(~0u, best);
        u32 index = ~0u;
#pragma unroll
        for (u32 i = Config::kEach; i > 0; --i) index = keys[i - 1] == best_of_all ? (i - 1) * 32 + lane : index;
        index = __reduce_min_sync(~0u, index);
#pragma unroll
        for (u32 i = 0; i < Config::kEach; ++i) keys[i] = i * 32 + lane == index ? kTaken : keys[i];
        mine = place == lane ? index : mine;
    }
    if (lane < u32(k)) {
        values[row * k + lane] = elements[mine];
        indices[row * k + lane] = mine;
    }
}

}  // namespace tilewright
