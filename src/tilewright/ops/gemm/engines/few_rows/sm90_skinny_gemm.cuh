// D (M x N) = epilogue(A (M x K) * B (K x N)) for very few rows of A ("tokens"), weights contiguous along K; 16-bit operands,
// or e4m3 with scales.
//
// A tile is 16 weight rows, the height of a warp's matrix instruction, by kTokens tokens: fine enough to spread few weights
// evenly over a GPU (2112 rows are 132 tiles), where tiles of 64 rows need splits of K that do not.  The kWarps warps of a
// block, and the kSplit blocks of a cluster, take consecutive ranges of K of a tile.  Their sums are added in this order:
// one launch, no workspace, the same bits every time.
//
// With g = lane / 4 and c = lane % 4 a thread takes 16 bytes, piece c of a chunk, of weight rows g and g + 8 and of token g:
// for two instructions, to which it does not matter which K stands where, as long as both operands agree (mma_sync.cuh).  So
// no thread needs what another has read: each copies its own pieces into a ring of kStages stages of its own, and waits for
// nobody.  The ring is there to have many chunks on their way.  A stage is a chunk of 16-bit operands, 32 of K, and two of
// e4m3: the 128 of K that share their scales, which come along, four bytes for each lane that needs them.
//
// Hopper's matrix instruction of a warp takes e4m3 as 16-bit numbers, so that sums are float32 all along; only scales of 128
// of K need a sum of their own.  Tokens come from the L2 for every tile: kTokens / 16 bytes for each byte of weights.
//
// Config: kTokens (8 or 16), kWarps, kStages, kSplit, kCtas (blocks a multiprocessor), kActivation (index of ACTIVATIONS in
// operands.py), Element, Out, Bias, Addend; kScaling where scales can be.
#pragma once

#include <tilewright/cluster.cuh>
#include <tilewright/copies.cuh>
#include <tilewright/mma_sync.cuh>

#include "finish.cuh"
#include "layout.cuh"

namespace tilewright {

constexpr u32 kTileRows = 16;
constexpr u32 kPieces = 32 * kPieceBytes, kWords = 32 * sizeof(float);  // a piece, a scale, of each lane

template <typename Config> struct Skinny {
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    static constexpr u32 kGroups = Config::kTokens / 8;  // of tokens, in an instruction each
    static constexpr u32 kPieceK = kPieceBytes / sizeof(typename Config::Element), kChunkK = 4 * kPieceK;
    static constexpr u32 kChunks = sizeof(typename Config::Element) == 1 ? 2 : 1, kStageK = kChunks * kChunkK;
    static constexpr bool kAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;
    // Of the two tokens of a thread's sums in each group, then of its weight rows: both have the scale of their block
    static constexpr u32 kTokenScales = kAlongK ? 2 * kGroups : 0;
    static constexpr u32 kRowScales = kAlongK ? (kScaling == Scaling::TokenByToken ? 2 : 1) : 0;
    static constexpr u32 kChunk = (2 + kGroups) * kPieces;  // bytes: weight rows g and g + 8, then the tokens
    static constexpr u32 kScales = kChunks * kChunk, kStage = kScales + (kTokenScales + kRowScales) * kWords;
};

// Operands and their strides in elements.  Scales: of a by token and block of K; of b by row (or 128 of them) and block of K.
template <typename Config> struct Factored {
    const typename Config::Element* weights;
    const typename Config::Element* tokens;
    i64 weight_batch, weight_row, token_batch, token_row;
    const float* scale_a;
    const float* scale_b;
    i64 scale_a_batch, scale_a_k, scale_b_batch, scale_b_row, scale_b_k;
    int rows, depth;
};

template <typename Config>
__device__ inline void skinny(const Factored<Config>& in, const Output<Config>& out, float alpha) {
    using Shape = Skinny<Config>;
    using Element = typename Config::Element;
    constexpr u32 kGroups = Shape::kGroups, kStages = Config::kStages, kWarps = Config::kWarps, kSplit = Config::kSplit;
    constexpr u32 kThreads = kWarps * 32, kStageK = Shape::kStageK, kChunkK = Shape::kChunkK;
    constexpr u32 kSums = kTileRows * Config::kTokens;  // of a tile
    constexpr u32 kPitch = kTileRows + 4;               // floats of a token's row: writes of a warp meet all banks
    extern __shared__ __align__(16) u8 rings[];         // [kWarps][kStages] stages
    __shared__ float parts[kWarps * kSums];             // [kWarps][kGroups][32 lanes][4]
    __shared__ float result[kSplit * Config::kTokens * kPitch];  // [kSplit][kTokens][kPitch]; of block 0 alone where > 1

    const u32 rank = kSplit > 1 ? cluster_rank() : 0;
    const u32 token_tiles = (in.rows + Config::kTokens - 1) / Config::kTokens;
    const u32 column_tiles = (out.columns + kTileRows - 1) / kTileRows;
    const u32 tile = blockIdx.x / kSplit, batch = tile / (token_tiles * column_tiles);
    const u32 row = tile % token_tiles * Config::kTokens, column = tile / token_tiles % column_tiles * kTileRows;
    const u32 lane = lane_index(), g = lane / 4, pair = lane % 4 * 2, piece = lane % 4 * Shape::kPieceK;

    // Rows that do not exist are the last one: their sums are never stored
    const auto token_at = [&](u32 i) { return min(row + i, u32(in.rows) - 1); };
    const auto weight_at = [&](u32 i) { return min(column + i, u32(out.columns) - 1); };
    const Element* weight[2];
    const Element* token[kGroups];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        weight[i] = in.weights + batch * in.weight_batch + weight_at(g + 8 * i) * in.weight_row + piece;
    }
#pragma unroll
    for (u32 t = 0; t < kGroups; ++t) {
        token[t] = in.tokens + batch * in.token_batch + token_at(g + 8 * t) * in.token_row + piece;
    }
    const u32 steps = (in.depth + kStageK - 1) / kStageK, part = rank * kWarps + warp_index();
    const u32 begin = steps * part / (kSplit * kWarps), end = steps * (part + 1) / (kSplit * kWarps);
    const int last = min(int(end * kStageK), in.depth - int(piece));  // this thread's pieces begin before it

