// The part of a block's vectors that a warp takes, and a draw from it.
#pragma once
#include <tilewright/ptx.cuh>

namespace tilewright {

// Vectors [begin, end): parts lie in the order of the row.
struct Part {
    u32 begin, end;
    __device__ Part(u32 vectors, u32 warps, u32 warp) {
        const u32 share = (vectors + warps - 1) / warps;
        begin = min(warp * share, vectors), end = min(begin + share, vectors);
    }
};

// A warp finds the element at which the running sum of its part passes u.  weigh(v, weights) fills in the weights of vector v
// and returns their sum; found(v, i, weight) is called by one lane.
template <u32 kWidth, typename Weigh, typename Found>
__device__ inline void draw_from_part(const Part& part, u64 u, Weigh weigh, Found found) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = part.begin; first < part.end; first += 32) {
        const u32 v = first + lane;
        u64 weights[kWidth];
        const u64 sum = v < part.end ? weigh(v, weights) : 0;
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
            for (u32 i = 0; i < kWidth; ++i) {
                if (before <= u && u < before + weights[i]) found(v, i, weights[i]);
                before += weights[i];
            }
        }
        return;
    }
}

}  // namespace tilewright
