// D (M x N) = epilogue(A (M x K) * B (K x N)) for few rows of A ("tokens"): B ("weights") is read once, at memory speed.
// 16-bit operands, or e4m3 with scales; one product, a batch of them, or groups of rows that each have their own weights.
//
// Swapped operands.  The M of a WGMMA is always 64; 1 to 64 tokens would leave most of it as padding.  So weight rows lie
// along M, and tokens along N (8, 16, ... 64): D^T = B^T A^T.
//
// Split K inside a cluster.  The kSplit blocks of a cluster multiply consecutive ranges of K of the same weights, and send
// each other their accumulators (few_rows_parts/exchange.cuh): one launch, no workspace, the same bits every time.
//
// Bytes in flight.  One thread keeps a ring of kStages stages of weights and tokens full, across the tiles of its block:
// the next tile streams in during the epilogue of this one.  A stage is 256 bytes of K of 64 weight rows, 16 KB, and of all
// tokens, which come from the L2 again for every tile of weights.  One warpgroup multiplies.  At 4.3 TB/s of weights a
// multiprocessor takes a stage every 880 cycles.  With 64 tokens the WGMMAs of a stage keep the tensor cores busy for 256
// cycles, and the promotion of 8-bit products is 112 instructions a warp, meanwhile.
//
// Config: kTokens, kStages, kSplit (at most the k blocks), kCtas (blocks a multiprocessor), kMnMajor (weights run along N),
// kActivation (index of ACTIVATIONS in operands.py), Element, Out, Bias, Addend; kScaling for e4m3; for groups kHalves: weight
// rows come from the two halves of N in turn, and `weights` is a map (rows, 2, K).
#pragma once

#include "few_rows_parts/exchange.cuh"
#include "few_rows_parts/finish.cuh"
#include "few_rows_parts/promote.cuh"
#include "few_rows_parts/ring.cuh"
#include "few_rows_parts/schedulers.cuh"

