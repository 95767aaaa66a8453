// The epilogue: the split-K reduction inside a cluster, then bias, activation, one rounding, and the store.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/cluster.cuh>

#include "weight_only_product.cuh"

namespace tilewright {

template <typename Config> struct Output {
    typename Config::Out* d;
    i64 row;       // elements from row to row
    int columns;   // of the product; a gated activation halves them
    bool vectors;  // a thread may store its results at once
};

__device__ inline void load_shared(float (&value)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address)
                 : "memory");
}

// Address of this thread's part of a parcel, which is [kTiles][kMathThreads] times four floats.
template <typename Config> __device__ inline u32 parcel_address(u32 parcels, u32 rank, u32 slot, u32 t) {
    using Shape = Layout<Config>;
    return parcels + (rank * Shape::kBlockParcels + slot) * Shape::kParcel + (t * Shape::kMathThreads + threadIdx.x) * 16;
}

// Sends the parcels of the first `tile_tokens` tokens to their owners.
template <typename Config>
__device__ inline void send_parcels(
    const Accumulators<Config>& acc, u32 parcels, const Barrier& full, u32 rank, u32 tile_tokens) {
    using Shape = Layout<Config>;
#pragma unroll
    for (u32 p = 0; p < Shape::kParcels; ++p) {
        if (8 * p >= tile_tokens) break;
        const u32 owner = p / Shape::kBlockParcels, slot = p % Shape::kBlockParcels;
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
            const float* const f = acc.values[p][t];
            store_shared_remote(map_shared_rank(parcel_address<Config>(parcels, rank, slot, t), owner),
                             map_shared_rank(full.address(), owner), f[0], f[1], f[2], f[3]);
        }
    }
}

// acc_total = the sum of what block 0, 1, ... sent, added in this order, for the parcels of `tokens` tokens.
template <typename Config>
__device__ inline void reduce_parcels(Parcels<Config, Layout<Config>::kBlockParcels>& acc_total, u32 parcels, u32 tokens) {
    constexpr u32 kSplit = Config::kSplit;
#pragma unroll
    for (u32 p = 0; p < Layout<Config>::kBlockParcels; ++p) {
        if (8 * p >= tokens) break;
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
            float partial[kSplit][4];
#pragma unroll
            for (u32 s = 0; s < kSplit; ++s) load_shared(partial[s], parcel_address<Config>(parcels, s, p, t));
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float sum = partial[0][i];
#pragma unroll
                for (u32 s = 1; s < kSplit; ++s) sum += partial[s][i];
                acc_total.values[p][t][i] = sum;
            }
        }
    }
}

// D = act(sum + bias) for four columns of one row from `column` on, at least one of them in bounds.
template <typename Config>
__device__ inline void apply_epilogue(
    const float (&sum)[4], const float (&bias)[4], const Output<Config>& out, u32 row, u32 column) {
    using Out = typename Config::Out;
    constexpr Activation kActivation = Activation(Config::kActivation);
    constexpr bool kGated = kActivation == Activation::Swiglu;
    constexpr u32 kWidth = kGated ? 2 : 4;
    const u32 first = kGated ? column / 2 : column;
    const u32 count = min(kWidth, (kGated ? u32(out.columns) / 2 : u32(out.columns)) - first);
    struct alignas(kWidth * sizeof(Out)) Vector { Out values[kWidth]; } vector;
#pragma unroll
    for (u32 i = 0; i < kWidth; ++i) {
        float z;
        if constexpr (kGated) {
            z = activate<kActivation>(sum[2 * i] + bias[2 * i]) * (sum[2 * i + 1] + bias[2 * i + 1]);
        } else {
            z = activate<kActivation>(sum[i] + bias[i]);
        }
        vector.values[i] = from_float<Out>(z);
    }
    Out* const dst = out.d + row * out.row + first;
    if (out.vectors && count == kWidth) {
        *reinterpret_cast<Vector*>(dst) = vector;
    } else {
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) {
            if (i < count) dst[i] = vector.values[i];
        }
    }
}

}  // namespace tilewright
