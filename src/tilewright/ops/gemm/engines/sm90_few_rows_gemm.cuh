// D (M x N) = epilogue(A (M x K) * B (K x N)) for few rows of A ("tokens"): B ("weights") is read once, at the speed of
// the memory.
//
// Swapped operands.  A WGMMA is 64 high whatever it multiplies; with 1 to 64 tokens on that side most of it would be
// padding.  So weight rows lie along its 64, tokens along its N (8, 16, 32, 64): D^T = B^T A^T.
//
// Split K inside a cluster.  The kSplit blocks of a cluster multiply consecutive ranges of K of the same weights.  Each
// sends its float32 sums, eight tokens at a time, to the block that owns these tokens; the owner adds what it received from
// block 0, 1, ... in this order, and writes the result: one launch, no workspace, no fence, the same bits every time.
//
// Bytes in flight.  One thread keeps a ring of kStages stages of weights and tokens full, across the tiles of its block:
// the next tile streams in during the epilogue of this one.  A stage is 128 of K of 64 weight rows, 16 KB, and of the
// tokens, as many rows as there are, which come from the L2 again for every tile of weights.  One warpgroup multiplies.
//
// Config: kTokens, kStages, kSplit (at most the steps of K), kCtas (blocks a multiprocessor), kMnMajor (weights run along
// N), kActivation (index of ACTIVATIONS in operands.py), Element, Out, Bias, Addend.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/cluster.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kBlockN = 64, kBlockK = 128;      // weight rows of a tile, K of a stage
constexpr u32 kSpan = 128;                      // bytes of a row of a box, and the swizzle
constexpr u32 kChunk = kSpan / 2;               // elements of 16 bits in it
constexpr u32 kChunks = kBlockK / kChunk;       // boxes of a stage, for weights and for tokens
constexpr u32 kBox = kBlockN * kSpan;           // bytes of one of weights
constexpr u32 kPitch = kBlockN + 4;             // floats from token to token of the result: writes fall into 32 banks
constexpr u32 kMath = 128, kThreads = kMath + 32;  // the warpgroup that multiplies, and the producer's warp
constexpr u32 kParcel = kMath * 16;             // bytes of the sums of 64 weight rows and eight tokens
constexpr u32 kAllThreads = 1, kMathThreads = 2;  // named barriers

// What the epilogue needs beside the sums; c may be d.  A null pointer: not there.  Strides in elements.
template <typename Config> struct Output {
    typename Config::Out* d;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    i64 d_batch, d_row, c_batch, c_row;
    int columns;     // of op(B)
    bool vectors;    // may kWidth results be stored at once?
};

// Where things lie in shared memory.
template <typename Config> struct Layout {
    static constexpr u32 kWeights = kChunks * kBox, kTokenBox = Config::kTokens * kSpan;
    static constexpr u32 kStage = kWeights + kChunks * kTokenBox;
    static constexpr u32 kParcels = Config::kTokens / 8, kShare = (kParcels + Config::kSplit - 1) / Config::kSplit;
    static constexpr u32 kReceived = Config::kStages * kStage;  // [kSplit][kShare] parcels
    static constexpr u32 kResult = kReceived + (Config::kSplit > 1 ? Config::kSplit * kShare * kParcel : 0);
    static constexpr u32 kBarriers = kResult + kShare * 8 * kPitch * sizeof(float);  // after [8 kShare][kPitch] floats
    static_assert(Config::kTokens % 8 == 0 && Config::kTokens <= 64, "tokens are the N of a WGMMA, and fit the registers");
    static_assert(Config::kSplit >= 1 && Config::kSplit <= 16, "a cluster has at most 16 blocks");
    static_assert(Config::kStages >= 2, "a stage may still be multiplied while the next one is");
};

// A cluster takes tiles index, index + clusters, ...; tiles of the same weights follow each other.
template <typename Config> struct Tiles {
    u32 rows, columns, all;  // counts
    struct Corner { u32 row, column, batch; };

    __device__ Tiles(u32 m, u32 n, u32 batches)
        : rows((m + Config::kTokens - 1) / Config::kTokens), columns((n + kBlockN - 1) / kBlockN),
          all(rows * columns * batches) {}

    __device__ Corner corner(u32 tile) const {
        return {tile % rows * Config::kTokens, tile / rows % columns * kBlockN, tile / rows / columns};
    }
};

__device__ inline void load_shared(float (&value)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address)
                 : "memory");
}

// Sends the parcels of tokens below `height` to their owners, each thread its four floats of each parcel.
template <typename Config, u32 kCount>
__device__ inline void send(const float (&sums)[kCount], u32 received, const Barrier& landed, u32 rank, u32 height) {
    using Shape = Layout<Config>;
    const u32 mine = received + rank * Shape::kShare * kParcel + threadIdx.x * 16;
#pragma unroll
    for (u32 p = 0; p < Shape::kParcels; ++p) {
        if (8 * p >= height) break;
        const u32 owner = p / Shape::kShare, slot = p % Shape::kShare;
        const float* const f = sums + 4 * p;
        store_in_cluster(address_in_cluster(mine + slot * kParcel, owner), address_in_cluster(landed.address(), owner),
                         f[0], f[1], f[2], f[3]);
    }
}

