// D = act(alpha * A B + bias) + C for A (batches, M, K) and B (batches, K, N) of any majors: a persistent Hopper GEMM.
//
// One block a multiprocessor takes tiles of kBlockM x kBlockN from its scheduler.  One thread of the last warpgroup, the
// producer, keeps a ring of kStages stages (128 bytes of K each) filled.  One or two math warpgroups multiply, each its own
// rows, and store their rows of D through shared memory that the ring never touches, so that loads of the next tile overlap
// stores of the last one.  The warpgroups share nothing but the ring, and drift apart: while one is in its epilogue, the
// other keeps the tensor cores busy.
//
// The two blocks of a cluster share a tile of B (kClusterM = 2: adjacent rows) or of A (kClusterN = 2): each loads half and
// multicasts it to both.  A stage is free when the warpgroups of both have read it.  A cluster takes pairs of tiles, so that
// both blocks run the same number of k blocks; a block whose tile lies outside of D multiplies zeros and writes nothing.
//
// kSplitK > 1: so many blocks, or pairs of blocks, of a cluster split the K of a tile, and add their accumulators through the
// ring (dense_parts/split_k.cuh).  For products with few tiles: a block has as little to do before the exchange as there are blocks.
//
// The scheduler (tile_scheduler.cuh) turns this into three kernels: batches of products; groups of A's rows, each with its own B;
// groups of K, each with its own D.
//
// Config: kBlockM, kBlockN, kStages, kClusterM, kClusterN, kSplitK; kTrim (boxes of box_m rows of A, none outside); kPrefetch (of
// the first of B); kGemmType; kMajorA, kMajorB (0: K, 1: M or N); kActivation; kBias; kAddend (elements of C a load takes: 0 no C,
// 1, 2); kAccumulate (C is D); kHalves (columns of B come from its halves in turn, map_b is (rows, 2, K));
// Element, Out, Bias, Addend (types of A and B, D, bias, C).
#pragma once

#include <tilewright/tile_epilogue.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

#include "dense_parts/prefetch.cuh"
#include "dense_parts/split_k.cuh"

namespace tilewright {

template <typename Config> struct GemmShape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages;
    static constexpr u32 kShare = Config::kClusterM * Config::kClusterN, kSplitK = Config::kSplitK;
    static constexpr u32 kCluster = kShare * kSplitK;
    static constexpr Major kMajorA = Major(Config::kMajorA), kMajorB = Major(Config::kMajorB);
    using A = Operand<Element, kMajorA, kM, Config::kClusterN>;
    using B = Operand<Element, kMajorB, kN, Config::kClusterM>;
    static constexpr u32 kMathWarpgroups = kM > 64 ? 2 : 1;
    static constexpr u32 kThreads = 128 * (kMathWarpgroups + 1);  // the last warpgroup is the producer's
    static_assert(kM == 64 || kM == 128, "one or two warpgroups of 64 rows");
    static_assert(kN % 16 == 0 && kN <= 256, "128 accumulators a thread");
    using Split = SplitK<kSplitK, kShare, kMathWarpgroups, kN>;
    static_assert(kShare == 1 || kShare == 2, "pairs of blocks share one operand");
    static_assert(kSplitK == 1 || Split::kBytes <= kStages * (A::kBytes + B::kBytes), "parcels lie in the ring");
    static_assert(kSplitK == 1 || !Config::kAccumulate, "a split product takes D as C");
};

