// Split-K reduction inside a cluster: each block sends its accumulators, eight tokens at a time (a parcel), to the block
// that owns these tokens, which adds what it received from block 0, 1, ... in this order: the same bits every time.
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

// Sends the parcels of the first `tile_tokens` tokens to their owners; each thread sends its four floats of each parcel.
template <typename Config, u32 kCount>
__device__ inline void send_parcels(
    const float (&acc)[kCount], u32 parcels, const Barrier& full, u32 rank, u32 tile_tokens) {
    using Shape = Layout<Config>;
    const u32 slot_0 = parcels + rank * Shape::kBlockParcels * kParcel + threadIdx.x * 16;
#pragma unroll
    for (u32 p = 0; p < Shape::kParcels; ++p) {
        if (8 * p >= tile_tokens) break;
        const u32 owner = p / Shape::kBlockParcels, slot = p % Shape::kBlockParcels;
        const float* const f = acc + 4 * p;
        store_shared_remote(map_shared_rank(slot_0 + slot * kParcel, owner), map_shared_rank(full.address(), owner),
                         f[0], f[1], f[2], f[3]);
    }
}

// sum = slot `slot` of the parcels from block 0, 1, ..., added in this order.
template <typename Config> __device__ inline void reduce_parcels(float (&sum)[4], u32 parcels, u32 slot) {
    constexpr u32 kSplit = Config::kSplit;
    float part[kSplit][4];
#pragma unroll
    for (u32 s = 0; s < kSplit; ++s) {
        load_shared(part[s], parcels + (s * Layout<Config>::kBlockParcels + slot) * kParcel + threadIdx.x * 16);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sum[i] = part[0][i];
#pragma unroll
        for (u32 s = 1; s < kSplit; ++s) sum[i] += part[s][i];
    }
}

}  // namespace tilewright