    if constexpr (kSplit > 1) arrive_at_cluster();
    let_next_kernel_start();
    // The first weights come to the L2 while the kernel before this one ends
#pragma unroll
    for (u32 i = 0; i < (kStages + 1) / 2 * Shape::kChunks; ++i) {
        const int k = begin * kStageK + i * kChunkK;
        if (k < last) {
            fetch_line(weight[0] + k);
            fetch_line(weight[1] + k);
        }
    }
    wait_for_previous_kernel();

    u8* const ring = rings + warp_index() * kStages * Shape::kStage;
    const u32 pieces = shared_address(ring) + lane * kPieceBytes;
    float* const words = reinterpret_cast<float*>(ring + Shape::kScales) + lane;
    const auto ask = [&](u32 stage, int step) {
#pragma unroll
        for (u32 i = 0; i < Shape::kChunks; ++i) {
            const int k = step * kStageK + i * kChunkK;
            const bool there = k < last;
            const u32 to = pieces + stage * Shape::kStage + i * Shape::kChunk;
#pragma unroll
            for (u32 r = 0; r < 2; ++r) copy_piece(to + r * kPieces, weight[r] + k, there, Keep::NotAtAll);
#pragma unroll
            for (u32 t = 0; t < kGroups; ++t) copy_piece(to + (2 + t) * kPieces, token[t] + k, there, Keep::Longest);
        }
        if constexpr (Shape::kAlongK) {
            const bool there = step < int(end);
            float* to = words + stage * (Shape::kStage / sizeof(float));
#pragma unroll
            for (u32 i = 0; i < Shape::kTokenScales; ++i, to += 32) {
                const i64 at = token_at(pair + i / 2 * 8 + i % 2) + step * in.scale_a_k;
                copy_word(to, in.scale_a + batch * in.scale_a_batch + at, there);
            }
#pragma unroll
            for (u32 i = 0; i < Shape::kRowScales; ++i, to += 32) {
                const u32 of_row = Shape::kRowScales == 2 ? weight_at(g + 8 * i) : column / 128;
                const i64 at = of_row * in.scale_b_row + step * in.scale_b_k;
                copy_word(to, in.scale_b + batch * in.scale_b_batch + at, there);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (u32 i = 0; i + 1 < kStages; ++i) ask(i, begin + i);
    float sums[kGroups][4] = {};
    // In rounds of the ring; stages beyond the last are zeros
    for (u32 step = begin; step < end; step += kStages) {
#pragma unroll
        for (u32 i = 0; i < kStages; ++i) {
            wait_for_copies<kStages - 2>();
            float fresh[kGroups][4] = {};
            float(&to)[kGroups][4] = Shape::kAlongK ? fresh : sums;
#pragma unroll
            for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk) {
                const u32 at = pieces + i * Shape::kStage + chunk * Shape::kChunk;
                u32 w0[4], w1[4];
                load_piece(w0, at);
                load_piece(w1, at + kPieces);
#pragma unroll
                for (u32 t = 0; t < kGroups; ++t) {
                    u32 x[4];
                    load_piece(x, at + (2 + t) * kPieces);
                    mma_16x8<Element>(to[t], w0[0], w1[0], w0[1], w1[1], x[0], x[1]);
                    mma_16x8<Element>(to[t], w0[2], w1[2], w0[3], w1[3], x[2], x[3]);
                }
            }
            if constexpr (Shape::kAlongK) {
                const u32 scales = shared_address(words) + i * Shape::kStage;
                float of_rows[2];
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    of_rows[h] = load_word(scales + (Shape::kTokenScales + h % Shape::kRowScales) * kWords);
                }
#pragma unroll
                for (u32 t = 0; t < kGroups; ++t) {
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) {
                        const float of_token = load_word(scales + (2 * t + e) * kWords);
#pragma unroll
                        for (u32 h = 0; h < 2; ++h) sums[t][2 * h + e] += of_token * of_rows[h] * fresh[t][2 * h + e];
                    }
                }
            }
            ask((i + kStages - 1) % kStages, step + i + kStages - 1);  // read in the step before
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
    const float* const of_tokens = in.scale_a + batch * in.scale_a_batch;
    const float* const of_columns = in.scale_b + batch * in.scale_b_batch;
    float factor = alpha;
    if constexpr (Shape::kScaling == Scaling::None) factor = in.scale_a == nullptr ? alpha : alpha * *in.scale_a;
    if constexpr (Shape::kScaling == Scaling::Tensor) factor = alpha * *of_tokens * *of_columns;
    for (u32 i = threadIdx.x; i < kSums / 4; i += kThreads) {
        const u32 at_token = i / 4, at_column = i % 4 * 4, first = column + at_column;
        if (row + at_token >= u32(in.rows) || first >= u32(out.columns)) continue;
        float sum[4], shift[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const bool there = first + j < u32(out.columns);
            sum[j] = result[at_token * kPitch + at_column + j];
#pragma unroll
            for (u32 r = 1; r < kSplit; ++r) sum[j] += result[(r * Config::kTokens + at_token) * kPitch + at_column + j];
            if constexpr (Shape::kScaling == Scaling::Row) sum[j] *= there ? of_tokens[row + at_token] * of_columns[first + j] : 0;
            shift[j] = out.bias != nullptr && there ? to_float(out.bias[first + j]) : 0;
        }
        finish(sum, shift, factor, out, batch, row + at_token, first);
    }
}

// 16-bit operands; scale: one float or null.
template <typename Base>
__global__ void __launch_bounds__(Base::kWarps * 32, Base::kCtas) skinny_gemm(
    const typename Base::Element* weights, const typename Base::Element* tokens, typename Base::Out* d,
    const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale, i64 weight_batch, i64 weight_row,
    i64 token_batch, i64 token_row, i64 d_batch, i64 d_row, i64 c_batch, i64 c_row, float alpha, int rows, int columns,
    int depth, bool vectors) {
    using Config = Unscaled<Base>;
    const Factored<Config> in{weights, tokens, weight_batch, weight_row, token_batch, token_row, scale, nullptr,
                              0,       0,      0,            0,          0,           rows,      depth};
    skinny(in, Output<Config>{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors}, alpha);
}

// e4m3 operands.
template <typename Base>
__global__ void __launch_bounds__(Base::kWarps * 32, Base::kCtas) skinny_scaled_gemm(
    const typename Base::Element* weights, const typename Base::Element* tokens, typename Base::Out* d,
    const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale_a, const float* scale_b,
    i64 weight_batch, i64 weight_row, i64 token_batch, i64 token_row, i64 scale_a_batch, i64 scale_a_k, i64 scale_b_batch,
    i64 scale_b_row, i64 scale_b_k, i64 d_batch, i64 d_row, i64 c_batch, i64 c_row, float alpha, int rows, int columns,
    int depth, bool vectors) {
    using Config = OfProduct<Base>;
    const Factored<Config> in{weights, tokens,        weight_batch, weight_row,    token_batch, token_row, scale_a, scale_b,
                              scale_a_batch, scale_a_k, scale_b_batch, scale_b_row, scale_b_k,   rows,      depth};
    skinny(in, Output<Config>{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors}, alpha);
}

}  // namespace tilewright
