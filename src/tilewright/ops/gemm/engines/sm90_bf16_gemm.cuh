// D = act(alpha * A B + bias) + C for A (batches, M, K) and B (batches, K, N) of any majors: a Hopper GEMM that stays on the
// machine.
//
// One block a multiprocessor walks over tiles of kBlockM x kBlockN.  One thread of the last warpgroup, the producer, keeps
// a ring of kStages stages (128 bytes of K each) filled; one or two warpgroups multiply, each its own rows, and write
// their rows of D through shared memory that the ring never touches, so that loads of the next tile and stores of the
// last one go on meanwhile.  The two share nothing but the ring, and drift apart: while one is in its epilogue, the other
// keeps the tensor cores busy.
//
// Two blocks of a cluster share a tile of B (kClusterM = 2: rows side by side) or of A (kClusterN = 2): each loads half and
// multicasts it to both.  A stage is free when the warpgroups of both have read it.  A cluster walks over pairs of tiles, so
// both blocks take the same number of steps; one whose tile lies outside multiplies zeros and writes nothing.
//
// The walk (tile_scheduler.cuh) makes three kernels of it: batches of products; groups of A's rows, each with its own B; groups
// of K, each with its own D.
//
// Config: kBlockM, kBlockN, kStages, kClusterM, kClusterN; kWalk; kMajorA, kMajorB (0: K, 1: M or N); kActivation; kBias;
// kAddend (elements of C a load takes: 0 no C, 1, 2); kInto (C is D); Element, Out, Bias, Addend (types of A and B, D, bias,
// C).
#pragma once

#include <tilewright/tile_epilogue.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

namespace tilewright {

template <typename Config> struct GemmShape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages;
    static constexpr u32 kCluster = Config::kClusterM * Config::kClusterN;
    static constexpr Major kMajorA = Major(Config::kMajorA), kMajorB = Major(Config::kMajorB);
    using A = Operand<Element, kMajorA, kM, Config::kClusterN>;
    using B = Operand<Element, kMajorB, kN, Config::kClusterM>;
    static constexpr u32 kGroups = kM > 64 ? 2 : 1;          // warpgroups that multiply
    static constexpr u32 kThreads = 128 * (kGroups + 1);     // and the producer's
    static_assert(kM == 64 || kM == 128, "one or two warpgroups of 64 rows");
    static_assert(kN % 16 == 0 && kN <= 256, "128 accumulators a thread");
    static_assert(kCluster == 1 || kCluster == 2, "pairs of blocks share one operand");
};

