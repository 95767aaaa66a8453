// D = act(alpha * A B + bias) + C: a persistent Hopper GEMM for e4m3 operands along K with scales (fp8_scales.cuh).  Every
// 128 of K are promoted to float32 accumulators.  D may be e4m3 with scales (fp8_epilogue.cuh).
//
// Blocks, ring and tile schedulers are those of dense.cuh.  A stage also holds its scales, so that one barrier
// covers all.  The main loop differs: it multiplies a k block of 128 into acc_tmp with four WGMMAs that begin from zero,
// waits for them, and promotes: acc += scale * acc_tmp.  Meanwhile the tensor cores have the WGMMAs of the other warpgroup.
// Registers have room for two accumulators besides acc_tmp, so tiles of 256 columns take two passes of 128, and tiles of 256
// rows two waves of 64 rows a warpgroup.
//
// The tensor cores idle between the last FFMA of a k block and the first WGMMA of the next.  So the loop is unrolled, which
// lets it test the barrier of the next stage while it promotes this one (10 to 19 % at K of 7168 and more); the descriptors
// of the next stage are 32-bit sums computed early; and scales are read and joined while the WGMMAs run.
// K blocks take 1.04 to 1.09 times the cycles of their WGMMAs in tiles of 192x128, 1.11 to 1.15 in 256x128 (H200, long K);
// 256x128 has fewer tiles to begin and end.
//
// Pairs of blocks that share an operand took 1 to 12 % more time at 4096 rows.  With kSplitK > 1 they have as much work with
// half the copies out of the L2, which bound products of few rows.
//
// Config: kBlockM, kBlockN, kStages, kClusterM, kClusterN, kSplitK, kTrim, kPrefetch (see dense.cuh); kScaling; kGemmType; kActivation; kBias; kAddend; kAccumulate;
// Element (float8_e4m3), Out (float8_e4m3: D has scales), Bias, Addend.  See tile_epilogue.cuh for the rest.
#pragma once

#include <tilewright/fp8_epilogue.cuh>
#include <tilewright/fp8_scales.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

#include "dense_parts/prefetch.cuh"
#include "dense_parts/split_k.cuh"

namespace tilewright {

template <bool kCondition, typename A, typename B> struct Conditional { using Type = A; };
template <typename A, typename B> struct Conditional<false, A, B> { using Type = B; };

template <typename Config> struct Fp8Shape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages;
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    static constexpr u32 kShare = Config::kClusterM * Config::kClusterN, kSplitK = Config::kSplitK;
    static constexpr u32 kCluster = kShare * kSplitK;
    using A = Operand<Element, Major::K, kM, Config::kClusterN>;
    using B = Operand<Element, Major::K, kN, Config::kClusterM>;
    static constexpr u32 kWaves = kM > 192 ? 2 : 1;       // of 64 rows a warpgroup
    static constexpr u32 kMathWarpgroups = kM / 64 / kWaves;
    static constexpr u32 kThreads = 128 * (kMathWarpgroups + 1);  // the last warpgroup is the producer's
    static constexpr u32 kPasses = kN > 192 ? 2 : 1, kColumns = kN / kPasses, kParts = kWaves * kPasses;
    static constexpr u32 kBoxes = kWaves * ((kN + 63) / 64), kBuffers = kBoxes < 4 ? kBoxes : 4;  // of D, a warpgroup
    using Scales = StageScales<kScaling, kM, kN, GemmType(Config::kGemmType) == GemmType::GroupedM>;
    // With one scale a column every element of acc_tmp has its own factor: registers have room for them only with one acc,
    // and for the scales of columns, which both waves use, in tiles of two waves
    static constexpr bool kEarlyFactors = Scales::kByToken && kParts == 1 && kColumns <= 128 && kMathWarpgroups < 3;
    static constexpr bool kColumnScales = Scales::kByToken && kWaves == 2;
    // Registers come from the producer, which needs its own to trim boxes.  A loop unrolled further would spill
    static constexpr bool kMostRegisters = kColumnScales && (kN > 112 || (kN > 96 && !Config::kTrim));
    static constexpr u32 kUnroll = !kColumnScales || kN <= 96 ? 4 : kN <= 112 ? (Config::kTrim ? 2 : 4) : Config::kAddend > 0 ? 1 : 2;
    static constexpr u32 kBlocks = kPasses > 1 ? 1 : Scales::kBlocks;  // 128-column blocks that a pass may touch
    static constexpr u32 kColumnGroups = kPasses > 1 ? 1 : kN / Scales::kGroupColumns;  // of columns that share a block
    static constexpr bool kQuantises = Same<typename Config::Out, float8_e4m3>::value;
    using Epilogue = Fp8Epilogue<Config, Fp8Shape, kQuantises>;
    using DirectOut = typename Conditional<kQuantises, float, typename Config::Out>::Type;
    using Split = SplitK<kSplitK, kShare, kMathWarpgroups, kN>;
    static_assert(Same<Element, float8_e4m3>::value, "operands are e4m3");
    static_assert(kShare == 1 || kShare == 2, "pairs of blocks share one operand");
    static_assert(kSplitK == 1 || Split::kBytes <= kStages * (A::kBytes + B::kBytes), "parcels lie in the ring");
    static_assert(kSplitK == 1 || (kWaves == 1 && !kQuantises && !Config::kAccumulate), "a split product has D or C");
    static_assert(kM == 64 || kM == 128 || kM == 192 || kM == 256, "one to three warpgroups, or two of two waves");
    static_assert(kN % 16 == 0 && kColumns % 16 == 0, "columns of a WGMMA");
    static_assert((kParts + 1) * kColumns <= (kMathWarpgroups == 3 ? 2 : 3) * 128, "accumulators a thread: 192, or 128");
};

