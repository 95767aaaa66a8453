// D = act(alpha * A B + bias) + C for e4m3 operands along K with scales (fp8_scales.cuh): a Hopper GEMM that stays on the
// machine, and takes every 128 of K over into float32 sums.  D may be e4m3 with scales of its own (fp8_epilogue.cuh).
//
// Blocks, ring and walks are those of sm90_bf16_gemm.cuh.  A stage also holds its scales, so that one barrier says
// all.  The main loop is another: a step multiplies 128 of K into a scratch accumulator, four WGMMAs that begin with zeros,
// waits for them, and promotes: sums += scale * scratch.  Meanwhile the tensor cores have the products of the other
// warpgroup.  Registers have room for two sums beside the scratch, so tiles of 256 columns take two passes of 128, and
// tiles of 256 rows two waves of 64 a warpgroup.
//
// What lies between the last FFMA of a step and the first WGMMA of the next, the tensor cores wait for.  So the loop is
// unrolled, which lets the barrier of the next stage be asked while this one is promoted (10 to 19 % at K of 7168 and more);
// the descriptors of the next stage are 32-bit sums made ahead; and scales are read, and multiplied with each other, while
// the products run.  Steps take 1.04 to 1.09 times the cycles of their products in tiles of 192x128, 1.11 to 1.15 in 256x128
// (H200, long K); 256x128 has fewer tiles to begin and end.
//
// Config: kBlockM, kBlockN, kStages; kScaling; kWalk; kActivation; kBias; kAddend; kInto;
// Element (float8_e4m3), Out (float8_e4m3: D has scales), Bias, Addend.  What is not said here: tile_epilogue.cuh.
#pragma once

#include <tilewright/fp8_epilogue.cuh>
#include <tilewright/fp8_scales.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

namespace tilewright {

template <bool kFirst, typename A, typename B> struct EitherType { using Type = A; };
template <typename A, typename B> struct EitherType<false, A, B> { using Type = B; };

// No clusters: pairs of blocks that share an operand took 1 to 12 % more time.
template <typename Config> struct Alone : Config { static constexpr u32 kClusterM = 1, kClusterN = 1; };

template <typename Config> struct Fp8Shape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages;
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    using A = Operand<Element, Major::K, kM, 1>;
    using B = Operand<Element, Major::K, kN, 1>;
    static constexpr u32 kWaves = kM > 192 ? 2 : 1;       // times 64 rows of a warpgroup
    static constexpr u32 kGroups = kM / 64 / kWaves;      // warpgroups that multiply
    static constexpr u32 kThreads = 128 * (kGroups + 1);  // and the producer's
    static constexpr u32 kPasses = kN > 192 ? 2 : 1, kColumns = kN / kPasses, kParts = kWaves * kPasses;
    static constexpr u32 kBoxes = kWaves * ((kN + 63) / 64), kBuffers = kBoxes < 4 ? kBoxes : 4;  // of D, a warpgroup
    using Scales = StageScales<kScaling, kM, kN, GemmType(Config::kWalk) == GemmType::GroupedM>;
    // Scales of columns make as many factors as there are products: registers have room for them beside one sum
    static constexpr bool kAhead = Scales::kByToken && kParts == 1 && kColumns <= 128 && kGroups < 3;
    static constexpr u32 kBlocks = kPasses > 1 ? 1 : Scales::kBlocks;  // of columns that a pass may touch
    static constexpr u32 kOf = kPasses > 1 ? 1 : kN / Scales::kGroupColumns;  // groups of its columns in one block
    static constexpr bool kQuantises = Same<typename Config::Out, float8_e4m3>::value;
    using Epilogue = Fp8Epilogue<Config, Fp8Shape, kQuantises>;
    using Stored = typename EitherType<kQuantises, float, typename Config::Out>::Type;
    static_assert(Same<Element, float8_e4m3>::value, "operands are e4m3");
    static_assert(kM == 64 || kM == 128 || kM == 192 || kM == 256, "one to three warpgroups, or two of two waves");
    static_assert(kN % 16 == 0 && kColumns % 16 == 0, "columns of a WGMMA");
    static_assert((kParts + 1) * kColumns <= (kGroups == 3 ? 2 : 3) * 128, "accumulators a thread: 192, or 128");
};