template <typename Config>
__global__ void __launch_bounds__(GemmShape<Config>::kThreads, 1) sm90_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const typename Config::Bias* bias, const typename Config::Addend* c,
    const float* scale, float alpha, i64 c_pitch, i64 c_batch, typename Config::Out* d, i64 d_pitch, i64 d_batch,
    const int* starts, const int* ends, bool masked, int m, int n, int k, int batches, int group_m,
    int box_m) {
    using Shape = GemmShape<Config>;
    using Epilogue = TileEpilogue<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    constexpr u32 kStages = Shape::kStages, kMathWarpgroups = Shape::kMathWarpgroups;
    constexpr u32 kCluster = Shape::kCluster, kShare = Shape::kShare, kSplitK = Shape::kSplitK;
    constexpr GemmType kGemmType = GemmType(Config::kGemmType);
    constexpr bool kTrim = Config::kTrim;
    static_assert((!kTrim && !Config::kPrefetch) || kGemmType == GemmType::Dense, "the first tile of groups is unknown");

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, then kStages of B, then buffers of D, unless K is split
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    __shared__ Barrier full[kStages], empty[kStages];
    __shared__ typename TileScheduler<Config>::Table table;
    __shared__ typename Shape::Split::Barriers split_barriers;

    // Initialize the barriers
    const u32 warpgroup = warp_index() / 4;
    const u32 rank = kCluster == 1 ? 0 : cluster_rank();
    const u32 share = kSplitK == 1 ? rank : rank % kShare, first_sharer = kSplitK == 1 ? 0 : rank - share;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(4 * kMathWarpgroups * kShare);  // one arrival a warp that reads
        }
        if constexpr (kSplitK > 1) split_barriers.init();
        fence_barrier_init();
    }
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else if constexpr (kSplitK == 1) {
        cluster_sync();  // no block may arrive at a barrier that is not initialized yet
    } else {
        Shape::Split::meet();
    }
    if constexpr (Config::kPrefetch) {
        if (warp_index() == 4 * kMathWarpgroups && elect_one()) {
            const SchedulerArgs args{u32(m), u32(n), u32(k), u32(batches), u32(group_m), nullptr, nullptr, false};
            prefetch_first_b<TileScheduler<Config>, B>(map_b, args, table, rank, share);
        }
        __syncwarp();
    }
    griddepcontrol_wait();
    launch_dependents();

    // Each warp schedules the same tiles for itself
    const SchedulerArgs args{u32(m), u32(n), u32(k), u32(batches), u32(group_m), starts, ends, masked};
    TileScheduler<Config>::prepare(args, table);
    TileScheduler<Config> scheduler(args, table, rank);
    Ring<kStages> ring;

    if (warpgroup == kMathWarpgroups) {
        warpgroup_reg_dealloc<40>();
        if (warp_index() == 4 * kMathWarpgroups && elect_one()) {
            tma_prefetch_descriptor(map_a), tma_prefetch_descriptor(map_b), tma_prefetch_descriptor(map_d);
            u32 parity = 0;
            for (Tile tile; scheduler.next(tile); parity ^= 1) {
                if constexpr (kSplitK > 1) split_barriers.read.wait(parity ^ 1);  // the parcels of the last tile
                u32 bytes_a = A::kBytes;
                if constexpr (kTrim) bytes_a = A::bytes_of_rows(tile.row, tile.row_end, box_m);
                for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                    // Wait until the consumers have released the stage
                    const u32 stage = ring.stage, k_idx = tile.k + k_block * A::kBlockK;  // beyond K come zeros
                    empty[stage].wait(ring.parity ^ 1);

                    // Issue the TMA loads of A and B
                    full[stage].arrive_and_expect_tx(bytes_a + B::kBytes);  // both halves of a shared operand
                    if constexpr (kTrim) {
                        A::load_rows(stages_a + stage * A::kBytes, map_a, full[stage], tile.row, tile.row_end, box_m, k_idx,
                                     tile.batch_a, share, first_sharer);
                    } else {
                        A::load(stages_a + stage * A::kBytes, map_a, full[stage], tile.row, k_idx, tile.batch_a, share,
                                first_sharer);
                    }
                    if constexpr (Config::kHalves) {
                        B::load_halves(stages_b + stage * B::kBytes, map_b, full[stage], tile.batch_b * u32(n) + tile.column / 2,
                                       k_idx, share, first_sharer);
                    } else {
                        B::load(stages_b + stage * B::kBytes, map_b, full[stage], tile.column, k_idx, tile.batch_b, share,
                                first_sharer);
                    }
                }
            }
        }
    } else {
        warpgroup_reg_alloc<kMathWarpgroups == 2 ? 232 : 240>();
        const u32 first_row = warpgroup * 64;  // of this warpgroup in the tile
        const u64 first_a = A::descriptor(stages_a + first_row * kSpan), first_b = B::descriptor(stages_b);
        const auto release = [&](u32 stage) {  // in every block of the cluster that loads it
            if constexpr (kShare == 1) {
                if (lane_index() == 0) empty[stage].arrive();
            } else {
                if (lane_index() < kShare) empty[stage].arrive_remote_after_reads(first_sharer + lane_index());
            }
        };
        Epilogue epilogue{map_d,   bias,    c, scale == nullptr ? alpha : alpha * *scale,
                          c_pitch, c_batch, u32(m), u32(n), u32(Epilogue::kGated ? n / 2 : n),
                          buffers + warpgroup * kTileBuffers * kBoxBytes, 1 + warpgroup, d, d_pitch, d_batch};
        typename Shape::Split split{split_barriers, stages_a, rank, warpgroup};
        const SplitOutput<Config> output{{d, bias, c, d_batch, d_pitch, c_batch, c_pitch, n, true}, u32(m)};

        for (Tile tile; scheduler.next(tile);) {
            TilePart part;
            if constexpr (kSplitK > 1) part = split.announce(tile.row + first_row, tile.column, u32(m), u32(n));
            if (kGemmType == GemmType::GroupedM && tile.row + first_row >= tile.row_end) {
                // None of these rows belongs to the group: release the stages unread
                for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                    full[ring.stage].wait(ring.parity);
                    release(ring.stage);
                }
                continue;
            }
            float acc[Shape::kN / 2];
            if constexpr (kGemmType == GemmType::GroupedK) {  // the K of this D may be empty
#pragma unroll
                for (u32 i = 0; i < Shape::kN / 2; ++i) acc[i] = 0;
            }
            u32 last_stage = 0;
            for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                // Wait for the stage
                full[ring.stage].wait(ring.parity);
                if (kGemmType == GemmType::GroupedK && k_block + 1 == tile.k_blocks && tile.k_tail < A::kBlockK) {
                    // The rest of the stage is K of the next group, perhaps NaN: clear it in both operands.  Each warpgroup
                    // clears all of B: if they shared the work they would have to meet, and would no longer take turns
                    A::clear(stages_a + ring.stage * A::kBytes, tile.k_tail, first_row, 64, threadIdx.x % 128, 128);
                    B::clear(stages_b + ring.stage * B::kBytes, tile.k_tail, 0, Shape::kN, threadIdx.x % 128, 128);
                    fence_proxy_async_shared();
                    named_barrier_sync(1 + warpgroup, 128);
                }

                // Issue and commit the WGMMAs of the stage
                const u64 desc_a = wgmma_advance(first_a, ring.stage * A::kBytes);
                const u64 desc_b = wgmma_advance(first_b, ring.stage * B::kBytes);
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < A::kBlockK / kWgmmaK<Element>; ++i) {
                    wgmma<Shape::kN, Element, Shape::kMajorA, Shape::kMajorB>(
                        acc, wgmma_advance(desc_a, i * A::kAdvance), wgmma_advance(desc_b, i * B::kAdvance),
                        k_block > 0 || i > 0);
                }
                wgmma_commit();

                // Release the previous stage: its WGMMAs have read it
                wgmma_wait<1>();
                if (k_block > 0) release(last_stage);
                last_stage = ring.stage;
            }
            wgmma_wait<0>(acc);
            if (kGemmType != GemmType::GroupedK || tile.k_blocks > 0) release(last_stage);

            // Epilogue: convert and store D
            if constexpr (kSplitK == 1) {
                epilogue.write(acc, tile.row + first_row, tile.column, tile.batch_d, tile.row_end);
            } else {
                split.reduce(acc, part, [&](const float (&sum)[4], u32 row, u32 column) {
                    output.write(sum, epilogue.alpha, tile.batch_d, tile.row + first_row + row, tile.column + column);
                });
            }
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
    if constexpr (kShare > 1) cluster_sync();  // a block must outlive the arrivals of the other
}

}  // namespace tilewright