template <typename Config>
__global__ void __launch_bounds__(Fp8Shape<Config>::kThreads, 1) sm90_fp8_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_scale_a,
    const __grid_constant__ TensorMap map_scale_b, const float* scale_a, i64 scale_a_batch, const float* scale_b,
    i64 scale_b_pitch, i64 scale_b_batch, const typename Config::Bias* bias, const typename Config::Addend* c, float alpha,
    i64 c_pitch, i64 c_batch, typename Fp8Shape<Config>::DirectOut* direct, i64 direct_pitch, i64 direct_batch,
    const int* starts, const int* ends, bool masked, int m, int n, int k, int batches, int group_m,
    int box_m) {
    using Shape = Fp8Shape<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    using Scales = typename Shape::Scales;
    constexpr u32 kStages = Shape::kStages, kMathWarpgroups = Shape::kMathWarpgroups;
    constexpr u32 kCluster = Shape::kCluster, kShare = Shape::kShare, kSplitK = Shape::kSplitK;
    constexpr u32 kWaves = Shape::kWaves, kPasses = Shape::kPasses, kParts = Shape::kParts;
    constexpr u32 kColumns = Shape::kColumns, kCount = kColumns / 2, kWaveRows = 64 * kMathWarpgroups;
    constexpr Scaling kScaling = Shape::kScaling;
    constexpr GemmType kGemmType = GemmType(Config::kGemmType);
    constexpr bool kTrim = Config::kTrim;
    constexpr bool kCutWaves = kGemmType == GemmType::GroupedM && kWaves == 2 && Scales::kByBlock;
    static_assert((!kTrim && !Config::kPrefetch) || kGemmType == GemmType::Dense, "the first tile of groups is unknown");

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, of B, buffers of D (unless split), scales
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    u8* const stages_s = buffers + (kSplitK == 1 ? kMathWarpgroups * Shape::kBuffers * kBoxBytes : 0);
    __shared__ Barrier full[kStages], empty[kStages];
    using Scheduler = TileScheduler<Config>;
    __shared__ typename Scheduler::Table table;
    __shared__ typename Shape::Split::Barriers split_barriers;

    // Initialize the barriers
    const u32 warpgroup = warp_index() / 4;
    const u32 rank = kCluster == 1 ? 0 : cluster_rank();
    const u32 share = kSplitK == 1 ? rank : rank % kShare, first_sharer = kSplitK == 1 ? 0 : rank - share;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1 + Scales::kArrivals);
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
            prefetch_first_b<Scheduler, B>(map_b, args, table, rank, share);
        }
        __syncwarp();
    }
    griddepcontrol_wait();
    launch_dependents();

    // Each warp schedules the same tiles for itself
    const SchedulerArgs args{u32(m), u32(n), u32(k), u32(batches), u32(group_m), starts, ends, masked};
    Scheduler::prepare(args, table);
    Scheduler scheduler(args, table, rank);
    Tile tile;
    Ring<kStages> ring;

    if (warpgroup == kMathWarpgroups) {
        warpgroup_reg_dealloc<kMathWarpgroups == 3 ? 32 : Shape::kMostRegisters ? 24 : 40>();
        if (warp_index() == 4 * kMathWarpgroups && elect_one()) {
            tma_prefetch_descriptor(map_a), tma_prefetch_descriptor(map_b), tma_prefetch_descriptor(map_d);
            if constexpr (Scales::kAlongK) tma_prefetch_descriptor(map_scale_a);
            if constexpr (Scales::kByToken) tma_prefetch_descriptor(map_scale_b);
            for (u32 parity = 0; scheduler.next(tile); parity ^= 1) {
                if constexpr (kSplitK > 1) split_barriers.read.wait(parity ^ 1);  // the parcels of the last tile
                u32 bytes_a = A::kBytes;
                if constexpr (kTrim) bytes_a = A::bytes_of_rows(tile.row, tile.row_end, box_m);
                for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                    // Wait until the consumers have released the stage
                    const u32 stage = ring.stage, k_idx = tile.k + k_block * A::kBlockK;  // beyond K come zeros
                    empty[stage].wait(ring.parity ^ 1);

                    // Issue the TMA loads of A, B and their scales
                    full[stage].arrive_and_expect_tx(bytes_a + B::kBytes + Scales::kTxBytes);
                    if constexpr (kTrim) {
                        A::load_rows(stages_a + stage * A::kBytes, map_a, full[stage], tile.row, tile.row_end, box_m, k_idx,
                                     tile.batch_a, share, first_sharer);
                    } else {
                        A::load(stages_a + stage * A::kBytes, map_a, full[stage], tile.row, k_idx, tile.batch_a, share,
                                first_sharer);
                    }
                    B::load(stages_b + stage * B::kBytes, map_b, full[stage], tile.column, k_idx, tile.batch_b, share,
                            first_sharer);
                    Scales::load(stages_s + stage * Scales::kBytes, full[stage], map_scale_a, map_scale_b,
                                 scale_b + tile.batch_b * scale_b_batch, scale_b_pitch, tile.row, tile.column, k_idx / 128,
                                 tile.batch_a, tile.batch_b, u32(n));
                }
            }
        }
    } else {
        warpgroup_reg_alloc<kMathWarpgroups == 3 ? 160 : Shape::kMostRegisters ? 240 : kMathWarpgroups == 2 ? 232 : 248>();
        const u32 first_row = warpgroup * 64;  // of this warpgroup in a wave
        // In uniform registers: otherwise each k block recomputes it from addresses before its first WGMMA
        const auto uniform = [](u32 value) { return __shfl_sync(~0u, value, 0); };
        const u64 descriptor_a = A::descriptor(stages_a + first_row * kSpan), descriptor_b = B::descriptor(stages_b);
        // Only the low words of descriptors advance: 64-bit additions would wait for a carry before each WGMMA
        const u32 first_a = uniform(u32(descriptor_a)), first_b = uniform(u32(descriptor_b));
        const auto operand = [](u64 descriptor, u32 low, u32 bytes) { return descriptor >> 32 << 32 | (low + (bytes >> 4)); };
        struct Stage { u32 index, desc_a, desc_b; };
        const auto make_stage = [&](u32 index) {
            Stage stage{index, first_a + index * (A::kBytes >> 4), first_b + index * (B::kBytes >> 4)};
            asm volatile("" : "+r"(stage.desc_a), "+r"(stage.desc_b));  // keeps ptxas from sinking them to their first use
            return stage;
        };
        // __syncwarp orders the other lanes' reads before lane 0's arrival, and so before the copies that the producer issues
        // after it has seen all arrivals.
        const auto release = [&](u32 stage) {
            __syncwarp();
            if constexpr (kShare == 1) {
                if (lane_index() == 0) empty[stage].arrive();
            } else {
                if (lane_index() < kShare) empty[stage].arrive_remote_after_reads(first_sharer + lane_index());
            }
        };

        // Lane 0, which will arrive at the barrier, reads for its warp what cp_async_zfill() wrote.  racecheck orders that
        // kind of copy after an arrival only for reads of the arriving thread itself, not for those before __syncwarp.
        const auto read_by_arriving_lane = [](const float* smem) {
            float value = 0;
            if (lane_index() == 0) value = *smem;
            return __shfl_sync(~0u, value, 0);
        };

        u8* const d_buffers = buffers + warpgroup * Shape::kBuffers * kBoxBytes;
        typename Shape::Epilogue epilogue({map_d, bias, c, c_pitch, c_batch, direct, direct_pitch, direct_batch, u32(m),
                                           u32(n), d_buffers, 1 + warpgroup});

        typename Shape::Split split{split_barriers, stages_a, rank, warpgroup};

        Stage current = make_stage(0);
        for (bool more = scheduler.next(tile); more;) {
            TilePart part;
            if constexpr (kSplitK > 1) part = split.announce(tile.row + first_row, tile.column, u32(m), u32(n));
            if (kGemmType == GemmType::GroupedM && tile.row + first_row >= tile.row_end) {
                // None of these rows belongs to the group: release the stages unread
                for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                    full[ring.stage].wait(ring.parity);
                    release(ring.stage);
                }
                current = make_stage(ring.stage);
                more = scheduler.next(tile);
                continue;
            }
            float acc[kWaves][kPasses][kCount];
#pragma unroll
            for (u32 i = 0; i < kParts * kCount; ++i) acc[i / kCount / kPasses][i / kCount % kPasses][i % kCount] = 0;
            const u32 column_in_block = tile.column % 128;
            const bool both_waves = !kCutWaves || tile.row + first_row + kWaveRows < tile.row_end;
            const u8* const smem_scale_a = stages_s + Scales::row_offset(first_row + fragment_row(), tile.row);

#pragma unroll Shape::kUnroll
            for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block) {
                // Wait for the stage
                full[ring.stage].wait(ring.parity);
                const u32 stage = current.index;
                const auto smem_scale_b = reinterpret_cast<const float*>(stages_s + stage * Scales::kBytes + Scales::kOffsetB);
                float acc_tmp[kCount];
                float scale_a_frag[kWaves][2], scale_b_blocks[Scales::kBlocks], factors[kCount];
                float columns[Shape::kColumnScales ? kCount / 2 : 1];
                Stage next;
                if constexpr (Shape::kColumnScales) {
                    // Before the WGMMAs: the loads would wait for theirs
                    load_scales(scale_a_frag, columns, smem_scale_a + stage * Scales::kBytes, Scales::row_offset(kWaveRows, 0),
                                smem_scale_b);
                }
#pragma unroll
                for (u32 part = 0; part < kParts; ++part) {
                    const u32 wave = part / kPasses, pass = part % kPasses;
                    if (kCutWaves && wave > 0 && !both_waves) {  // none of these rows belongs to the group
                        ring.advance();
                        next = make_stage(ring.stage);
                        release(stage);
                        break;
                    }

                    // Issue and commit the WGMMAs of one pass over columns of one wave of rows
                    wgmma_fence();
#pragma unroll
                    for (u32 i = 0; i < kSpan / kWgmmaKBytes; ++i) {
                        wgmma<kColumns, Element>(
                            acc_tmp, operand(descriptor_a, current.desc_a, wave * kWaveRows * kSpan + i * kWgmmaKBytes),
                            operand(descriptor_b, current.desc_b, pass * kColumns * kSpan + i * kWgmmaKBytes), i > 0);
                    }
                    wgmma_commit();

                    // Read the scales of the stage
                    if (part == 0 && Scales::kAlongK && !Shape::kColumnScales) {
#pragma unroll
                        for (u32 i = 0; i < 2 * kWaves; ++i) {
                            const u32 byte = i / 2 * Scales::row_offset(kWaveRows, 0) + i % 2 * 8 * sizeof(float);
                            const u8* const scale = smem_scale_a + stage * Scales::kBytes + byte;
                            scale_a_frag[i / 2][i % 2] = *reinterpret_cast<const float*>(scale);
                        }
#pragma unroll
                        for (u32 i = 0; i < (Scales::kByBlock ? Scales::kBlocks : 0); ++i) {
                            scale_b_blocks[i] = read_by_arriving_lane(smem_scale_b + i);
                        }
                        if constexpr (Shape::kEarlyFactors) combine_scales<true>(factors, scale_a_frag[0], smem_scale_b);
                    }

                    // Compute the descriptors of the next stage, and join the scales of A and B
                    if (part == kParts - 1) {
                        ring.advance();
                        next = make_stage(ring.stage);
                    }
                    float block_factors[2][Shape::kColumnGroups];
                    if constexpr (Scales::kByBlock) {
                        using Blocks = const float (&)[Shape::kBlocks];
                        combine_block_scales<Scales::kGroupColumns>(block_factors, scale_a_frag[wave],
                                                    reinterpret_cast<Blocks>(scale_b_blocks[pass]), column_in_block);
                    }

                    // Wait for the WGMMAs, and release the stage after the last part
                    wgmma_wait<0>(acc_tmp);
                    if constexpr (Scales::kByToken && !Shape::kEarlyFactors && !Shape::kColumnScales) {
                        combine_scales<false>(factors, scale_a_frag[wave], smem_scale_b + pass * kColumns);
                    }
                    if (part == kParts - 1) release(stage);

                    // Promote with scales: acc += scale * acc_tmp
                    if constexpr (Scales::kByBlock) {
                        promote(acc[wave][pass], acc_tmp, block_factors);
                    } else if constexpr (Shape::kColumnScales) {
                        promote(acc[wave][pass], acc_tmp, scale_a_frag[wave], columns);
                    } else if constexpr (Scales::kByToken) {
                        promote(acc[wave][pass], acc_tmp, factors);
                    } else {
                        promote(acc[wave][pass], acc_tmp);
                    }
                }
                current = next;
            }

            // Schedule the next tile: a few divisions, which overlap the epilogue
            const Tile done_tile = tile;
            more = scheduler.next(tile);

            // Epilogue: apply scales that are constant along K, and store D
            float factor = alpha;
            if constexpr (kScaling == Scaling::Tensor) {
                factor *= scale_a[done_tile.batch_a * scale_a_batch] * scale_b[done_tile.batch_b * scale_b_batch];
            }
            if constexpr (kSplitK > 1) {
                const SplitOutput<Config> output{{direct, bias, c, direct_batch, direct_pitch, c_batch, c_pitch, n, true}, u32(m)};
                split.reduce(reinterpret_cast<const float (&)[Shape::kN / 2]>(acc), part,
                             [&](const float (&sum)[4], u32 row, u32 column) {
                    float scaled[4];
                    row += done_tile.row + first_row, column += done_tile.column;
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        scaled[i] = sum[i];
                        if (kScaling == Scaling::Row && row < u32(m) && column + i < u32(n)) {
                            scaled[i] *= scale_a[done_tile.batch_a * scale_a_batch + row] *
                                         scale_b[done_tile.batch_b * scale_b_batch + column + i];
                        }
                    }
                    output.write(scaled, factor, done_tile.batch_d, row, column);
                });
            }
#pragma unroll
            for (u32 wave = 0; wave < (kSplitK == 1 ? kWaves : 0); ++wave) {
                const u32 row = done_tile.row + first_row + wave * kWaveRows;
                if constexpr (kScaling == Scaling::Row) {
                    scale_accumulators(acc[wave], scale_a + done_tile.batch_a * scale_a_batch,
                               scale_b + done_tile.batch_b * scale_b_batch, row, done_tile.column, m, n,
                               reinterpret_cast<float*>(d_buffers), 1 + warpgroup);
                }
                epilogue.write(acc[wave], factor, row, done_tile.column, done_tile.batch_d, done_tile.row_end);
            }
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
    if constexpr (kShare > 1) cluster_sync();  // a block must outlive the arrivals of the other
}

}  // namespace tilewright
