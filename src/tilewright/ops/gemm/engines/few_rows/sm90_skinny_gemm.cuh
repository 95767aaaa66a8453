// D (M x N) = epilogue(A (M x K) * B (K x N)) for very few rows of A ("tokens"), weights contiguous along K.
//
// A tile is 16 weight rows, the height of a warp's matrix instruction, by kTokens tokens: fine enough to spread few weights
// evenly over a GPU (2112 rows are 132 tiles), where tiles of 64 rows need splits of K that do not.  The kWarps warps of a
// block, and the kSplit blocks of a cluster, take consecutive ranges of K of a tile.  Their sums are added in this order:
// one launch, no workspace, the same bits every time.
//
// A chunk is 32 of K.  With g = lane / 4 and c = lane % 4 a thread takes 16 bytes, elements 8 c .. 8 c + 7, of weight rows g
// and g + 8 and of token g: for two instructions, to which it does not matter which K stands where, as long as both
// operands agree (mma_sync.cuh).  So no thread needs what another has read: each copies its own pieces into a ring of
// kStages chunks of its own, and waits for nobody.  The ring is there to have many chunks on their way.
//
// Tokens come from the L2 for every tile: kTokens / 16 bytes for each byte of weights.
//
// Config: kTokens (8 or 16), kWarps, kStages, kSplit, kCtas (blocks a multiprocessor), kActivation (index of ACTIVATIONS in
// operands.py), Element, Out, Bias, Addend.
#pragma once

#include <tilewright/cluster.cuh>
#include <tilewright/copies.cuh>
#include <tilewright/mma_sync.cuh>

#include "finish.cuh"

namespace tilewright {

constexpr u32 kTileRows = 16, kChunkK = 32, kPieceK = 8;  // K of a chunk, and of a thread's piece of it
constexpr u32 kPieces = 32 * kPieceBytes;                 // a piece of each lane

template <typename Config>
__global__ void __launch_bounds__(Config::kWarps * 32, Config::kCtas) skinny_gemm(
    const typename Config::Element* weights, const typename Config::Element* tokens, typename Config::Out* d,
    const typename Config::Bias* bias, const typename Config::Addend* c, const float* scale, i64 weight_batch,
    i64 weight_row, i64 token_batch, i64 token_row, i64 d_batch, i64 d_row, i64 c_batch, i64 c_row, float alpha, int rows,
    int columns, int depth, bool vectors) {
    using Element = typename Config::Element;
    constexpr u32 kGroups = Config::kTokens / 8, kStages = Config::kStages, kWarps = Config::kWarps;
    constexpr u32 kSplit = Config::kSplit, kThreads = kWarps * 32, kStage = (2 + kGroups) * kPieces;
    constexpr u32 kSums = kTileRows * Config::kTokens;  // of a tile
    constexpr u32 kPitch = kTileRows + 4;               // floats of a token's row: writes of a warp meet all banks
    extern __shared__ __align__(16) u8 rings[];         // [kWarps][kStages][2 + kGroups][32 lanes] pieces
    __shared__ float parts[kWarps * kSums];             // [kWarps][kGroups][32 lanes][4]
    __shared__ float result[kSplit * Config::kTokens * kPitch];  // [kSplit][kTokens][kPitch]; of block 0 alone where > 1

    const u32 rank = kSplit > 1 ? cluster_rank() : 0;
    const u32 token_tiles = (rows + Config::kTokens - 1) / Config::kTokens;
    const u32 column_tiles = (columns + kTileRows - 1) / kTileRows;
    const u32 tile = blockIdx.x / kSplit, batch = tile / (token_tiles * column_tiles);
    const u32 row = tile % token_tiles * Config::kTokens, column = tile / token_tiles % column_tiles * kTileRows;
    const u32 lane = lane_index(), g = lane / 4, piece = lane % 4 * kPieceK;

    // Rows that do not exist are the last one: their sums are never stored
    const Element* weight[2];
    const Element* token[kGroups];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        weight[i] = weights + batch * weight_batch + min(column + g + 8 * i, u32(columns) - 1) * weight_row + piece;
    }
#pragma unroll
    for (u32 t = 0; t < kGroups; ++t) {
        token[t] = tokens + batch * token_batch + min(row + g + 8 * t, u32(rows) - 1) * token_row + piece;
    }
    const u32 chunks = (depth + kChunkK - 1) / kChunkK, part = rank * kWarps + warp_index();
    const u32 begin = chunks * part / (kSplit * kWarps), end = chunks * (part + 1) / (kSplit * kWarps);
    const int last = min(int(end * kChunkK), depth - int(piece));  // this thread's pieces begin before it

