// What becomes of the sums: those of a cluster's blocks come together, then bias, activation, one rounding, and memory.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/cluster.cuh>

#include "weight_only_product.cuh"

namespace tilewright {

template <typename Config> struct Output {
    typename Config::Out* d;
    i64 row;       // elements from row to row
    int columns;   // of the product; a gate makes one of two
    bool vectors;  // may a thread store its results at once?
};

__device__ inline void load_shared(float (&value)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address)
                 : "memory");
}

// A parcel is [kTiles][kMath] times the four sums of a thread.
template <typename Config> __device__ inline u32 parcel_at(u32 received, u32 rank, u32 slot, u32 t) {
    using Shape = Layout<Config>;
    return received + (rank * Shape::kShare + slot) * Shape::kParcel + (t * Shape::kMath + threadIdx.x) * 16;
}

// Sends the parcels of tokens below `height` to their owners.
template <typename Config>
__device__ inline void send(const Sums<Config>& sums, u32 received, const Barrier& landed, u32 rank, u32 height) {
    using Shape = Layout<Config>;
#pragma unroll
    for (u32 p = 0; p < Shape::kParcels; ++p) {
        if (8 * p >= height) break;
        const u32 owner = p / Shape::kShare, slot = p % Shape::kShare;
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
            const float* const f = sums.of[p][t];
            store_shared_remote(map_shared_rank(parcel_at<Config>(received, rank, slot, t), owner),
                             map_shared_rank(landed.address(), owner), f[0], f[1], f[2], f[3]);
        }
    }
}

// own = what this thread's peers in block 0, 1, ... sent, added in this order, for the parcels of `tokens` tokens.
template <typename Config>
__device__ inline void add_up(Parcels<Config, Layout<Config>::kShare>& own, u32 received, u32 tokens) {
    constexpr u32 kSplit = Config::kSplit;
#pragma unroll
    for (u32 p = 0; p < Layout<Config>::kShare; ++p) {
        if (8 * p >= tokens) break;
#pragma unroll
        for (u32 t = 0; t < Config::kTiles; ++t) {
            float part[kSplit][4];
#pragma unroll
            for (u32 s = 0; s < kSplit; ++s) load_shared(part[s], parcel_at<Config>(received, s, p, t));
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float sum = part[0][i];
#pragma unroll
                for (u32 s = 1; s < kSplit; ++s) sum += part[s][i];
                own.of[p][t][i] = sum;
            }
        }
    }
}

// act(sum + bias) for four columns of one row from `column` on, of which at least one exists.
template <typename Config>
__device__ inline void finish(
    const float (&sum)[4], const float (&bias)[4], const Output<Config>& out, u32 row, u32 column) {
    using Out = typename Config::Out;
    constexpr Activation kActivation = Activation(Config::kActivation);
    constexpr bool kGated = kActivation == Activation::Swiglu;
    constexpr u32 kWidth = kGated ? 2 : 4;
    const u32 first = kGated ? column / 2 : column;
    const u32 count = min(kWidth, (kGated ? u32(out.columns) / 2 : u32(out.columns)) - first);
    struct alignas(kWidth * sizeof(Out)) Vector { Out values[kWidth]; } made;
#pragma unroll
    for (u32 i = 0; i < kWidth; ++i) {
        float z;
        if constexpr (kGated) {
            z = activate<kActivation>(sum[2 * i] + bias[2 * i]) * (sum[2 * i + 1] + bias[2 * i + 1]);
        } else {
            z = activate<kActivation>(sum[i] + bias[i]);
        }
        made.values[i] = from_float<Out>(z);
    }
    Out* const to = out.d + row * out.row + first;
    if (out.vectors && count == kWidth) {
        *reinterpret_cast<Vector*>(to) = made;
    } else {
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) {
            if (i < count) to[i] = made.values[i];
        }
    }
}

}  // namespace tilewright