template <typename Config>
__global__ void __launch_bounds__(Fp8Shape<Config>::kThreads, 1) sm90_fp8_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_scale_a,
    const __grid_constant__ TensorMap map_scale_b, const float* scale_a, i64 scale_a_batch, const float* scale_b,
    i64 scale_b_pitch, i64 scale_b_batch, const typename Config::Bias* bias, const typename Config::Addend* c, float alpha,
    i64 c_pitch, i64 c_batch, typename Fp8Shape<Config>::Stored* stored, i64 stored_pitch, i64 stored_batch,
    const int* starts, const int* ends, bool apart, int m, int n, int k, int batches, int band) {
    using Shape = Fp8Shape<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    using Scales = typename Shape::Scales;
    constexpr u32 kStages = Shape::kStages, kGroups = Shape::kGroups;
    constexpr u32 kWaves = Shape::kWaves, kPasses = Shape::kPasses, kParts = Shape::kParts;
    constexpr u32 kColumns = Shape::kColumns, kCount = kColumns / 2, kWaveRows = 64 * kGroups;
    constexpr Scaling kScaling = Shape::kScaling;
    constexpr GemmType kWalk = GemmType(Config::kWalk);

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, of B, buffers of D, kStages of scales
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    u8* const stages_s = buffers + kGroups * Shape::kBuffers * kBoxBytes;
    __shared__ Barrier full[kStages], empty[kStages];
    using Walker = TileScheduler<Alone<Config>>;
    __shared__ typename Walker::Table table;

    const u32 group = warp_index() / 4;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1 + Scales::kArrivals);
            empty[i].init(4 * kGroups);  // one arrival a warp that reads
        }
        fence_barrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();

    const SchedulerArgs args{u32(m), u32(n), u32(k), u32(batches), u32(band), starts, ends, apart};
    Walker::prepare(args, table);
    Walker walk(args, table, 0);
    Tile tile;
    Ring<kStages> ring;

    if (group == kGroups) {
        warpgroup_reg_dealloc<kGroups == 3 ? 32 : 40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch_descriptor(map_a), tma_prefetch_descriptor(map_b), tma_prefetch_descriptor(map_d);
            if constexpr (Scales::kAlongK) tma_prefetch_descriptor(map_scale_a);
            if constexpr (Scales::kByToken) tma_prefetch_descriptor(map_scale_b);
            while (walk.next(tile)) {
                for (u32 step = 0; step < tile.k_blocks; ++step, ring.advance()) {
                    const u32 s = ring.stage, at = tile.k + step * A::kBlockK;  // beyond K come zeros
                    empty[s].wait(ring.parity ^ 1);
                    full[s].arrive_and_expect_tx(A::kBytes + B::kBytes + Scales::kTxBytes);
                    A::load(stages_a + s * A::kBytes, map_a, full[s], tile.row, at, tile.batch_a, 0);
                    B::load(stages_b + s * B::kBytes, map_b, full[s], tile.column, at, tile.batch_b, 0);
                    Scales::load(stages_s + s * Scales::kBytes, full[s], map_scale_a, map_scale_b,
                                 scale_b + tile.batch_b * scale_b_batch, scale_b_pitch, tile.row, tile.column, at / 128,
                                 tile.batch_a, tile.batch_b, u32(n));
                }
            }
        }
    } else {
        warpgroup_reg_alloc<kGroups == 3 ? 160 : kGroups == 2 ? 232 : 248>();
        const u32 first_row = group * 64;  // in the tile; of a wave
        // One value a warp, in uniform registers: else each step makes it of addresses again before it may multiply
        const auto uniform = [](u32 value) { return __shfl_sync(~0u, value, 0); };
        const u64 descriptor_a = A::descriptor(stages_a + first_row * kSpan), descriptor_b = B::descriptor(stages_b);
        // Addresses move in the low words alone: sums of 64 bits would take the time of a carry before each WGMMA
        const u32 first_a = uniform(u32(descriptor_a)), first_b = uniform(u32(descriptor_b));
        const auto operand = [](u64 descriptor, u32 low, u32 bytes) { return descriptor >> 32 << 32 | (low + (bytes >> 4)); };
        struct Stage { u32 index, a, b; };
        const auto at_stage = [&](u32 index) {
            Stage at{index, first_a + index * (A::kBytes >> 4), first_b + index * (B::kBytes >> 4)};
            asm volatile("" : "+r"(at.a), "+r"(at.b));  // made here, not where they are used
            return at;
        };
        // Reads of scales by the other lanes come before lane 0's arrival through __syncwarp, and so before the copies that
        // the producer asks for when it has seen all arrivals.  For cp_async_zfill() racecheck calls that a hazard; it is none.
        const auto release = [&](u32 stage) {
            __syncwarp();
            if (lane_index() == 0) empty[stage].arrive();
        };

        u8* const own_buffers = buffers + group * Shape::kBuffers * kBoxBytes;
        typename Shape::Epilogue epilogue({map_d, bias, c, c_pitch, c_batch, stored, stored_pitch, stored_batch, u32(m),
                                           u32(n), own_buffers, 1 + group});

        Stage at = at_stage(0);
        for (bool more = walk.next(tile); more;) {
            if (kWalk == GemmType::GroupedM && tile.row + first_row >= tile.row_end) {  // none of these rows is ours
                for (u32 step = 0; step < tile.k_blocks; ++step, ring.advance()) {
                    full[ring.stage].wait(ring.parity);
                    release(ring.stage);
                }
                at = at_stage(ring.stage);
                more = walk.next(tile);
                continue;
            }
            float sums[kWaves][kPasses][kCount];
#pragma unroll
            for (u32 i = 0; i < kParts * kCount; ++i) sums[i / kCount / kPasses][i / kCount % kPasses][i % kCount] = 0;
            const u32 into = tile.column % 128;  // its first block
            const u8* const of_rows = stages_s + Scales::row_offset(first_row + fragment_row(), tile.row);

#pragma unroll 4
            for (u32 step = 0; step < tile.k_blocks; ++step) {
                full[ring.stage].wait(ring.parity);
                float scratch[kCount];
                float of_row[kWaves][2], of_block[Scales::kBlocks], factors[kCount];
                const u32 done = at.index;
                const auto of_columns = reinterpret_cast<const float*>(stages_s + done * Scales::kBytes + Scales::kOffsetB);
                Stage next;
#pragma unroll
                for (u32 part = 0; part < kParts; ++part) {
                    const u32 wave = part / kPasses, pass = part % kPasses;
                    wgmma_fence();
#pragma unroll
                    for (u32 i = 0; i < kSpan / kWgmmaKBytes; ++i) {
                        wgmma<kColumns, Element>(
                            scratch, operand(descriptor_a, at.a, wave * kWaveRows * kSpan + i * kWgmmaKBytes),
                            operand(descriptor_b, at.b, pass * kColumns * kSpan + i * kWgmmaKBytes), i > 0);
                    }
                    wgmma_commit();
                    if (part == 0 && Scales::kAlongK) {
#pragma unroll
                        for (u32 i = 0; i < 2 * kWaves; ++i) {
                            const u32 byte = i / 2 * Scales::row_offset(kWaveRows, 0) + i % 2 * 8 * sizeof(float);
                            of_row[i / 2][i % 2] = *reinterpret_cast<const float*>(of_rows + done * Scales::kBytes + byte);
                        }
#pragma unroll
                        for (u32 i = 0; i < (Scales::kByBlock ? Scales::kBlocks : 0); ++i) of_block[i] = of_columns[i];
                        if constexpr (Shape::kAhead) combine_scales<true>(factors, of_row[0], of_columns);
                    }
                    if (part == kParts - 1) {
                        ring.advance();
                        next = at_stage(ring.stage);
                    }
                    float of[2][Shape::kOf];
                    if constexpr (Scales::kByBlock) {
                        const float (&of_pass)[Shape::kBlocks] = *reinterpret_cast<const float (*)[Shape::kBlocks]>(of_block + pass);
                        combine_block_scales<Scales::kGroupColumns>(of, of_row[wave], of_pass, into);
                    }
                    wgmma_wait<0>(scratch);
                    if constexpr (Scales::kByToken && !Shape::kAhead) {
                        combine_scales<false>(factors, of_row[wave], of_columns + pass * kColumns);
                    }
                    if (part == kParts - 1) release(done);
                    float (&to)[kCount] = sums[wave][pass];
                    if constexpr (Scales::kByBlock) {
                        promote(to, scratch, of);
                    } else if constexpr (Scales::kByToken) {
                        promote(to, scratch, factors);
                    } else {
                        promote(to, scratch);
                    }
                }
                at = next;
            }

            const Tile over = tile;
            more = walk.next(tile);  // a few divisions, beside the epilogue's work
            float factor = alpha;
            if constexpr (kScaling == Scaling::Tensor) {
                factor *= scale_a[over.batch_a * scale_a_batch] * scale_b[over.batch_b * scale_b_batch];
            }
#pragma unroll
            for (u32 wave = 0; wave < kWaves; ++wave) {
                const u32 row = over.row + first_row + wave * kWaveRows;
                if constexpr (kScaling == Scaling::Row) {
                    scale_accumulators(sums[wave], scale_a + over.batch_a * scale_a_batch, scale_b + over.batch_b * scale_b_batch,
                               row, over.column, m, n, reinterpret_cast<float*>(own_buffers), 1 + group);
                }
                epilogue.write(sums[wave], factor, row, over.column, over.batch_d, over.row_end);
            }
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
}

}  // namespace tilewright