    if constexpr (kSplit > 1) arrive_at_cluster();
    let_next_kernel_start();
    // The first weights come to the L2 while the kernel before this one ends
#pragma unroll
    for (u32 i = 0; i < kStages / 2; ++i) {
        const int k = (begin + i) * kChunkK;
        if (k < last) {
            fetch_line(weight[0] + k);
            fetch_line(weight[1] + k);
        }
    }
    wait_for_previous_kernel();

    const u32 ring = shared_address(rings) + warp_index() * kStages * kStage + lane * kPieceBytes;
    const auto ask = [&](u32 stage, int k) {
        const bool there = k < last;
        const u32 to = ring + stage * kStage;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) copy_piece(to + r * kPieces, weight[r] + k, there, Keep::NotAtAll);
#pragma unroll
        for (u32 t = 0; t < kGroups; ++t) copy_piece(to + (2 + t) * kPieces, token[t] + k, there, Keep::Longest);
        commit_copies();
    };
#pragma unroll
    for (u32 i = 0; i + 1 < kStages; ++i) ask(i, (begin + i) * kChunkK);
    float sums[kGroups][4] = {};
    // In rounds of the ring; chunks beyond the last are zeros
    for (u32 chunk = begin; chunk < end; chunk += kStages) {
#pragma unroll
        for (u32 i = 0; i < kStages; ++i) {
            wait_for_copies<kStages - 2>();
            u32 w0[4], w1[4];
            const u32 at = ring + i * kStage;
            load_piece(w0, at);
            load_piece(w1, at + kPieces);
#pragma unroll
            for (u32 t = 0; t < kGroups; ++t) {
                u32 x[4];
                load_piece(x, at + (2 + t) * kPieces);
                mma_16x8x16<Element>(sums[t], w0[0], w1[0], w0[1], w1[1], x[0], x[1]);
                mma_16x8x16<Element>(sums[t], w0[2], w1[2], w0[3], w1[3], x[2], x[3]);
            }
            ask((i + kStages - 1) % kStages, (chunk + i + kStages - 1) * kChunkK);  // read in the step before
        }
    }

    // All warps' sums, then those of each element in the order of K
#pragma unroll
    for (u32 t = 0; t < kGroups; ++t) {
        float* const to = parts + ((warp_index() * kGroups + t) * 32 + lane) * 4;
        *reinterpret_cast<float4*>(to) = float4{sums[t][0], sums[t][1], sums[t][2], sums[t][3]};
    }
    __syncthreads();
    if constexpr (kSplit > 1) wait_for_cluster();  // block 0 has started
    for (u32 i = threadIdx.x; i < kSums; i += kThreads) {
        float sum = parts[i];
#pragma unroll
        for (u32 w = 1; w < kWarps; ++w) sum += parts[w * kSums + i];
        // i = (t * 32 + lane) * 4 + 2 h + e: weight row lane / 4 + 8 h, token 8 t + lane % 4 * 2 + e
        const u32 of_lane = i / 4 % 32, at_token = i / 128 * 8 + of_lane % 4 * 2 + i % 2;
        const u32 at = (rank * Config::kTokens + at_token) * kPitch + of_lane / 4 + i / 2 % 2 * 8;
        if constexpr (kSplit == 1) {
            result[at] = sum;
        } else {
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_cluster(shared_address(result + at), 0)), "f"(sum)
                         : "memory");
        }
    }
    if constexpr (kSplit == 1) {
        __syncthreads();
    } else {
        sync_cluster();
        if (rank != 0) return;
    }

    // Four columns of a token a thread
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors};
    const float factor = scale == nullptr ? alpha : alpha * *scale;
    for (u32 i = threadIdx.x; i < kSums / 4; i += kThreads) {
        const u32 at_token = i / 4, at_column = i % 4 * 4, first = column + at_column;
        if (row + at_token >= u32(rows) || first >= u32(columns)) continue;
        float sum[4], shift[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            sum[j] = result[at_token * kPitch + at_column + j];
#pragma unroll
            for (u32 r = 1; r < kSplit; ++r) sum[j] += result[(r * Config::kTokens + at_token) * kPitch + at_column + j];
            shift[j] = bias != nullptr && first + j < u32(columns) ? to_float(bias[first + j]) : 0;
        }
        finish(sum, shift, factor, out, batch, row + at_token, first);
    }
}

}  // namespace tilewright
