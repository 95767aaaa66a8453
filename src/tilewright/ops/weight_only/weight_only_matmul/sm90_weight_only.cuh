// D (M x N) = act(X (M x K) * W^T + bias) for few rows of X ("tokens"), W (N x K) as integers of 8 or 4 bits with a scale
// for each 128 of K: W is read once, as it is stored, at the speed of the memory.
//
// A stage of the ring is 128 bytes of K of kRows weight rows, the tokens' same K, and the scales.  kWarps warps multiply,
// each its 16 kTiles weight rows by all tokens.  A thread takes 16 consecutive bytes of a weight row from shared memory,
// converts them in registers (weight_convert.cuh), and multiplies by the same K of the tokens (mma_sync.cuh): 32 or 16
// elements along K belong to one thread, and both operands are read in the order of their memory.
//
// The products of 128 along K are summed from zero by the matrix unit, and added with the scale of their group to the
// float sums.  Integers are exact in both 16-bit types, so the weight is never rounded.
//
// Split K inside a cluster: the kSplit blocks take consecutive stages of the same rows; each sends its sums, eight tokens
// at a time, to the block that owns these tokens, which adds what came from block 0, 1, ... in this order.  One launch, no
// workspace, the same bits every time.  The producer, one thread, keeps the ring full across the tiles of its block.
//
// Config: kBits, kTokens, kTiles, kWarps, kStages, kSplit (at most the stages of K), kCtas (blocks a multiprocessor), kActivation
// (index of ACTIVATIONS in operands.py), Element, Scale, Out, Bias.
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
    int rows, int columns, int depth, int token_rows, bool vectors) {
    using Shape = Layout<Config>;
    constexpr u32 kStages = Config::kStages, kSplit = Config::kSplit, kTokens = Config::kTokens;
    constexpr u32 kMath = Shape::kMath, kThreads = Shape::kThreads;
    constexpr u32 kAhead = Config::kCtas == 1 ? 2 : 1;  // stages of a block that are fetched before the start

    extern __shared__ __align__(1024) u8 shared[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared + Shape::kBarriers);  // [kStages]
    Barrier* const empty = full + kStages;                                       // [kStages]
    Barrier& received = empty[kStages];   // parcels of all blocks of the cluster lie in ours
    Barrier& taken = empty[kStages + 1];  // and all blocks have read theirs

    // A cluster takes tiles index, index + clusters, ...; tiles of the same weights follow each other.
    const u32 tile_rows = (rows + kTokens - 1) / kTokens, tiles = tile_rows * ((columns + Shape::kRows - 1) / Shape::kRows);
    const u32 rank = cluster_rank(), first = blockIdx.x / kSplit, clusters = gridDim.x / kSplit;
    const u32 steps = (depth + Shape::kStageK - 1) / Shape::kStageK;  // beyond K the copy engine reads zeros
    const u32 begin = steps * rank / kSplit, end = steps * (rank + 1) / kSplit;  // one at least: kSplit <= steps

    const bool producer = warp_index() == kMath / 32;
    if (producer && elect_one()) {
        tma_prefetch_descriptor(weights);
        tma_prefetch_descriptor(tokens);
        tma_prefetch_descriptor(scales);
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(kMath / 32);  // one arrival a warp
        }
        received.init(1);
        taken.init(kSplit);
        fence_barrier_init();
    }
    // The producer needs its own barriers only, and goes on; the others wait until those of all blocks are there.
    __syncwarp();
    if constexpr (kSplit > 1) cluster_arrive_relaxed();
    launch_dependents();
    if (producer && elect_one()) {
        // The first weights come to the L2 while the kernel before this one ends
        for (u32 step = begin; step < min(end, begin + kAhead); ++step) {
            tma_prefetch_l2(weights, step * kSpan, first / tile_rows * Shape::kRows);
        }
    }
    __syncwarp();
    griddepcontrol_wait();

    if (producer) {
        if constexpr (kSplit == 1) named_barrier_arrive(kAllThreads, kThreads);
        if (elect_one()) {
            Ring<kStages> ring;
            for (u32 tile = first; tile < tiles; tile += clusters) {
                const u32 row = tile % tile_rows * kTokens, column = tile / tile_rows * Shape::kRows;
                for (u32 step = begin; step < end; ++step, ring.advance()) {
                    u8* const stage = shared + ring.stage * Shape::kStage;
                    Barrier& landed = full[ring.stage];
                    empty[ring.stage].wait(ring.parity ^ 1);
                    // A box at an edge counts in full
                    landed.arrive_and_expect_tx(Shape::kWeights + Shape::kTokenBoxes * token_rows * kSpan + Shape::kScales);
                    tma_load(stage, weights, landed, step * kSpan, column, CacheHint::EvictFirst);
                    tma_load(stage + Shape::kScalesAt, scales, landed, column, step * Shape::kGroups);
#pragma unroll
                    for (u32 box = 0; box < Shape::kTokenBoxes; ++box) {
                        tma_load(stage + Shape::kWeights + box * Shape::kTokenBox, tokens, landed,
                                 step * Shape::kStageK + box * kTokenK, row, CacheHint::EvictLast);
                    }
                }
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) cluster_wait();  // long over, but a wait belongs to each arrival
        return;
    }
    if constexpr (kSplit == 1) {
        named_barrier_sync(kAllThreads, kThreads);
    } else {
        cluster_wait();
    }

    const Fragments<Config> fragments;
    const u32 base = shared_address(shared), parcels = base + Shape::kReceived;
    float* const result = reinterpret_cast<float*>(shared + Shape::kResult);
    const u32 first_token = rank * Shape::kShare * 8;  // of those that this block owns
    constexpr u32 kAcross = Shape::kRows / 4;          // threads of a row in the epilogue, four columns each
    const u32 row_of_thread = threadIdx.x / kAcross, column_of_thread = threadIdx.x % kAcross * 4;
    const Output<Config> out{d, d_row, columns, vectors};

    Ring<kStages> ring;
    u32 parity = 0;  // of `received` and `taken`, which go through one phase a tile
    for (u32 tile = first; tile < tiles; tile += clusters, parity ^= 1) {
        const u32 row = tile % tile_rows * kTokens, column = tile / tile_rows * Shape::kRows + column_of_thread;
        float shift[4];  // the bias, asked for long before it is needed
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            shift[i] = bias != nullptr && column + i < u32(columns) ? to_float(bias[column + i]) : 0;
        }
        const u32 height = min(kTokens, u32(rows) - row);
        const u32 own_tokens = height > first_token ? min(height - first_token, Shape::kShare * 8) : 0;
        if (kSplit > 1 && threadIdx.x == 0) received.arrive_and_expect_tx((own_tokens + 7) / 8 * kSplit * Shape::kParcel);

        Sums<Config> sums = {};
        for (u32 step = begin; step < end; ++step, ring.advance()) {
            full[ring.stage].wait(ring.parity);
            fragments.multiply(sums, base + ring.stage * Shape::kStage);
            __syncwarp();  // all lanes have read
            if (lane_index() == 0) empty[ring.stage].arrive();
        }

        // Sums of all of K, for this block's tokens: own.of[p][t] are 16 weight rows by eight tokens
        Parcels<Config, Shape::kShare> own;
        if constexpr (kSplit == 1) {
            own = sums;
        } else {
            wait_acquire_cluster(taken, parity ^ 1);  // parcels of the tile before
            send<Config>(sums, parcels, received, rank, height);
            wait_acquire_cluster(received, parity);
            add_up<Config>(own, parcels, own_tokens);
        }

        // Transposed, so that threads write neighbouring columns of a row of D.
        named_barrier_sync(kMathThreads, kMath);  // the tile before has been written
#pragma unroll
        for (u32 p = 0; p < Shape::kShare; ++p) {
#pragma unroll
            for (u32 i = 0; i < 4 * Config::kTiles; ++i) {
                const u32 token = 8 * p + lane_index() % 4 * 2 + i % 2;
                const u32 weight = fragments.weight_row + i / 4 * 16 + i % 4 / 2 * 8;
                if (token < own_tokens) result[token * Shape::kPitch + weight] = own.of[p][i / 4][i % 4];
            }
        }
        named_barrier_sync(kMathThreads, kMath);
        // Parcels have been read.  Nobody waits for the last word of this, and a block that has ended could not hear it.
        if (kSplit > 1 && tile + clusters < tiles && threadIdx.x < kSplit) taken.arrive_remote_after_reads(threadIdx.x);
        if (column < u32(columns)) {
            for (u32 token = row_of_thread; token < own_tokens; token += kMath / kAcross) {
                float sum[4];
                load_shared(sum, shared_address(result + token * Shape::kPitch + column_of_thread));
                finish(sum, shift, out, row + first_token + token, column);
            }
        }
    }
}

}  // namespace tilewright
