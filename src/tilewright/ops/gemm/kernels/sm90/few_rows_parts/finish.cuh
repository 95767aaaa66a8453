// The epilogue: act(factor * sum + bias) + c, rounded once and stored.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/types.cuh>

namespace tilewright {

// D and what the epilogue adds; c may be d.  bias and c may be null.  Strides in elements.
template <typename Config> struct Output {
    typename Config::Out* d;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    i64 d_batch, d_row, c_batch, c_row;
    int columns;     // of op(B)
    bool vectors;    // kWidth results may be stored at once
};

// Rounds kWidth neighbouring results, and stores the first `count`.
template <typename Out, u32 kWidth>
__device__ inline void store(Out* dst, const float (&z)[kWidth], u32 count, bool vectors) {
    if (vectors && count == kWidth) {
        struct alignas(kWidth * sizeof(Out)) Vector { Out values[kWidth]; } vector;
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) vector.values[i] = from_float<Out>(z[i]);
        *reinterpret_cast<Vector*>(dst) = vector;
    } else {
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) {
            if (i < count) dst[i] = from_float<Out>(z[i]);
        }
    }
}

// Finishes four columns of one row from `column` on, at least one of them in bounds.
template <typename Config>
__device__ inline void apply_epilogue(
    const float (&sum)[4], const float (&bias)[4], float factor, const Output<Config>& out, u32 batch, u32 row,
    u32 column) {
    constexpr Activation kActivation = Activation(Config::kActivation);
    constexpr bool kGated = kActivation == Activation::Swiglu;
    constexpr u32 kWidth = kGated ? 2 : 4;
    const u32 first = kGated ? column / 2 : column;
    const u32 count = min(kWidth, (kGated ? u32(out.columns) / 2 : u32(out.columns)) - first);
    float z[kWidth];
#pragma unroll
    for (u32 i = 0; i < kWidth; ++i) {
        if constexpr (kGated) {
            z[i] = activate<kActivation>(factor * sum[2 * i] + bias[2 * i]) * (factor * sum[2 * i + 1] + bias[2 * i + 1]);
        } else {
            z[i] = activate<kActivation>(factor * sum[i] + bias[i]);
        }
    }
    if (out.c != nullptr) {
        const auto* c = out.c + batch * out.c_batch + row * out.c_row + first;
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) z[i] += i < count ? to_float(c[i]) : 0;
    }
    store(out.d + batch * out.d_batch + row * out.d_row + first, z, count, out.vectors);
}

}  // namespace tilewright
