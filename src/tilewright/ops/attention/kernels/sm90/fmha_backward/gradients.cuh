// The body of the backward kernels: barriers, roles of the warps, and the loop of the consumer warpgroups.
//
// Maps: FmhaBackwardMaps, or MlaBackwardMaps (copies.cuh).
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_rs.cuh>

#include "copies.cuh"
#include "scores.cuh"

namespace tilewright {

// d (64 keys x kM) = A B^T, A and B with kDepth elements per row, in boxes of kABox and kBBox bytes.
template <typename Element, u32 kM, u32 kDepth, u32 kABox, u32 kBBox>
__device__ inline void multiply_abt(float (&d)[kM / 2], u64 a, u64 b) {
#pragma unroll
    for (u32 i = 0; i < kDepth / 16; ++i) {
        const u32 box = i / 4, offset = i % 4 * kWgmmaKBytes;
        wgmma<kM, Element>(d, wgmma_advance(a, box * kABox + offset), wgmma_advance(b, box * kBBox + offset), i > 0);
    }
    wgmma_commit();
}

// d (64 keys x kColumns) += A B, A (64 keys x kM) from registers.
template <typename Element, u32 kM, u32 kColumns>
__device__ inline void multiply_add(float (&d)[kColumns / 2], const u32 (&a)[kM / 4], u64 b) {
#pragma unroll
    for (u32 i = 0; i < kM / 16; ++i) {
        wgmma_rs<kColumns, Element, Major::Mn>(d, a + 4 * i, wgmma_advance(b, i * 16 * kSwizzle));
    }
    wgmma_commit();
}

// dK (64 keys x kD) += dS^T Q, dS^T (64 keys x kM) from shared memory.
template <typename Config>
__device__ inline void multiply_dk(float (&d)[Config::kD / 2], u64 ds, u64 q) {
    static_assert(BackwardShape<Config>::kM == 64, "dS of one warpgroup in one box");
#pragma unroll
    for (u32 i = 0; i < Config::kBlockM / 16; ++i) {
        wgmma<Config::kD, typename Config::Element, Major::K, Major::Mn>(
            d, wgmma_advance(ds, i * kWgmmaKBytes), wgmma_advance(q, i * 16 * kSwizzle), true);
    }
    wgmma_commit();
}

// kColumns columns of dQ of one warpgroup = dS (64 queries x 128 keys, in boxes of 64 keys) K.
template <typename Config, u32 kColumns>
__device__ inline void multiply_dq(float (&d)[kColumns / 2], u64 ds, u64 k) {
    using Shape = BackwardShape<Config>;
    constexpr u32 kDsKeyBytes = Shape::kM / 64 * kBoxBytes;  // dS of 64 keys
#pragma unroll
    for (u32 i = 0; i < Shape::kN / 16; ++i) {
        const u32 step = i % 4 * 16 * kSwizzle;
        wgmma<kColumns, typename Config::Element, Major::Mn, Major::Mn>(
            d, wgmma_advance(ds, i / 4 * kDsKeyBytes + step), wgmma_advance(k, i * 16 * kSwizzle), i > 0);
    }
    wgmma_commit();
}

// Stores floats of four accumulators a thread, kColumns columns of dQ, to shared memory: dq_acc has their order.
template <u32 kColumns> __device__ inline void stage_dq(u8* smem, const float (&dq)[kColumns / 2]) {
    struct alignas(16) Floats { float x[4]; };
    Floats* const to = reinterpret_cast<Floats*>(smem) + threadIdx.x % 128;
#pragma unroll
    for (u32 j = 0; j < kColumns / 8; ++j) to[j * 128] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
}

template <typename Config, typename Maps>
__device__ inline void compute_gradients(
    const Maps& maps, const BackwardProblemOf<Config>& problem, float* dq_acc, int* flags, const float* slopes,
    float scale, float softcap) {
    using Shape = BackwardShape<Config>;
    using Element = typename Config::Element;
    constexpr u32 kM = Shape::kM, kN = Shape::kN;

    extern __shared__ __align__(1024) u8 smem[];
    __shared__ BackwardBarriers<Config> barriers;
    __shared__ BackwardTile tiles[2];
    const u32 group = warp_index() / 4;
    if (threadIdx.x == 0) {
        barriers.init();
        fence_barrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();

    // Producer warpgroup
    if (group == kBackwardWarpgroups) {
        warpgroup_reg_dealloc<24>();
        const u32 warp = warp_index() - 4 * kBackwardWarpgroups;
        if (warp == 0 && elect_one()) {
            int* const counter = flags + problem.batches * problem.heads * problem.template query_tile_count<kM>();
            load_operands<Config>(problem, barriers, tiles, smem, maps, counter);
        } else if (warp >= 1 && warp <= Shape::kOutStages && elect_one()) {
            store_results<Config>(problem, barriers, tiles, smem, warp - 1, maps, dq_acc, flags);
        }
        return;
    }

    // Consumer warpgroups
    warpgroup_reg_alloc<240>();
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };

    // Matrix descriptors.  S^T and dP^T read the warpgroup's 64 keys, dQ all 128 keys from the warpgroup's columns on
    const u64 desc_k = wgmma_descriptor<kSwizzle>(smem + group * kBoxBytes);
    const u64 desc_v = wgmma_descriptor<kSwizzle>(smem + Shape::kVOffset + group * kBoxBytes);
    const u64 desc_k_mn = wgmma_descriptor<kSwizzle>(smem + group * Shape::kDqKOffset, 8 * kSwizzle, kN * kSwizzle);
    const u64 desc_k_rest = wgmma_descriptor<kSwizzle>(  // of the third box, if there is one
        smem + 2 * kN * kSwizzle + group * (kSwizzle / 2), 8 * kSwizzle, kN * kSwizzle);
    const u64 desc_q = wgmma_descriptor<kSwizzle>(smem + Shape::kQOffset);
    const u64 desc_do = wgmma_descriptor<kSwizzle>(smem + Shape::kDoOffset);
    const u64 desc_q_mn = wgmma_descriptor<kSwizzle>(smem + Shape::kQOffset, 8 * kSwizzle, kM * kSwizzle);
    const u64 desc_do_mn = wgmma_descriptor<kSwizzle>(smem + Shape::kDoOffset, 8 * kSwizzle, kM * kSwizzle);
    const u64 desc_ds = wgmma_descriptor<kSwizzle>(
        smem + Shape::kDsOffset + (Shape::kSplitColumns ? 0 : group * kBoxBytes), 8 * kSwizzle, kBoxBytes);
    const u64 desc_ds_own = wgmma_descriptor<kSwizzle>(smem + Shape::kDsOffset + group * (kM / 64 * kBoxBytes));
    const u32 smem_ds = shared_address(smem + Shape::kDsOffset) + group * (kM / 64 * kBoxBytes);
    u8* const smem_out = smem + Shape::kOutOffset + group * Shape::kWarpgroupOutBytes;
    ScoreUnits units{Config::kSoftcap ? 2 * kLog2E * scale / softcap : kLog2E * scale, softcap * kLog2E, 0};

    Ring<2> ring_tile;
    Ring<1> ring_kv;
    Ring<Shape::kStages> ring;
    Ring<Shape::kDsStages> ring_ds;
    Ring<Shape::kOutStages> ring_out;
    // Shared memory for the next result, once its store has been read
    const auto wait_out = [&]() {
        barriers.out_empty[ring_out.stage].wait(ring_out.parity ^ 1);
        return smem_out + ring_out.stage * Shape::kOutBytes;
    };
    const auto store_out = [&]() {
        fence_proxy_async_shared();
        __syncwarp();
        release(barriers.out_full[ring_out.stage]);
        ring_out.advance();
    };
    for (;; ring_tile.advance()) {
        // Wait for the next key tile
        barriers.tile_full[ring_tile.stage].wait(ring_tile.parity);
        const BackwardTile& tile = tiles[ring_tile.stage];
        if (tile.key < 0) break;
        const int key = tile.key + int(group * kWarpgroupM);
        const KeyVisibility<Config::kPacked> visibility(problem, problem.template intervals_of<kM>(tile.batch), key);

        float dk[Shape::kD / 2], dv[Shape::kDv / 2], s[kM / 2];
#pragma unroll
        for (u32 i = 0; i < Shape::kD / 2; ++i) dk[i] = 0;
#pragma unroll
        for (u32 i = 0; i < Shape::kDv / 2; ++i) dv[i] = 0;
        float dp[kM / 2];
        u32 p[kM / 4], ds[kM / 4], stage = 0;
        [[maybe_unused]] u32 stage_dk;  // whose Q dK in flight reads
        QueryTileIterator<Config::kPacked> query(tile);
        const auto issue_s = [&]() {  // for the next stage of Q
            stage = ring.stage;
            barriers.q_full[stage].wait(ring.parity);
            wgmma_fence();
            multiply_abt<Element, kM, Shape::kD, kN * kSwizzle, kM * kSwizzle>(
                s, desc_k, wgmma_advance(desc_q, stage * Shape::kQBytes));
        };
        const auto issue_dv = [&]() {
            wgmma_fence();
            multiply_add<Element, kM, Shape::kDv>(dv, p, wgmma_advance(desc_do_mn, stage * Shape::kDoBytes));
        };
        // First half of a step, with S^T in flight: dP^T, P, dV, dS
        const auto compute_dp_ds = [&]() {
            // Issue dP^T
            barriers.do_full[stage].wait(ring.parity);
            ring.advance();
            wgmma_fence();
            multiply_abt<Element, kM, Shape::kDv, kN * kSwizzle, kM * kSwizzle>(
                dp, desc_v, wgmma_advance(desc_do, stage * Shape::kDoBytes));

            // P from S^T, during dP^T
            wgmma_wait<1>(s);
            const int row = query.m(tile) * int(kM);
            const VisibleQueries visible = visible_queries<kM>(problem, visibility, key, row);
            const float* const lse = reinterpret_cast<const float*>(smem + Shape::kStatsOffset + stage * Shape::kStatsBytes);
            if constexpr (Config::kSlope) units.slope = slopes[tile.head * problem.heads_per_kv + query.head] * kLog2E;
            if (needs_mask<kM>(problem, visibility, key, row)) {
                compute_p<Config, true>(s, p, lse, units, visible);
            } else {
                compute_p<Config, false>(s, p, lse, units, visible);
            }

            // dS from dP^T, during dV
            if (Shape::kEarlyDv) issue_dv();
            Shape::kEarlyDv ? wgmma_wait<1>(dp) : wgmma_wait<0>(dp);
            compute_ds<Config>(ds, p, s, dp, lse + kM);

            // Share dS with the other warpgroup
            if (Shape::kDsStages == 1) named_barrier_sync(2, 128 * kBackwardWarpgroups);
            stage_ds<kM>(ds, smem_ds + ring_ds.stage * Shape::kDsBytes);
            fence_proxy_async_shared();
            if (Shape::kEarlyDv) {
                wgmma_wait<0>(dv);  // if a wgmma is in flight across the loop's end, ptxas waits after each one
                release(barriers.do_empty[stage]);
            }
            query.next(tile);
        };
        // Second half of a step: dK and dQ; issues S^T of the next query tile if there are `more`
        const auto compute_dk_dq = [&](bool more) {
            // Issue dK
            const u32 this_stage = stage;
            float dq[Shape::kDqBoxColumns / 2];
            if (!Shape::kEarlyDv) issue_dv();
            wgmma_fence();
            multiply_add<Element, kM, Shape::kD>(dk, ds, wgmma_advance(desc_q_mn, this_stage * Shape::kQBytes));
            if (!Shape::kEarlyDv) {
                wgmma_wait<1>();
                release(barriers.do_empty[this_stage]);
            }

            // Issue dQ, once both warpgroups have stored dS
            named_barrier_sync(1, 128 * kBackwardWarpgroups);
            wgmma_fence();
            multiply_dq<Config, Shape::kDqBoxColumns>(dq, wgmma_advance(desc_ds, ring_ds.stage * Shape::kDsBytes), desc_k_mn);
            ring_ds.advance();
            wgmma_wait<0>(dq);
            release(barriers.q_empty[this_stage]);
            if (more) issue_s();  // not earlier: registers

            // Store dQ, during S^T of the next query tile
            stage_dq<Shape::kDqBoxColumns>(wait_out(), dq);
            store_out();
        };
        // kWide: the two halves of a step.  dK of a step is issued behind S^T of the next, so that it runs during the
        // exponentials; there are no registers for dP^T, or for dS of dK as an operand.
        const auto compute_wide_dp_ds = [&](bool first) {
            if constexpr (Shape::kWide) {
                // P from S^T, during dK of the step before
                first ? wgmma_wait<0>(s) : wgmma_wait<1>(s);
                const int row = query.m(tile) * int(kM);
                const VisibleQueries visible = visible_queries<kM>(problem, visibility, key, row);
                const float* const lse =
                    reinterpret_cast<const float*>(smem + Shape::kStatsOffset + stage * Shape::kStatsBytes);
                if constexpr (Config::kSlope) units.slope = slopes[tile.head * problem.heads_per_kv + query.head] * kLog2E;
                if (needs_mask<kM>(problem, visibility, key, row)) {
                    compute_p<Config, true>(s, p, lse, units, visible);
                } else {
                    compute_p<Config, false>(s, p, lse, units, visible);
                }

                // dP^T, dV; dS during dV
                barriers.do_full[stage].wait(ring.parity);
                ring.advance();
                wgmma_fence();
                multiply_abt<Element, kM, Shape::kDv, kN * kSwizzle, kM * kSwizzle>(
                    dp, desc_v, wgmma_advance(desc_do, stage * Shape::kDoBytes));
                issue_dv();
                wgmma_wait<1>(dp);
                if (!first) release(barriers.q_empty[stage_dk]);  // dK was before dP^T

                // Share dS, once both warpgroups have read that of the step before
                named_barrier_sync(2, 128 * kBackwardWarpgroups);
                stage_ds_of_p<Config>(p, dp, lse + kM, smem_ds);
                fence_proxy_async_shared();
                wgmma_wait<0>(dv);
                release(barriers.do_empty[stage]);
                query.next(tile);
            }
        };
        const auto compute_wide_dq_dk = [&](bool more) {
            if constexpr (Shape::kWide) {
                // dQ in two parts, once both warpgroups have stored dS
                stage_dk = stage;
                float dq[Shape::kDqBoxColumns / 2], dq_rest[Shape::kDqRestColumns / 2];
                named_barrier_sync(1, 128 * kBackwardWarpgroups);
                wgmma_fence();
                multiply_dq<Config, Shape::kDqBoxColumns>(dq, desc_ds, desc_k_mn);
                multiply_dq<Config, Shape::kDqRestColumns>(dq_rest, desc_ds, desc_k_rest);

                // Store the first part during the second, and that during S^T of the next query tile and dK
                wgmma_wait<1>(dq);
                u8* const smem_dq = wait_out();
                stage_dq<Shape::kDqBoxColumns>(smem_dq, dq);
                wgmma_wait<0>(dq_rest);
                if (more) issue_s();
                wgmma_fence();
                multiply_dk<Config>(dk, desc_ds_own, wgmma_advance(desc_q_mn, stage_dk * Shape::kQBytes));
                stage_dq<Shape::kDqRestColumns>(smem_dq + Shape::kDqBoxBytes, dq_rest);
                store_out();
            }
        };
        // Main loop over query tiles
        if (tile.heads > 0) {
            barriers.k_full.wait(ring_kv.parity);
            issue_s();
            barriers.v_full.wait(ring_kv.parity);
            if constexpr (Shape::kWide) {
                compute_wide_dp_ds(true);
                while (query.more(tile)) {
                    compute_wide_dq_dk(true);
                    compute_wide_dp_ds(false);
                }
                compute_wide_dq_dk(false);
                wgmma_wait<0>(dk);
                release(barriers.q_empty[stage_dk]);
            } else {
                compute_dp_ds();
                while (query.more(tile)) {
                    compute_dk_dq(true);
                    compute_dp_ds();
                }
                compute_dk_dq(false);
            }
            ring_kv.advance();
            release(barriers.kv_empty);
        }
        // Row of dk_pe of the first key, read before the tile is released
        [[maybe_unused]] const i64 rope_row = i64(tile.batch * problem.heads + tile.head) * problem.s_k + key;
        [[maybe_unused]] const int rope_rows = problem.s_k - key;
        __syncwarp();
        release(barriers.tile_empty[ring_tile.stage]);

        // Store dV and dK
        wgmma_wait<0>(dv);
        wgmma_wait<0>(dk);
        u8* const smem_dv = wait_out();
#pragma unroll
        for (u32 j = 0; j < Shape::kDv / 16; ++j) stage_columns<Element, kSwizzle>(dv + 8 * j, shared_address(smem_dv), 32 * j);
        store_out();
#pragma unroll
        for (u32 i = 0; i < Shape::kD / 2; ++i) dk[i] *= scale;
        u8* const smem_dk = wait_out();
        // Rope columns of dK go to global memory in fp32: another kernel adds up those of all heads
        constexpr u32 kOwn = Maps::kRope ? (Shape::kBoxes - 1) * Shape::kBoxColumns : Shape::kD;
#pragma unroll
        for (u32 j = 0; j < kOwn / 16; ++j) stage_columns<Element, kSwizzle>(dk + 8 * j, shared_address(smem_dk), 32 * j);
        store_out();
        if constexpr (Maps::kRope) store_rope<kOwn>(maps, rope_row, rope_rows, dk);
    }
}

}  // namespace tilewright
