// D = act(alpha * A B + bias) + C for e4m3 operands along K with scales (fp8_scales.cuh): a Hopper GEMM that stays on the
// machine, and takes every 128 of K over into float32 sums.  D may be e4m3 with scales of its own (fp8_epilogue.cuh).
//
// Blocks, ring, clusters and walks are those of sm90_bf16_gemm.cuh.  The main loop is not: a step multiplies 128 of K into a
// scratch accumulator, four WGMMAs that begin with zeros, waits for them, frees the stage, and promotes: sums += scale *
// scratch.  Meanwhile the tensor cores have the products of other warpgroups, of 64 rows each, and with kScratch = 2 the
// next step of this one, in a second accumulator.  Tiles of 256 columns take two passes, of 128 columns each, for which
// registers have room beside the sums.
//
// Measured on an H200 at 4096x4096x7168: scales that come through shared memory, from warps of their own, made tiles of two
// passes 13 % faster (249 us to 212..220).  Warpgroups that take turns at the tensor cores (231 us) and tiles of 256 x 128 in
// two passes over rows (229 us) were nowhere the fastest.
//
// Config: kBlockM, kBlockN, kStages, kClusterM, kClusterN; kScaling; kScratch; kWalk; kActivation; kBias; kAddend; kInto;
// Element (float8_e4m3), Out (float8_e4m3: D has scales), Bias, Addend.  What is not said here: tile_epilogue.cuh.
#pragma once

#include <tilewright/fp8_epilogue.cuh>
#include <tilewright/fp8_scales.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_walk.cuh>

namespace tilewright {

template <bool kFirst, typename A, typename B> struct EitherType { using Type = A; };
template <typename A, typename B> struct EitherType<false, A, B> { using Type = B; };

template <typename Config> struct Fp8Shape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages, kScratch = Config::kScratch;
    static constexpr u32 kCluster = Config::kClusterM * Config::kClusterN;
    static constexpr Scaling kScaling = Scaling(Config::kScaling);
    using A = Operand<Element, Major::K, kM, Config::kClusterN>;
    using B = Operand<Element, Major::K, kN, Config::kClusterM>;
    static constexpr u32 kGroups = kM / 64;               // warpgroups that multiply
    static constexpr u32 kThreads = 128 * (kGroups + 1);  // and the producer's
    static constexpr u32 kPasses = kN > 192 ? 2 : 1, kColumns = kN / kPasses;
    static constexpr bool kAlongK = kScaling == Scaling::TokenByBlock || kScaling == Scaling::TokenByToken;
    using Scales = StepScales<kAlongK ? kScaling : Scaling::TokenByBlock, kM, kN>;
    static constexpr u32 kOfPass = kPasses > 1 ? 1 : Scales::kBlocks;  // blocks of columns that a pass may touch
    using Values = float[kPasses][2][kOfPass];  // scales of row 8 h of the thread in a pass: [pass][h][block]
    struct Pass : Config { static constexpr int kBlockN = kColumns; };  // what an epilogue writes at once
    static constexpr bool kQuantises = Same<typename Config::Out, float8_e4m3>::value;
    using Epilogue = Fp8Epilogue<Config, Fp8Shape, kQuantises>;
    using Stored = typename EitherType<kQuantises, float, typename Config::Out>::Type;
    static_assert(Same<Element, float8_e4m3>::value, "operands are e4m3");
    static_assert(kM == 64 || kM == 128 || kM == 192, "one to three warpgroups");
    static_assert(kN % 16 == 0 && kColumns % 16 == 0, "columns of a WGMMA");
    static_assert((kPasses + kScratch) * kColumns <= (kGroups == 3 ? 2 : 3) * 128, "accumulators a thread: 192, or 128");
    static_assert(kScratch == 1 || (kScratch == 2 && kPasses == 1), "a second scratch takes the place of a second pass");
    static_assert(kCluster == 1 || kCluster == 2, "pairs of blocks share one operand");
};