// sum = what this thread's peers in block 0, 1, ... sent in slot `slot`, added in this order.
template <typename Config> __device__ inline void add_up(float (&sum)[4], u32 received, u32 slot) {
    constexpr u32 kSplit = Config::kSplit;
    float part[kSplit][4];
#pragma unroll
    for (u32 s = 0; s < kSplit; ++s) {
        load_shared(part[s], received + (s * Layout<Config>::kShare + slot) * kParcel + threadIdx.x * 16);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sum[i] = part[0][i];
#pragma unroll
        for (u32 s = 1; s < kSplit; ++s) sum[i] += part[s][i];
    }
}

// Rounds and stores kWidth neighbouring results, of which `count` exist.
template <typename Out, u32 kWidth>
__device__ inline void store(Out* to, const float (&z)[kWidth], u32 count, bool vectors) {
    if (vectors && count == kWidth) {
        struct alignas(kWidth * sizeof(Out)) Vector { Out values[kWidth]; } vector;
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) vector.values[i] = from_float<Out>(z[i]);
        *reinterpret_cast<Vector*>(to) = vector;
    } else {
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) {
            if (i < count) to[i] = from_float<Out>(z[i]);
        }
    }
}

// act(factor * sum + bias) + c for four columns of one row from `column` on, of which at least one exists.
template <typename Config>
__device__ inline void finish(
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

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::kCtas) few_rows_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, typename Config::Out* d,
    const typename Config::Bias* bias, const typename Config::Addend* c, const float* scale, i64 d_batch, i64 d_row,
    i64 c_batch, i64 c_row, float alpha, int rows, int columns, int depth, int batches, int token_rows, bool vectors) {
    using Shape = Layout<Config>;
    using Element = typename Config::Element;
    constexpr u32 kStages = Config::kStages, kSplit = Config::kSplit, kTokens = Config::kTokens;
    // A block alone on its multiprocessor: one group of WGMMA stays in flight while the next stage is waited for, and two
    // stages are fetched ahead.  With others beside it they fill the pauses, and their rings are too short to give away.
    constexpr bool kAlone = Config::kCtas == 1;
    constexpr u32 kAhead = kAlone ? 2 : 1;
    static_assert(sizeof(Element) == 2, "boxes hold 64 elements of K");

    extern __shared__ __align__(1024) u8 shared[];
    Barrier* const full = reinterpret_cast<Barrier*>(shared + Shape::kBarriers);  // [kStages]
    Barrier* const empty = full + kStages;                                       // [kStages]
    Barrier& received = empty[kStages];  // parcels of all blocks of the cluster lie in ours
    Barrier& taken = empty[kStages + 1];  // and all blocks have read theirs

    const Tiles<Config> tiles(rows, columns, batches);
    const u32 rank = cluster_rank(), first = blockIdx.x / kSplit, clusters = gridDim.x / kSplit;
    const u32 steps = (depth + kBlockK - 1) / kBlockK;  // beyond K the copy engine reads zeros
    const u32 begin = steps * rank / kSplit, end = steps * (rank + 1) / kSplit;  // one step at least: kSplit <= steps

    const bool producer = warp_index() == kMath / 32;
    if (producer && elect_one()) {
        tma_prefetch(weights);
        tma_prefetch(tokens);
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
    if constexpr (kSplit > 1) arrive_at_cluster();
    let_next_kernel_start();
    if (producer && elect_one()) {
        // The first weights come to the L2 while the kernel before this one ends.  Not more of them: 25 % slower.
        const auto at = tiles.corner(first);
        for (u32 step = begin; step < min(end, begin + kAhead); ++step) {
#pragma unroll
            for (u32 chunk = 0; chunk < kChunks; ++chunk) {
                const u32 k = step * kBlockK + chunk * kChunk;
                if constexpr (Config::kMnMajor) tma_fetch(weights, at.column, k, at.batch);
                else tma_fetch(weights, k, at.column, at.batch);
            }
        }
    }
    __syncwarp();
    wait_for_previous_kernel();

    if (producer) {
        if constexpr (kSplit == 1) arrive_at(kAllThreads, kThreads);
        if (elect_one()) {
            Ring<kStages> ring;
            for (u32 tile = first; tile < tiles.all; tile += clusters) {
                const auto at = tiles.corner(tile);
                for (u32 step = begin; step < end; ++step, ring.advance()) {
                    u8* const stage = shared + ring.stage * Shape::kStage;
                    Barrier& landed = full[ring.stage];
                    empty[ring.stage].wait(ring.parity ^ 1);
                    landed.expect(Shape::kWeights + kChunks * token_rows * kSpan);  // a box at an edge counts in full
#pragma unroll
                    for (u32 chunk = 0; chunk < kChunks; ++chunk) {
                        const u32 k = step * kBlockK + chunk * kChunk;
                        u8* const to = stage + chunk * kBox;
                        if constexpr (Config::kMnMajor) {
                            tma_load(to, weights, landed, at.column, k, at.batch, Keep::NotAtAll);
                        } else {
                            tma_load(to, weights, landed, k, at.column, at.batch, Keep::NotAtAll);
                        }
                        tma_load(stage + Shape::kWeights + chunk * Shape::kTokenBox, tokens, landed, k, at.row, at.batch,
                                 Keep::Longest);
                    }
                }
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) wait_for_cluster();  // long over, but a wait belongs to each arrival
        return;
    }
    if constexpr (kSplit == 1) {
        sync_threads(kAllThreads, kThreads);
    } else {
        wait_for_cluster();
    }

    const u32 parcels = shared_address(shared + Shape::kReceived);
    float* const result = reinterpret_cast<float*>(shared + Shape::kResult);
    const u32 first_token = rank * Shape::kShare * 8;  // of those that this block owns
    const u32 row_of_thread = threadIdx.x / 16, column_of_thread = threadIdx.x % 16 * 4;  // in the epilogue
    const float factor = scale == nullptr ? alpha : alpha * *scale;
    const Output<Config> out{d, bias, c, d_batch, d_row, c_batch, c_row, columns, vectors};

    Ring<kStages> ring;
    u32 parity = 0;  // of `received` and `taken`, which go through one phase a tile
    for (u32 tile = first; tile < tiles.all; tile += clusters, parity ^= 1) {
        const auto at = tiles.corner(tile);
        const u32 column = at.column + column_of_thread;
        float shift[4];  // the bias, asked for long before it is needed
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            shift[i] = bias != nullptr && column + i < u32(columns) ? to_float(bias[column + i]) : 0;
        }

        const u32 height = min(kTokens, u32(rows) - at.row);
        const u32 own_tokens = height > first_token ? min(height - first_token, Shape::kShare * 8) : 0;
        if (kSplit > 1 && threadIdx.x == 0) received.expect((own_tokens + 7) / 8 * kSplit * kParcel);

        float sums[kTokens / 2];
        u32 last = 0;  // the stage of the step before
        for (u32 step = begin; step < end; ++step, ring.advance()) {
            const u8* const stage = shared + ring.stage * Shape::kStage;
            full[ring.stage].wait(ring.parity);
            wgmma_fence();
#pragma unroll
            for (u32 chunk = 0; chunk < kChunks; ++chunk) {
                const u64 a = wgmma_descriptor<kSpan>(stage + chunk * kBox, 8 * kSpan, kBox);
                const u64 b = wgmma_descriptor<kSpan>(stage + Shape::kWeights + chunk * Shape::kTokenBox);
#pragma unroll
                for (u32 k = 0; k < kChunk / kWgmmaK<Element>; ++k) {
                    // 16 of K are 32 bytes of a row, or, where rows are K, 16 rows of 128 bytes
                    constexpr u32 kAdvance = Config::kMnMajor ? 16 * kSpan : kWgmmaKBytes;
                    wgmma<kTokens, Element, Config::kMnMajor ? Major::Mn : Major::K>(
                        sums, wgmma_advance(a, k * kAdvance), wgmma_advance(b, k * kWgmmaKBytes),
                        step > begin || chunk > 0 || k > 0);
                }
            }
            wgmma_commit();
            if constexpr (kAlone) {
                wgmma_wait<1>();  // the step before this one has read its stage
                if (step > begin && lane_index() == 0) empty[last].arrive();
                last = ring.stage;
            } else {
                wgmma_wait<0>(sums);
                if (lane_index() == 0) empty[ring.stage].arrive();
            }
        }
        if constexpr (kAlone) {
            wgmma_wait<0>(sums);
            if (lane_index() == 0) empty[last].arrive();
        }

        // Sums of all of K, for this block's tokens: own[4 p + 2 h + e] as in epilogue.cuh, with weights for its rows.
        float own[4 * Shape::kShare];
        if constexpr (kSplit == 1) {
#pragma unroll
            for (u32 i = 0; i < kTokens / 2; ++i) own[i] = sums[i];
        } else {
            wait_in_cluster(taken, parity ^ 1);  // parcels of the tile before
            send<Config>(sums, parcels, received, rank, height);
            wait_in_cluster(received, parity);
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
        sync_threads(kMathThreads, kMath);  // the tile before has been written
#pragma unroll
        for (u32 i = 0; i < 4 * Shape::kShare; ++i) {
            const u32 token = i / 4 * 8 + fragment_column() + i % 2, weight = fragment_row() + i % 4 / 2 * 8;
            if (token < own_tokens) result[token * kPitch + weight] = own[i];
        }
        sync_threads(kMathThreads, kMath);
        // Parcels have been read.  Nobody waits for the last word of this, and a block that has ended could not hear it.
        if (kSplit > 1 && tile + clusters < tiles.all && threadIdx.x < kSplit) taken.free_in_cluster(threadIdx.x);
        for (u32 token = row_of_thread; token < own_tokens; token += 8) {
            float sum[4];
            load_shared(sum, shared_address(result + token * kPitch + column_of_thread));
            if (column < u32(columns)) finish(sum, shift, factor, out, at.batch, at.row + first_token + token, column);
        }
    }
}

}  // namespace tilewright
