// D (M x N) = act(X (M x K) * W^T + bias) for few rows of X ("tokens"), W (N x K) as integers of 8 or 4 bits with a scale
// for each 128 of K: W is read once, as it is stored, at memory speed.
//
// A stage of the ring is 128 bytes of K of kRows weight rows, the same K of the tokens, and the scales.  kWarps math warps
// multiply, each its 16 kTiles weight rows by all tokens.  A thread reads 16 consecutive bytes of a weight row from shared
// memory, converts them in registers (weight_convert.cuh), and multiplies them by the same K of the tokens (mma_sync.cuh):
// 32 or 16 elements along K belong to one thread, and both operands are read in memory order.
//
// The products of each 128 of K are accumulated from zero, and promoted with the scale of their group to the float
// accumulators.  Integers are exact in both 16-bit types, so weights are never rounded.
//
// Split K inside a cluster: the kSplit blocks take consecutive k blocks of the same rows; each sends its accumulators, eight
// tokens at a time, to the block that owns these tokens, which adds what block 0, 1, ... sent in this order.  One launch, no
// workspace, the same bits every time.  The producer, one thread, keeps the ring full across the tiles of its block.
//
// Config: kBits, kTokens, kTiles, kWarps, kStages, kSplit (at most the k blocks), kCtas (blocks a multiprocessor),
// kActivation (index of ACTIVATIONS in operands.py), Element, Scale, Out, Bias.
#pragma once

#include <tilewright/cluster.cuh>
#include <tilewright/tma.cuh>