namespace tilewright {

// make_scheduler() returns the tile scheduler of this cluster.  It reads what earlier kernels wrote, unless
// kFirstTileIsKnown.
template <typename Config, typename MakeScheduler>
__device__ inline void few_rows(
    const Operands<Config>& operands, const Output<Config>& out, float alpha, const MakeScheduler& make_scheduler) {
    using Shape = Layout<Config>;
    using Scheduler = decltype(make_scheduler());
    constexpr u32 kStages = Config::kStages, kSplit = Config::kSplit, kTokens = Config::kTokens;
    constexpr Scaling kScaling = Shape::kScaling;
    constexpr u32 kPrefetchStages = Config::kCtas == 1 ? 2 : 1;  // to the L2, before the previous kernel ends

    extern __shared__ __align__(1024) u8 shared[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared + Shape::kBarriersOffset);  // [kStages]
    Barrier* const empty = full + kStages;                                       // [kStages]
    Barrier& parcels_full = empty[kStages];       // the parcels of all blocks of the cluster have arrived here
    Barrier& parcels_empty = empty[kStages + 1];  // all blocks of the cluster have read theirs
    const Stages<Config> stages{shared, full, empty};
    const u32 rank = cluster_rank();

    // Initialize the barriers
    const bool producer = warp_index() == kMathThreads / 32;
    if (producer && elect_one()) {
        tma_prefetch_descriptor(operands.weights);
        tma_prefetch_descriptor(operands.tokens);
        if constexpr (Shape::kTokenScales > 0) tma_prefetch_descriptor(operands.token_scales);
        if constexpr (Shape::kWeightScales > 0) tma_prefetch_descriptor(operands.weight_scales);
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
    if constexpr (Scheduler::kFirstTileIsKnown) {
        // Prefetch the first weights to the L2 while the previous kernel ends.  More than these: 25 % slower.
        if (producer && elect_one()) {
            prefetch_l2(operands, make_scheduler().tile(), kPrefetchStages);
            BlockScales<Config>::prefetch_l2(operands, make_scheduler().tile());
        }
        __syncwarp();
    }
    griddepcontrol_wait();

    Scheduler scheduler = make_scheduler();
    if (producer) {
        if constexpr (kSplit == 1) named_barrier_arrive(kAllBarrier, kThreads);
        const bool leader = elect_one();
        Ring<kStages> ring;
        for (; scheduler.more(); scheduler.advance()) {
            if (leader) load_tile(stages, ring, operands, scheduler.tile());
            __syncwarp();
        }
        if constexpr (kSplit > 1) cluster_wait();  // completed long ago, but every arrival needs its wait
        return;
    }
    if constexpr (kSplit == 1) {
        named_barrier_sync(kAllBarrier, kThreads);
    } else {
        cluster_wait();
    }

    const u32 parcels = shared_address(shared + Shape::kParcelsOffset);
    float* const smem_d = reinterpret_cast<float*>(shared + Shape::kResultOffset);
    const u32 first_token = rank * Shape::kBlockParcels * 8;  // the first that this block owns
    const u32 row_of_thread = threadIdx.x / 16, column_of_thread = threadIdx.x % 16 * 4;  // in the epilogue
    float factor = alpha;
    if constexpr (kScaling == Scaling::None) factor = operands.scale_a == nullptr ? alpha : alpha * *operands.scale_a;

    Ring<kStages> ring;
    u32 parity = 0;  // of parcels_full and parcels_empty, which complete one phase a tile
    float next_block_scale = scheduler.more() ? BlockScales<Config>::load(operands, scheduler.tile(), 0) : 0;
    for (; scheduler.more(); parity ^= 1) {
        const Tile tile = scheduler.tile();
        scheduler.advance();
        const float block_scale = next_block_scale;
        if (scheduler.more()) next_block_scale = BlockScales<Config>::load(operands, scheduler.tile(), 0);
        const u32 column = tile.column + column_of_thread;

        // Load the bias and the scales of weights early
        float bias[4], weight_scale[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const bool in_bounds = column + i < u32(out.columns);
            bias[i] = out.bias != nullptr && in_bounds ? to_float(out.bias[column + i]) : 0;
            if constexpr (kScaling == Scaling::Row) {
                weight_scale[i] = in_bounds ? operands.scale_b[tile.weights * operands.scale_b_batch + column + i] : 0;
            }
        }
        if constexpr (kScaling == Scaling::Tensor) {
            factor = alpha * operands.scale_a[tile.tokens * operands.scale_a_batch] *
                     operands.scale_b[tile.weights * operands.scale_b_batch];
        }


        // Announce the parcels of the tokens that this block owns
        const u32 tile_tokens = min(kTokens, tile.end - tile.row);
        const u32 block_tokens = tile_tokens > first_token ? min(tile_tokens - first_token, Shape::kBlockParcels * 8) : 0;
        if (kSplit > 1 && threadIdx.x == 0) parcels_full.arrive_and_expect_tx((block_tokens + 7) / 8 * kSplit * kParcel);

        // Main loop: multiply this block's k blocks
        float acc[kTokens / 2];
        if constexpr (kScaling == Scaling::None) {
            multiply(acc, stages, ring, operands);
        } else {
            multiply_and_promote(acc, stages, ring, operands, tile, block_scale);
        }

        float token_scale[2 * Shape::kBlockParcels];  // of the tokens of this thread's accumulators
        if constexpr (kScaling == Scaling::Row) {
#pragma unroll
            for (u32 i = 0; i < 2 * Shape::kBlockParcels; ++i) {
                const u32 token = i / 2 * 8 + fragment_column() + i % 2;
                const float* const scales = operands.scale_a + tile.tokens * operands.scale_a_batch + tile.row + first_token;
                token_scale[i] = token < block_tokens ? scales[token] : 0;
            }
        }

        // Reduce over the cluster: acc_total[4 p + 2 h + e] as in epilogue.cuh, weights for its rows, of owned tokens
        float acc_total[4 * Shape::kBlockParcels];
        if constexpr (kSplit == 1) {
#pragma unroll
            for (u32 i = 0; i < kTokens / 2; ++i) acc_total[i] = acc[i];
        } else {
            wait_acquire_cluster(parcels_empty, parity ^ 1);  // parcels of the previous tile
            send_parcels<Config>(acc, parcels, parcels_full, rank, tile_tokens);
            wait_acquire_cluster(parcels_full, parity);
#pragma unroll
            for (u32 p = 0; p < Shape::kBlockParcels; ++p) {
                if (8 * p >= block_tokens) break;
                float sum[4];
                reduce_parcels<Config>(sum, parcels, p);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) acc_total[4 * p + i] = sum[i];
            }
        }

        // Transpose through shared memory, so that threads write neighbouring columns of a row of D
        named_barrier_sync(kMathBarrier, kMathThreads);  // the previous tile has been written
#pragma unroll
        for (u32 i = 0; i < 4 * Shape::kBlockParcels; ++i) {
            const u32 token = i / 4 * 8 + fragment_column() + i % 2, weight = fragment_row() + i % 4 / 2 * 8;
            const float scale = kScaling == Scaling::Row ? token_scale[i / 4 * 2 + i % 2] : 1;
            if (token < block_tokens) smem_d[token * kPitch + weight] = scale * acc_total[i];
        }
        named_barrier_sync(kMathBarrier, kMathThreads);
        // All threads have read the parcels: release them.  The release at cluster scope is a fence, but few writes are in
        // flight here, and the ring hides it.  Not needed for the last tile: the peer may have exited.
        if (kSplit > 1 && scheduler.more() && threadIdx.x < kSplit) parcels_empty.arrive_remote(threadIdx.x);

        // Epilogue: scales, bias, activation, C
        for (u32 token = row_of_thread; token < block_tokens; token += 8) {
            float sum[4];
            load_shared(sum, shared_address(smem_d + token * kPitch + column_of_thread));
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if constexpr (kScaling == Scaling::Row) sum[i] *= weight_scale[i];
            }
            if (column < u32(out.columns)) {
                apply_epilogue(sum, bias, factor, out, tile.tokens, tile.row + first_token + token, column);
            }
        }
    }
}

