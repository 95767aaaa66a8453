// Writes O from the accumulators to global memory.
#pragma once

#include <tilewright/epilogue.cuh>

namespace tilewright {

// O (B, H, S_q, D_v), rows contiguous and at multiples of 16 bytes.
template <typename Out> struct Fp8Result {
    Out* data;
    i64 batch_stride, head_stride, row_stride;
    int columns, rows;

    // Stores 64 x (2 * kCount) accumulators of a warpgroup, the first of query `row`.  Pairs of threads exchange halves, so that
    // each stores four adjacent columns, and a warp 32 bytes of each row at once.
    template <u32 kCount> __device__ void store(const float (&acc)[kCount], int batch, int head, int row) const {
        const u32 lane = threadIdx.x % 4;
        Out* const first = data + batch * batch_stride + head * head_stride;
#pragma unroll
        for (u32 j = 0; j < kCount / 8; ++j) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const int query = row + int(fragment_row() + 8 * h);
                const float* const f = acc + 8 * j + 2 * h;
                Out* const to = first + query * row_stride;
                if constexpr (sizeof(Out) == 4) {
#pragma unroll
                    for (u32 i = 0; i < 2; ++i) {
                        const int column = int(16 * j + 8 * i + fragment_column());
                        if (query < rows && column < columns) {
                            *reinterpret_cast<float2*>(to + column) = make_float2(f[4 * i], f[4 * i + 1]);
                        }
                    }
                } else {
                    const u32 low = pack<Out>(f[0], f[1]), high = pack<Out>(f[4], f[5]);
                    const u32 other = __shfl_xor_sync(~0u, lane % 2 ? low : high, 1);
                    const int column = int(16 * j + lane % 2 * 8 + lane / 2 * 4);
                    if (query < rows && column < columns) {
                        *reinterpret_cast<uint2*>(to + column) = lane % 2 ? make_uint2(other, high) : make_uint2(low, other);
                    }
                }
            }
        }
    }
};

}  // namespace tilewright