template <typename Config>
__global__ void __launch_bounds__(Fp8Shape<Config>::kThreads, 1) sm90_fp8_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const float* scale_a, i64 scale_a_pitch, i64 scale_a_batch,
    const float* scale_b, i64 scale_b_pitch, i64 scale_b_batch, const typename Config::Bias* bias,
    const typename Config::Addend* c, float alpha, i64 c_pitch, i64 c_batch, typename Fp8Shape<Config>::Stored* stored,
    i64 stored_pitch, i64 stored_batch, const int* starts, const int* ends, bool apart, int m, int n, int k, int batches,
    int band) {
    using Shape = Fp8Shape<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    using Scales = typename Shape::Scales;
    constexpr u32 kStages = Shape::kStages, kGroups = Shape::kGroups, kCluster = Shape::kCluster, kPasses = Shape::kPasses;
    constexpr u32 kColumns = Shape::kColumns, kCount = kColumns / 2;
    constexpr Scaling kScaling = Shape::kScaling;
    constexpr Walk kWalk = Walk(Config::kWalk);

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, of B, buffers of D, slots of scales
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    float* const slots = reinterpret_cast<float*>(buffers + kGroups * kTileBuffers * kBoxBytes);
    constexpr u32 kSlotFloats = Scales::kSlotBytes / sizeof(float);
    __shared__ Barrier full[kStages], empty[kStages];
    __shared__ Barrier filled[Scales::kSlots], taken[Scales::kSlots];  // of scales: by the warp that fills a slot, by readers
    __shared__ typename TileWalk<Config>::Table table;

    const u32 group = warp_index() / 4;
    const u32 rank = kCluster == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(4 * kGroups * kCluster);  // one arrival a warp that reads
        }
        for (Barrier& barrier : filled) barrier.init(1);
        for (Barrier& barrier : taken) barrier.init(4 * kGroups);
        fence_barrier_init();
    }
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        sync_cluster();  // nobody may arrive at a barrier that is not there yet
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    const WalkArgs args{u32(m), u32(n), u32(k), u32(batches), u32(band), starts, ends, apart};
    const ScaleArgs scales_at{scale_a, scale_a_pitch, scale_a_batch, scale_b, scale_b_pitch, scale_b_batch};
    TileWalk<Config>::prepare(args, table);
    Ring<kStages> ring;

    if (group == kGroups) {
        give_registers<kGroups == 3 ? 32 : 40>();
        // Whole warps choose first: lanes that are not elected must not meet the fillers' synchronisation
        if (warp_index() == 4 * kGroups) {
            if (elect_one()) {
                tma_prefetch(map_a), tma_prefetch(map_b), tma_prefetch(map_d);
                TileWalk<Config> walk(args, table, rank);
                for (Tile tile; walk.next(tile);) {
                    for (u32 step = 0; step < tile.steps; ++step, ring.advance()) {
                        const u32 s = ring.stage, at = tile.k + step * A::kBlockK;  // beyond K come zeros
                        empty[s].wait(ring.parity ^ 1);
                        full[s].expect(A::kBytes + B::kBytes);  // both halves of what is shared
                        A::load(stages_a + s * A::kBytes, map_a, full[s], tile.row, at, tile.batch_a, rank);
                        B::load(stages_b + s * B::kBytes, map_b, full[s], tile.column, at, tile.batch_b, rank);
                    }
                }
            }
        } else if (const u32 slot = warp_index() - 4 * kGroups - 1; Shape::kAlongK && slot < Scales::kSlots) {
            TileWalk<Config> walk(args, table, rank);
            u32 step = slot, parity = 0;  // this warp's next step in the tile; of the slot's turn
            for (Tile tile; walk.next(tile); step -= tile.steps) {
                Scales scales(scales_at, tile.row, tile.column, m, n, tile.k / 128, tile.batch_a, tile.batch_b);
                if (step < tile.steps) scales.load(step);
                for (; step < tile.steps; parity ^= 1) {
                    taken[slot].wait(parity ^ 1);
                    scales.store(slots + slot * kSlotFloats);
                    __syncwarp();
                    if (lane_index() == 0) filled[slot].arrive();
                    step += Scales::kSlots;
                    if (step < tile.steps) scales.load(step);
                }
            }
        }
    } else {
        take_registers<kGroups == 3 ? 160 : kGroups == 2 ? 232 : 248>();
        const u32 first_row = group * 64;  // in the tile
        // One value a warp, in uniform registers: else each step makes it of addresses again before it may multiply
        const auto uniform = [](u64 value) { return value >> 32 << 32 | __shfl_sync(~0u, u32(value), 0); };
        const u64 first_a = uniform(A::descriptor(stages_a + first_row * kSpan)), first_b = uniform(B::descriptor(stages_b));
        const auto release = [&](u32 stage) {  // in every block that loads it
            if constexpr (kCluster == 1) {
                if (lane_index() == 0) empty[stage].arrive();
            } else {
                if (lane_index() < kCluster) empty[stage].free_in_cluster(lane_index());
            }
        };

        Ring<Scales::kSlots> scales;
        const auto give_slot = [&] {
            __syncwarp();  // all lanes have read
            if (lane_index() == 0) taken[scales.stage].arrive();
            scales.advance();
        };

        u8* const own_buffers = buffers + group * kTileBuffers * kBoxBytes;
        typename Shape::Epilogue epilogue({map_d, bias, c, c_pitch, c_batch, stored, stored_pitch, stored_batch, u32(m),
                                           u32(n), own_buffers, 1 + group});

        TileWalk<Config> walk(args, table, rank);
        for (Tile tile; walk.next(tile);) {
            if (kWalk == Walk::Rows && tile.row + first_row >= tile.row_end) {  // none of these rows is ours
                for (u32 step = 0; step < tile.steps; ++step, ring.advance()) {
                    full[ring.stage].wait(ring.parity);
                    release(ring.stage);
                    if constexpr (Shape::kAlongK) {
                        filled[scales.stage].wait(scales.parity);
                        give_slot();
                    }
                }
                continue;
            }
            float sums[kPasses][kCount], scratch[Shape::kScratch][kCount];
#pragma unroll
            for (u32 i = 0; i < kPasses * kCount; ++i) sums[i / kCount][i % kCount] = 0;
            const u32 before = (128 - tile.column % 128) / Scales::kAlike;  // groups of columns in the first block

            // Starts the products of a step and a pass; the stage is the one that the ring is at.
            const auto multiply = [&](float (&to)[kCount], u32 pass) {
                const u64 a = wgmma_advance(first_a, ring.stage * A::kBytes);
                const u64 b = wgmma_advance(first_b, ring.stage * B::kBytes + pass * kColumns * kSpan);
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < kSpan / kWgmmaKBytes; ++i) {
                    wgmma<kColumns, Element>(to, wgmma_advance(a, i * kWgmmaKBytes), wgmma_advance(b, i * kWgmmaKBytes), i > 0);
                }
                wgmma_commit();
            };
            // The scales of the step that is taken over next.
            using Values = typename Shape::Values;
            const auto take_scales = [&](Values& values) {
                if constexpr (Shape::kAlongK) {
                    filled[scales.stage].wait(scales.parity);
                    const float* const from = slots + scales.stage * kSlotFloats + first_row + fragment_row();
#pragma unroll
                    for (u32 i = 0; i < 2 * kPasses * Shape::kOfPass; ++i) {
                        const u32 pass = i / Shape::kOfPass / 2, h = i / Shape::kOfPass % 2, block = i % Shape::kOfPass;
                        const u32 at = (pass * Shape::kOfPass * (kScaling == Scaling::TokenByBlock) + block) * Shape::kM;
                        values[pass][h][block] = from[at + 8 * h];
                    }
                    if constexpr (kScaling == Scaling::TokenByBlock) give_slot();  // else scales of columns are still read
                }
            };
            const auto take_over = [&](const float (&from)[kCount], const Values& values, u32 pass, u32 stage) {
                if (pass == kPasses - 1) release(stage);
                if constexpr (kScaling == Scaling::TokenByBlock) {
                    promote<Scales::kAlike>(sums[pass], from, values[pass], before);
                } else if constexpr (kScaling == Scaling::TokenByToken) {
                    promote(sums[pass], from, values[pass], slots + scales.stage * kSlotFloats + Shape::kM + pass * kColumns);
                    if (pass == kPasses - 1) give_slot();
                } else {
                    promote(sums[pass], from);
                }
            };

            if constexpr (Shape::kScratch == 1) {
                for (u32 step = 0; step < tile.steps; ++step, ring.advance()) {
                    Values values;
                    full[ring.stage].wait(ring.parity);
#pragma unroll
                    for (u32 pass = 0; pass < kPasses; ++pass) {
                        multiply(scratch[0], pass);
                        if (pass == 0) take_scales(values);
                        wgmma_wait<0>(scratch[0]);
                        take_over(scratch[0], values, pass, ring.stage);
                    }
                }
            } else if (tile.steps > 0) {
                u32 last = 0;  // stage of the products that were started last
                const auto start = [&](float (&to)[kCount]) {
                    full[ring.stage].wait(ring.parity);
                    multiply(to, 0);
                    last = ring.stage;
                    ring.advance();
                };
                const auto exchange = [&](float (&to)[kCount], float (&from)[kCount]) {
                    const u32 stage = last;
                    Values values;
                    start(to);
                    take_scales(values);
                    wgmma_wait<1>(from);
                    take_over(from, values, 0, stage);
                };
                const auto finish = [&](float (&from)[kCount]) {
                    Values values;
                    take_scales(values);
                    wgmma_wait<0>(from);
                    take_over(from, values, 0, last);
                };
                start(scratch[0]);
                u32 step = 1;  // begun, and not taken over the last of them
                for (; step + 2 <= tile.steps; step += 2) {
                    exchange(scratch[1], scratch[0]);
                    exchange(scratch[0], scratch[1]);
                }
                if (step < tile.steps) {
                    exchange(scratch[1], scratch[0]);
                    finish(scratch[1]);
                } else {
                    finish(scratch[0]);
                }
            }

            float factor = alpha;
            if constexpr (kScaling == Scaling::Tensor) {
                factor *= scale_a[tile.batch_a * scale_a_batch] * scale_b[tile.batch_b * scale_b_batch];
            }
            if constexpr (kScaling == Scaling::Row) {
                scale_sums(sums, scale_a + tile.batch_a * scale_a_batch, scale_b + tile.batch_b * scale_b_batch,
                           tile.row + first_row, tile.column, m, n, reinterpret_cast<float*>(own_buffers), 1 + group);
            }
            epilogue.write(sums, factor, tile.row + first_row, tile.column, tile.batch_d, tile.row_end);
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
    if constexpr (kCluster > 1) sync_cluster();  // and this block the arrivals of the other
}

}  // namespace tilewright