// Sets the k blocks of this block of the cluster: at least one.
template <typename Config> __device__ inline void split_k(Operands<Config>& operands) {
    const u32 k_blocks = (operands.k + Layout<Config>::kBlockK - 1) / Layout<Config>::kBlockK;  // beyond K come zeros
    operands.k_block_begin = k_blocks * cluster_rank() / Config::kSplit;
    operands.k_block_end = k_blocks * (cluster_rank() + 1) / Config::kSplit;
}

// 16-bit operands; scale: one float or null.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, typename Base::Out* d,
    const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale, i64 d_batch, i64 d_row,
    i64 c_batch, i64 c_row, float alpha, int m, int n, int k, int batches, int token_rows, bool vectors) {
    using Config = Unscaled<Base>;
    Operands<Config> operands{weights, tokens, weights, tokens, scale, nullptr, 0, 0, 0, u32(k), u32(token_rows)};
    split_k(operands);
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, n, vectors};
    few_rows(operands, out, alpha, [&] { return BatchScheduler<Config>(m, n, batches); });
}

// e4m3 operands along K.  Scales (rows or blocks of rows, blocks of K) of both, with their strides.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_scaled_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ TensorMap weight_scales, const __grid_constant__ TensorMap token_scales,
    typename Base::Out* d, const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale_a,
    const float* scale_b, i64 scale_a_batch, i64 scale_b_batch, i64 scale_b_row, i64 d_batch, i64 d_row, i64 c_batch,
    i64 c_row, float alpha, int m, int n, int k, int batches, int token_rows, bool vectors) {
    using Config = Batched<Base>;
    Operands<Config> operands{weights, tokens, weight_scales, token_scales, scale_a, scale_b, scale_a_batch, scale_b_batch,
                              scale_b_row, u32(k), u32(token_rows)};
    split_k(operands);
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, n, vectors};
    few_rows(operands, out, alpha, [&] { return BatchScheduler<Config>(m, n, batches); });
}

// Rows starts[g] .. ends[g] of A by weights g.  Operands as in few_rows_gemm, or as in few_rows_scaled_gemm.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_grouped_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ TensorMap weight_scales, const __grid_constant__ TensorMap token_scales,
    typename Base::Out* d, const int* starts, const int* ends, const float* scale_a, const float* scale_b,
    i64 scale_a_batch, i64 scale_b_batch, i64 scale_b_row, i64 d_batch, i64 d_row, int groups, int m, int n,
    int k, int token_rows, bool masked, bool vectors) {
    using Config = Grouped<Base>;
    Operands<Config> operands{weights, tokens, weight_scales, token_scales, scale_a, scale_b, scale_a_batch, scale_b_batch,
                              scale_b_row, u32(k), u32(token_rows)};
    operands.weight_rows = u32(n);
    split_k(operands);
    const Output<Config> out{d, nullptr, nullptr, d_batch, d_row, 0, 0, n, vectors};
    few_rows(operands, out, 1.0f, [&] { return GroupScheduler<Config>(starts, ends, groups, m, n, masked); });
}

}  // namespace tilewright
