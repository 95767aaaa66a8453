// D (M x N) = epilogue(A (M x K) * B (K x N)) for few rows of A ("tokens"): B ("weights") is read once, at the speed of
// the memory.  16-bit operands, or e4m3 with scales; one product, a batch of them, or groups of rows with weights each.
//
// Swapped operands.  A WGMMA is 64 high whatever it multiplies; with 1 to 64 tokens on that side most of it would be
// padding.  So weight rows lie along its 64, tokens along its N (8, 16, ... 64): D^T = B^T A^T.
//
// Split K inside a cluster.  The kSplit blocks of a cluster multiply consecutive ranges of K of the same weights, and send
// each other their sums (few_rows/exchange.cuh): one launch, no workspace, the same bits every time.
//
// Bytes in flight.  One thread keeps a ring of kStages stages of weights and tokens full, across the tiles of its block:
// the next tile streams in during the epilogue of this one.  A stage is 256 bytes of K of 64 weight rows, 16 KB, and of the
// tokens, as many rows as there are, which come from the L2 again for every tile of weights.  One warpgroup multiplies.
// Of weights that come at 4.3 TB/s a multiprocessor takes a stage every 880 cycles.  With 64 tokens its WGMMA keep the
// tensor cores busy for 256 of them, and the promotion of 8-bit products is 112 instructions a warp, meanwhile.
//
// Config: kTokens, kStages, kSplit (at most the stages of K), kCtas (blocks a multiprocessor), kMnMajor (weights run along
// N), kActivation (index of ACTIVATIONS in operands.py), Element, Out, Bias, Addend; kScaling where scales can be.
#pragma once

#include "few_rows/exchange.cuh"
#include "few_rows/finish.cuh"
#include "few_rows/promote.cuh"
#include "few_rows/ring.cuh"
#include "few_rows/walks.cuh"