#include "weight_only_epilogue.cuh"
#include "weight_only_product.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(Layout<Config>::kThreads, Config::kCtas) weight_only_matmul(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ TensorMap scales, typename Config::Out* d, const typename Config::Bias* bias, i64 d_row,
    int m, int n, int k, int token_rows, bool vectors) {
    using Shape = Layout<Config>;
    constexpr u32 kStages = Config::kStages, kSplit = Config::kSplit, kTokens = Config::kTokens;
    constexpr u32 kMathThreads = Shape::kMathThreads, kThreads = Shape::kThreads;
    constexpr u32 kPrefetchStages = Config::kCtas == 1 ? 2 : 1;  // to the L2, before the previous kernel ends

    extern __shared__ __align__(1024) u8 shared[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared + Shape::kBarriersOffset);  // [kStages]
    Barrier* const empty = full + kStages;                                       // [kStages]
    Barrier& parcels_full = empty[kStages];       // the parcels of all blocks of the cluster have arrived here
    Barrier& parcels_empty = empty[kStages + 1];  // all blocks of the cluster have read theirs

    // A cluster takes tiles index, index + clusters, ...; tiles of the same weights follow each other.
    const u32 tiles_m = (m + kTokens - 1) / kTokens, tiles = tiles_m * ((n + Shape::kRows - 1) / Shape::kRows);
    const u32 rank = cluster_rank(), first_tile = blockIdx.x / kSplit, clusters = gridDim.x / kSplit;
    const u32 k_blocks = (k + Shape::kStageK - 1) / Shape::kStageK;  // beyond K come zeros
    // At least one, as kSplit <= k_blocks
    const u32 k_block_begin = k_blocks * rank / kSplit, k_block_end = k_blocks * (rank + 1) / kSplit;

    // Initialize the barriers
    const bool producer = warp_index() == kMathThreads / 32;
    if (producer && elect_one()) {
        tma_prefetch_descriptor(weights);
        tma_prefetch_descriptor(tokens);
        tma_prefetch_descriptor(scales);
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(kMathThreads / 32);  // one arrival a warp
        }
        parcels_full.init(1);
        parcels_empty.init(kSplit);
        fence_barrier_init();
    }
    // The producer needs the barriers of its own block only, and goes on; the math warps wait for those of the cluster.
    __syncwarp();
    if constexpr (kSplit > 1) cluster_arrive_relaxed();
    launch_dependents();
    if (producer && elect_one()) {
        // Prefetch the first weights to the L2 while the previous kernel ends
        for (u32 k_block = k_block_begin; k_block < min(k_block_end, k_block_begin + kPrefetchStages); ++k_block) {
            tma_prefetch_l2(weights, k_block * kSpan, first_tile / tiles_m * Shape::kRows);
        }
    }
    __syncwarp();
    griddepcontrol_wait();

    if (producer) {
        if constexpr (kSplit == 1) named_barrier_arrive(kAllBarrier, kThreads);
        if (elect_one()) {
            Ring<kStages> ring;
            for (u32 tile = first_tile; tile < tiles; tile += clusters) {
                const u32 row = tile % tiles_m * kTokens, column = tile / tiles_m * Shape::kRows;
                for (u32 k_block = k_block_begin; k_block < k_block_end; ++k_block, ring.advance()) {
                    u8* const stage = shared + ring.stage * Shape::kStage;
                    Barrier& full_barrier = full[ring.stage];

                    // Wait until the math warps have released the stage
                    empty[ring.stage].wait(ring.parity ^ 1);

                    // Issue the TMA loads of weights, scales and tokens; a box at an edge counts in full
                    full_barrier.arrive_and_expect_tx(Shape::kWeights + Shape::kTokenBoxes * token_rows * kSpan + Shape::kScales);
                    tma_load(stage, weights, full_barrier, k_block * kSpan, column, CacheHint::EvictFirst);
                    tma_load(stage + Shape::kScalesOffset, scales, full_barrier, column, k_block * Shape::kGroups);
#pragma unroll
                    for (u32 box = 0; box < Shape::kTokenBoxes; ++box) {
                        tma_load(stage + Shape::kWeights + box * Shape::kTokenBox, tokens, full_barrier,
                                 k_block * Shape::kStageK + box * kTokenK, row, CacheHint::EvictLast);
                    }
                }
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) cluster_wait();  // completed long ago, but every arrival needs its wait
        return;
    }
    if constexpr (kSplit == 1) {
        named_barrier_sync(kAllBarrier, kThreads);
    } else {
        cluster_wait();
    }

    const Fragments<Config> fragments;
    const u32 base = shared_address(shared), parcels = base + Shape::kParcelsOffset;
    float* const smem_d = reinterpret_cast<float*>(shared + Shape::kResultOffset);
    const u32 first_token = rank * Shape::kBlockParcels * 8;  // the first that this block owns
    constexpr u32 kRowThreads = Shape::kRows / 4;      // threads of a row in the epilogue, four columns each
    const u32 row_of_thread = threadIdx.x / kRowThreads, column_of_thread = threadIdx.x % kRowThreads * 4;
    const Output<Config> out{d, d_row, n, vectors};

    Ring<kStages> ring;
    u32 parity = 0;  // of parcels_full and parcels_empty, which complete one phase a tile
    for (u32 tile = first_tile; tile < tiles; tile += clusters, parity ^= 1) {
        const u32 row = tile % tiles_m * kTokens, column = tile / tiles_m * Shape::kRows + column_of_thread;

        // Load the bias early
        float bias_frag[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            bias_frag[i] = bias != nullptr && column + i < u32(n) ? to_float(bias[column + i]) : 0;
        }

        // Announce the parcels of the tokens that this block owns
        const u32 tile_tokens = min(kTokens, u32(m) - row);
        const u32 block_tokens = tile_tokens > first_token ? min(tile_tokens - first_token, Shape::kBlockParcels * 8) : 0;
        if (kSplit > 1 && threadIdx.x == 0) parcels_full.arrive_and_expect_tx((block_tokens + 7) / 8 * kSplit * Shape::kParcel);

        // Main loop: multiply this block's k blocks
        Accumulators<Config> acc = {};
        for (u32 k_block = k_block_begin; k_block < k_block_end; ++k_block, ring.advance()) {
            full[ring.stage].wait(ring.parity);
            fragments.multiply(acc, base + ring.stage * Shape::kStage);
            __syncwarp();  // all lanes have read
            if (lane_index() == 0) empty[ring.stage].arrive();
        }

        // Reduce over the cluster: acc_total has the tokens that this block owns
        Parcels<Config, Shape::kBlockParcels> acc_total;
        if constexpr (kSplit == 1) {
            acc_total = acc;
        } else {
            wait_acquire_cluster(parcels_empty, parity ^ 1);  // parcels of the previous tile
            send_parcels<Config>(acc, parcels, parcels_full, rank, tile_tokens);
            wait_acquire_cluster(parcels_full, parity);
            reduce_parcels<Config>(acc_total, parcels, block_tokens);
        }

        // Transpose through shared memory, so that threads write neighbouring columns of a row of D
        named_barrier_sync(kMathBarrier, kMathThreads);  // the previous tile has been written
#pragma unroll
        for (u32 p = 0; p < Shape::kBlockParcels; ++p) {
#pragma unroll
            for (u32 i = 0; i < 4 * Config::kTiles; ++i) {
                const u32 token = 8 * p + lane_index() % 4 * 2 + i % 2;
                const u32 weight = fragments.weight_row + i / 4 * 16 + i % 4 / 2 * 8;
                if (token < block_tokens) smem_d[token * Shape::kPitch + weight] = acc_total.values[p][i / 4][i % 4];
            }
        }
        named_barrier_sync(kMathBarrier, kMathThreads);
        // Release the parcels.  Not needed for the last tile: the peer may have exited.
        if (kSplit > 1 && tile + clusters < tiles && threadIdx.x < kSplit) parcels_empty.arrive_remote_after_reads(threadIdx.x);

        // Epilogue: bias, activation
        if (column < u32(n)) {
            for (u32 token = row_of_thread; token < block_tokens; token += kMathThreads / kRowThreads) {
                float sum[4];
                load_shared(sum, shared_address(smem_d + token * Shape::kPitch + column_of_thread));
                apply_epilogue(sum, bias_frag, out, row + first_token + token, column);
            }
        }
    }
}

}  // namespace tilewright
