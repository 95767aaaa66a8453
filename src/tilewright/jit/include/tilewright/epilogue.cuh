// Stores a warpgroup's accumulators: directly to global memory, or through shared memory for tma_store.
//
// Thread t of the 128 holds d[4 j + 2 h + e] = D(row + 8 h, 8 j + column + e), j < N / 8, h and e in {0, 1}, with
// row = 16 (t / 32) + (t % 32) / 4 and column = 2 (t % 4).  [PTX ISA: wgmma, register fragment of D]
#pragma once

#include <tilewright/ptx.cuh>
#include <tilewright/swizzle.cuh>

namespace tilewright {

__device__ inline u32 fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ inline u32 fragment_column() { return threadIdx.x % 4 * 2; }

// Stores 64 x N accumulators to `out` (rows x columns, row pitch in elements), first element (row, column); what lies outside
// of `out` is dropped.  A warp writes 32 bytes (float) of 8 rows at once: enough for small outputs, else use stage_tile.
template <typename Out, u32 kCount>
__device__ inline void write_tile(const float (&d)[kCount], Out* out, i64 pitch, u32 row, u32 column, u32 rows, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
        const u32 r = row + fragment_row() + i % 4 / 2 * 8;
        const u32 c = column + i / 4 * 8 + fragment_column() + i % 2;
        if (r < rows && c < columns) out[r * pitch + c] = from_float<Out>(d[i]);
    }
}

// Offset, in the layout that tma_store reads, of byte `byte` of row `row` of a warpgroup's 64 rows: strips of kSpan bytes of
// columns, swizzled by kSpan.  A box of the tensor map is [64, kSpan bytes]; strip i begins at i * 64 * kSpan.
template <u32 kSpan> __device__ inline u32 strip_offset(u32 row, u32 byte) {
    return byte / kSpan * kSpan * 64 + swizzle<kSpan>(row * kSpan + byte % kSpan);
}

// Stores 64 rows x 16 columns of accumulators (f[0..7] of each thread), rounded to a 16-bit type, to the strips at shared
// address `strips`: 32 bytes per row, from byte `byte` of the row on.
template <typename Out, u32 kSpan> __device__ inline void stage_columns(const float* f, u32 strips, u32 byte) {
    static_assert(sizeof(Out) == 2, "stmatrix stores 16-bit elements");
    static_assert(kSpan >= 32, "a strip holds whole groups of 16 columns");
    // Lane l addresses row l % 8 of matrix l / 8.  Matrices 0 and 1 are the upper and lower eight rows of the first eight
    // columns, 2 and 3 those of the next eight columns.
    const u32 lane = threadIdx.x % 32;
    const u32 lane_row = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    stmatrix_x4(strips + strip_offset<kSpan>(lane_row, byte + lane / 16 * 16), pack<Out>(f[0], f[1]),
                   pack<Out>(f[2], f[3]), pack<Out>(f[4], f[5]), pack<Out>(f[6], f[7]));
}

// Stores 64 x N accumulators, rounded to a 16-bit type, to strips.  Follow it by fence_proxy_async_shared() and a barrier of
// the writing threads.
template <typename Out, u32 kSpan, u32 kCount>
__device__ inline void stage_tile(const float (&d)[kCount], void* strips) {
    static_assert(kCount % 8 == 0 && kCount * 4 % kSpan == 0, "the columns must fill whole strips, in groups of 16");
#pragma unroll
    for (u32 j = 0; j < kCount / 8; ++j) stage_columns<Out, kSpan>(d + 8 * j, shared_address(strips), 32 * j);
}

}  // namespace tilewright