template <typename Config>
__global__ void __launch_bounds__(GemmShape<Config>::kThreads, 1) sm90_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const typename Config::Bias* bias, const typename Config::Addend* c,
    const float* scale, float alpha, i64 c_pitch, i64 c_batch, typename Config::Out* d, i64 d_pitch, i64 d_batch,
    const int* starts, const int* ends, bool apart, int m, int n, int k, int batches, int band) {
    using Shape = GemmShape<Config>;
    using Epilogue = TileEpilogue<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    constexpr u32 kStages = Shape::kStages, kGroups = Shape::kGroups, kCluster = Shape::kCluster;
    constexpr GemmType kWalk = GemmType(Config::kWalk);

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, then kStages of B, then buffers of D
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    __shared__ Barrier full[kStages], empty[kStages];
    __shared__ typename TileScheduler<Config>::Table table;

    const u32 group = warp_index() / 4;
    const u32 rank = kCluster == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(4 * kGroups * kCluster);  // one arrival a warp that reads
        }
        fence_barrier_init();
    }
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        cluster_sync();  // nobody may arrive at a barrier that is not there yet
    }
    griddepcontrol_wait();
    launch_dependents();

    const SchedulerArgs args{u32(m), u32(n), u32(k), u32(batches), u32(band), starts, ends, apart};
    TileScheduler<Config>::prepare(args, table);
    TileScheduler<Config> walk(args, table, rank);
    Ring<kStages> ring;

    if (group == kGroups) {
        warpgroup_reg_dealloc<40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch_descriptor(map_a), tma_prefetch_descriptor(map_b), tma_prefetch_descriptor(map_d);
            for (Tile tile; walk.next(tile);) {
                for (u32 step = 0; step < tile.k_blocks; ++step, ring.advance()) {
                    const u32 s = ring.stage, at = tile.k + step * A::kBlockK;  // beyond K come zeros
                    empty[s].wait(ring.parity ^ 1);
                    full[s].arrive_and_expect_tx(A::kBytes + B::kBytes);  // both halves of what is shared
                    A::load(stages_a + s * A::kBytes, map_a, full[s], tile.row, at, tile.batch_a, rank);
                    B::load(stages_b + s * B::kBytes, map_b, full[s], tile.column, at, tile.batch_b, rank);
                }
            }
        }
    } else {
        warpgroup_reg_alloc<kGroups == 2 ? 232 : 240>();
        const u32 first_row = group * 64;  // in the tile
        const u64 first_a = A::descriptor(stages_a + first_row * kSpan), first_b = B::descriptor(stages_b);
        const auto release = [&](u32 stage) {  // in every block that loads it
            if constexpr (kCluster == 1) {
                if (lane_index() == 0) empty[stage].arrive();
            } else {
                if (lane_index() < kCluster) empty[stage].arrive_remote_after_reads(lane_index());
            }
        };
        Epilogue epilogue{map_d,   bias,    c, scale == nullptr ? alpha : alpha * *scale,
                          c_pitch, c_batch, u32(m), u32(n), u32(Epilogue::kGated ? n / 2 : n),
                          buffers + group * kTileBuffers * kBoxBytes, 1 + group, d, d_pitch, d_batch};

        for (Tile tile; walk.next(tile);) {
            if (kWalk == GemmType::GroupedM && tile.row + first_row >= tile.row_end) {  // none of these rows is ours
                for (u32 step = 0; step < tile.k_blocks; ++step, ring.advance()) {
                    full[ring.stage].wait(ring.parity);
                    release(ring.stage);
                }
                continue;
            }
            float sums[Shape::kN / 2];
            if constexpr (kWalk == GemmType::GroupedK) {  // of a group that may have no K
#pragma unroll
                for (u32 i = 0; i < Shape::kN / 2; ++i) sums[i] = 0;
            }
            u32 last = 0;
            for (u32 step = 0; step < tile.k_blocks; ++step, ring.advance()) {
                full[ring.stage].wait(ring.parity);
                if (kWalk == GemmType::GroupedK && step + 1 == tile.k_blocks && tile.k_tail < A::kBlockK) {
                    // What follows is K of the next group, perhaps NaN, in both operands.  Both warpgroups clear all of B:
                    // were they to share the work and meet, they would no longer take turns
                    A::clear(stages_a + ring.stage * A::kBytes, tile.k_tail, first_row, 64, threadIdx.x % 128, 128);
                    B::clear(stages_b + ring.stage * B::kBytes, tile.k_tail, 0, Shape::kN, threadIdx.x % 128, 128);
                    fence_proxy_async_shared();
                    named_barrier_sync(1 + group, 128);
                }
                const u64 a = wgmma_advance(first_a, ring.stage * A::kBytes);
                const u64 b = wgmma_advance(first_b, ring.stage * B::kBytes);
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < A::kBlockK / kWgmmaK<Element>; ++i) {
                    wgmma<Shape::kN, Element, Shape::kMajorA, Shape::kMajorB>(
                        sums, wgmma_advance(a, i * A::kAdvance), wgmma_advance(b, i * B::kAdvance), step > 0 || i > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the step before this one has read its stage
                if (step > 0) release(last);
                last = ring.stage;
            }
            wgmma_wait<0>(sums);
            if (kWalk != GemmType::GroupedK || tile.k_blocks > 0) release(last);
            epilogue.write(sums, tile.row + first_row, tile.column, tile.batch_d, tile.row_end);
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
    if constexpr (kCluster > 1) cluster_sync();  // and this block the arrivals of the other
}

}  // namespace tilewright
