// The sums of the blocks of a cluster come together: each sends its own, eight tokens at a time, to the block that owns
// these tokens, which adds what it received from block 0, 1, ... in this order: the same bits every time.
#pragma once

#include <tilewright/cluster.cuh>

#include "layout.cuh"

namespace tilewright {

__device__ inline void load_shared(float (&value)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address)
                 : "memory");
}

// Sends the parcels of tokens below `height` to their owners, each thread its four floats of each parcel.
template <typename Config, u32 kCount>
__device__ inline void send(const float (&sums)[kCount], u32 received, const Barrier& landed, u32 rank, u32 height) {
    using Shape = Layout<Config>;
    const u32 mine = received + rank * Shape::kShare * kParcel + threadIdx.x * 16;
#pragma unroll
    for (u32 p = 0; p < Shape::kParcels; ++p) {
        if (8 * p >= height) break;
        const u32 owner = p / Shape::kShare, slot = p % Shape::kShare;
        const float* const f = sums + 4 * p;
        store_shared_remote(map_shared_rank(mine + slot * kParcel, owner), map_shared_rank(landed.address(), owner),
                         f[0], f[1], f[2], f[3]);
    }
}

// sum = what this thread's peers in block 0, 1, ... sent in slot `slot`, added in this order.
template <typename Config> __device__ inline void add_up(float (&sum)[4], u32 received, u32 slot) {
    constexpr u32 kSplit = Config::kSplit;
    float part[kSplit][4];
#pragma unroll
    for (u32 s = 0; s < kSplit; ++s) {
        load_shared(part[s], received + (s * Layout<Config>::kShare + slot) * kParcel + threadIdx.x * 16);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sum[i] = part[0][i];
#pragma unroll
        for (u32 s = 1; s < kSplit; ++s) sum[i] += part[s][i];
    }
}

}  // namespace tilewright