namespace tilewright {

// make_walk(): the tiles of this cluster; called once what earlier kernels wrote may be read, before that only if
// kFirstIsKnown.
template <typename Config, typename MakeWalk>
__device__ inline void few_rows(
    const Operands<Config>& in, const Output<Config>& out, float alpha, const MakeWalk& make_walk) {
    using Shape = Layout<Config>;
    using Walk = decltype(make_walk());
    constexpr u32 kStages = Config::kStages, kSplit = Config::kSplit, kTokens = Config::kTokens;
    constexpr Scaling kScaling = Shape::kScaling;
    constexpr u32 kAhead = Config::kCtas == 1 ? 2 : 1;  // stages that are fetched to the L2 early

    extern __shared__ __align__(1024) u8 shared[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared + Shape::kBarriers);  // [kStages]
    Barrier* const empty = full + kStages;                                       // [kStages]
    Barrier& received = empty[kStages];  // parcels of all blocks of the cluster lie in ours
    Barrier& taken = empty[kStages + 1];  // and all blocks have read theirs
    const Stages<Config> stages{shared, full, empty};
    const u32 rank = cluster_rank();

    const bool producer = warp_index() == kMath / 32;
    if (producer && elect_one()) {
        tma_prefetch_descriptor(in.weights);
        tma_prefetch_descriptor(in.tokens);
        if constexpr (Shape::kTokenScales > 0) tma_prefetch_descriptor(in.token_scales);
        if constexpr (Shape::kWeightScales > 0) tma_prefetch_descriptor(in.weight_scales);
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
    if constexpr (Walk::kFirstIsKnown) {
        // The first weights come to the L2 while the kernel before this one ends.  Not more of them: 25 % slower.
        if (producer && elect_one()) {
            fetch(in, make_walk().tile(), kAhead);
            BlockScales<Config>::fetch(in, make_walk().tile());
        }
        __syncwarp();
    }
    griddepcontrol_wait();

    Walk walk = make_walk();
    if (producer) {
        if constexpr (kSplit == 1) named_barrier_arrive(kAllThreads, kThreads);
        const bool leader = elect_one();
        Ring<kStages> ring;
        for (; walk.more(); walk.advance()) {
            if (leader) fill(stages, ring, in, walk.tile());
            __syncwarp();
        }
        if constexpr (kSplit > 1) cluster_wait();  // long over, but a wait belongs to each arrival
        return;
    }
    if constexpr (kSplit == 1) {
        named_barrier_sync(kAllThreads, kThreads);
    } else {
        cluster_wait();
    }

    const u32 parcels = shared_address(shared + Shape::kReceived);
    float* const result = reinterpret_cast<float*>(shared + Shape::kResult);
    const u32 first_token = rank * Shape::kShare * 8;  // of those that this block owns
    const u32 row_of_thread = threadIdx.x / 16, column_of_thread = threadIdx.x % 16 * 4;  // in the epilogue
    float factor = alpha;
    if constexpr (kScaling == Scaling::None) factor = in.scale_a == nullptr ? alpha : alpha * *in.scale_a;

    Ring<kStages> ring;
    u32 parity = 0;  // of `received` and `taken`, which go through one phase a tile
    float next_block_scale = walk.more() ? BlockScales<Config>::load(in, walk.tile(), 0) : 0;
    for (; walk.more(); parity ^= 1) {
        const Tile at = walk.tile();
        walk.advance();
        const float block_scale = next_block_scale;
        if (walk.more()) next_block_scale = BlockScales<Config>::load(in, walk.tile(), 0);
        const u32 column = at.column + column_of_thread;
        float shift[4], weight_scale[4];  // the bias and scales, asked for long before they are needed
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const bool there = column + i < u32(out.columns);
            shift[i] = out.bias != nullptr && there ? to_float(out.bias[column + i]) : 0;
            if constexpr (kScaling == Scaling::Row) {
                weight_scale[i] = there ? in.scale_b[at.weights * in.scale_b_batch + column + i] : 0;
            }
        }
        if constexpr (kScaling == Scaling::Tensor) {
            factor = alpha * in.scale_a[at.tokens * in.scale_a_batch] * in.scale_b[at.weights * in.scale_b_batch];
        }

        const u32 height = min(kTokens, at.end - at.row);
        const u32 own_tokens = height > first_token ? min(height - first_token, Shape::kShare * 8) : 0;
        if (kSplit > 1 && threadIdx.x == 0) received.arrive_and_expect_tx((own_tokens + 7) / 8 * kSplit * kParcel);

        float sums[kTokens / 2];
        if constexpr (kScaling == Scaling::None) {
            multiply(sums, stages, ring, in);
        } else {
            multiply_and_promote(sums, stages, ring, in, at, block_scale);
        }

        float token_scale[2 * Shape::kShare];  // of the tokens of this thread's sums
        if constexpr (kScaling == Scaling::Row) {
#pragma unroll
            for (u32 i = 0; i < 2 * Shape::kShare; ++i) {
                const u32 token = i / 2 * 8 + fragment_column() + i % 2;
                const float* const scales = in.scale_a + at.tokens * in.scale_a_batch + at.row + first_token;
                token_scale[i] = token < own_tokens ? scales[token] : 0;
            }
        }

        // Sums of all of K, for this block's tokens: own[4 p + 2 h + e] as in epilogue.cuh, with weights for its rows.
        float own[4 * Shape::kShare];
        if constexpr (kSplit == 1) {
#pragma unroll
            for (u32 i = 0; i < kTokens / 2; ++i) own[i] = sums[i];
        } else {
            wait_acquire_cluster(taken, parity ^ 1);  // parcels of the tile before
            send<Config>(sums, parcels, received, rank, height);
            wait_acquire_cluster(received, parity);
#pragma unroll
            for (u32 p = 0; p < Shape::kShare; ++p) {
                if (8 * p >= own_tokens) break;
                float sum[4];
                add_up<Config>(sum, parcels, p);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) own[4 * p + i] = sum[i];
            }
        }

        // Transposed, so that threads write neighbouring columns of a row of D.
        named_barrier_sync(kMathThreads, kMath);  // the tile before has been written
#pragma unroll
        for (u32 i = 0; i < 4 * Shape::kShare; ++i) {
            const u32 token = i / 4 * 8 + fragment_column() + i % 2, weight = fragment_row() + i % 4 / 2 * 8;
            const float scale = kScaling == Scaling::Row ? token_scale[i / 4 * 2 + i % 2] : 1;
            if (token < own_tokens) result[token * kPitch + weight] = scale * own[i];
        }
        named_barrier_sync(kMathThreads, kMath);
        // All threads have read the parcels.  A release for the cluster: a fence, but here few writes are on their way, and
        // the ring hides it.  Nobody waits for the last one, and a block that has ended could not hear it.
        if (kSplit > 1 && walk.more() && threadIdx.x < kSplit) taken.arrive_remote(threadIdx.x);
        for (u32 token = row_of_thread; token < own_tokens; token += 8) {
            float sum[4];
            load_shared(sum, shared_address(result + token * kPitch + column_of_thread));
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if constexpr (kScaling == Scaling::Row) sum[i] *= weight_scale[i];
            }
            if (column < u32(out.columns)) {
                finish(sum, shift, factor, out, at.tokens, at.row + first_token + token, column);
            }
        }
    }
}

// The stages of K of this block of its cluster: one at least.
template <typename Config> __device__ inline void share_depth(Operands<Config>& in) {
    const u32 steps = (in.depth + Layout<Config>::kBlockK - 1) / Layout<Config>::kBlockK;  // beyond K are zeros
    in.begin = steps * cluster_rank() / Config::kSplit;
    in.end = steps * (cluster_rank() + 1) / Config::kSplit;
}

// 16-bit operands; scale: one float or null.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, typename Base::Out* d,
    const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale, i64 d_batch, i64 d_row,
    i64 c_batch, i64 c_row, float alpha, int rows, int columns, int depth, int batches, int token_rows, bool vectors) {
    using Config = Unscaled<Base>;
    Operands<Config> in{weights, tokens, weights, tokens, scale, nullptr, 0, 0, 0, u32(depth), u32(token_rows)};
    share_depth(in);
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors};
    few_rows(in, out, alpha, [&] { return BatchWalk<Config>(rows, columns, batches); });
}

// e4m3 operands along K.  Scales (rows or blocks of rows, blocks of K) of both, with their strides.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_scaled_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ TensorMap weight_scales, const __grid_constant__ TensorMap token_scales,
    typename Base::Out* d, const typename Base::Bias* bias, const typename Base::Addend* c, const float* scale_a,
    const float* scale_b, i64 scale_a_batch, i64 scale_b_batch, i64 scale_b_row, i64 d_batch, i64 d_row, i64 c_batch,
    i64 c_row, float alpha, int rows, int columns, int depth, int batches, int token_rows, bool vectors) {
    using Config = OfProduct<Base>;
    Operands<Config> in{weights, tokens, weight_scales, token_scales, scale_a, scale_b, scale_a_batch, scale_b_batch,
                        scale_b_row, u32(depth), u32(token_rows)};
    share_depth(in);
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors};
    few_rows(in, out, alpha, [&] { return BatchWalk<Config>(rows, columns, batches); });
}

// Rows starts[g] .. ends[g] of A by weights g.  Operands as in few_rows_gemm, or as in few_rows_scaled_gemm.
template <typename Base>
__global__ void __launch_bounds__(kThreads, Base::kCtas) few_rows_grouped_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ TensorMap weight_scales, const __grid_constant__ TensorMap token_scales,
    typename Base::Out* d, const int* starts, const int* ends, const float* scale_a, const float* scale_b,
    i64 scale_a_batch, i64 scale_b_batch, i64 scale_b_row, i64 d_batch, i64 d_row, int groups, int rows, int columns,
    int depth, int token_rows, bool batched, bool vectors) {
    using Config = OfGroups<Base>;
    Operands<Config> in{weights, tokens, weight_scales, token_scales, scale_a, scale_b, scale_a_batch, scale_b_batch,
                        scale_b_row, u32(depth), u32(token_rows)};
    share_depth(in);
    const Output<Config> out{d, nullptr, nullptr, d_batch, d_row, 0, 0, columns, vectors};
    few_rows(in, out, 1.0f, [&] { return GroupWalk<Config>(starts, ends, groups, rows, columns, batched); });
}

}  // namespace tilewright
