// dK, dV and the sums of dQ of attention, for Hopper: a block holds 128 keys and walks over the queries that see them.
//
// A warpgroup has 64 keys, and dK and dV of them in registers.  For each tile of kBlockM queries it multiplies S^T = K Q^T and
// dP^T = V dO^T, whose accumulators, rounded, are in place as the A of dV += P^T dO and dK += dS^T Q; dQ = dS K needs dS of
// both warpgroups and goes through shared memory.  The products of one step run while what the tensor cores cannot do is done
// for another: exp beside dP^T, dS beside dV, the meeting of the warpgroups beside dK, and dQ leaves beside the next S^T.
//
// dQ sums over blocks.  The copy engine adds each tile to floats in global memory, which lie as the registers do; a flag a
// tile makes it wait for the block whose turn is before, so that results repeat bit for bit (see schedule.cuh).
// The five products of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), in another order.
//
// Config: kD, kDv (multiples of 16; D and D_v rounded up), kBlockM, kStages (of Q and dO), kDsStages, kOutStages,
// kSoftcap, kSlope, kSpans (of packed sequences, else a band); Element.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_rs.cuh>

#include "sm90_fmha_backward/movers.cuh"
#include "sm90_fmha_backward/scores.cuh"

namespace tilewright {

// d (64 keys x kM) = A B^T, A and B with kDepth elements a row, in boxes of kABox and kBBox bytes.
template <typename Element, u32 kM, u32 kDepth, u32 kABox, u32 kBBox>
__device__ inline void multiply_rows(float (&d)[kM / 2], u64 a, u64 b) {
#pragma unroll
    for (u32 i = 0; i < kDepth / 16; ++i) {
        const u32 box = i / 4, within = i % 4 * kWgmmaKBytes;
        wgmma<kM, Element>(d, wgmma_advance(a, box * kABox + within), wgmma_advance(b, box * kBBox + within), i > 0);
    }
    wgmma_commit();
}

// d (64 keys x kColumns) += A B, A (64 keys x kM) in registers.
template <typename Element, u32 kM, u32 kColumns>
__device__ inline void add_product(float (&d)[kColumns / 2], const u32 (&a)[kM / 4], u64 b) {
#pragma unroll
    for (u32 i = 0; i < kM / 16; ++i) {
        wgmma_rs<kColumns, Element, Major::Mn>(d, a + 4 * i, wgmma_advance(b, i * 16 * kSpan));
    }
    wgmma_commit();
}

// dQ of a warpgroup: dS (64 queries x 128 keys, as strips) K.
template <typename Config>
__device__ inline void multiply_dq(float (&d)[BackwardShape<Config>::kPartColumns / 2], u64 ds, u64 k) {
    using Shape = BackwardShape<Config>;
    constexpr u32 kStrips = Shape::kM / 64 * kBoxBytes;  // of a warpgroup's keys
#pragma unroll
    for (u32 i = 0; i < Shape::kN / 16; ++i) {
        const u32 step = i % 4 * 16 * kSpan;
        wgmma<Shape::kPartColumns, typename Config::Element, Major::Mn, Major::Mn>(
            d, wgmma_advance(ds, i / 4 * kStrips + step), wgmma_advance(k, i * 16 * kSpan), i > 0);
    }
    wgmma_commit();
}

template <typename Config>
__global__ void __launch_bounds__(BackwardShape<Config>::kThreads, 1) sm90_fmha_backward(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_do,
    const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
    const __grid_constant__ TensorMap map_rows, float* sums, int* flags, const float* slopes, int s_q, int s_k, int heads,
    int batches, int sharing, int left, int right, int together, bool alternating, float scale, float softcap,
    const Interval* spans) {
    using Shape = BackwardShape<Config>;
    using Element = typename Config::Element;
    constexpr u32 kM = Shape::kM, kN = Shape::kN;

    extern __shared__ __align__(1024) u8 shared[];
    __shared__ BackwardBarriers<Config> barriers;
    __shared__ BackwardTile drawn[2];
    const u32 group = warp_index() / 4;
    if (threadIdx.x == 0) {
        barriers.init();
        fence_barrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();
    const BackwardProblem<Config::kSpans> problem{
        {s_q, s_k, heads, batches, sharing, left, right, together, alternating, spans}};

    if (group == kBackwardGroups) {
        warpgroup_reg_dealloc<24>();
        const u32 warp = warp_index() - 4 * kBackwardGroups;
        if (warp == 0 && elect_one()) {
            int* const counter = flags + batches * heads * problem.template tiles<kM>();
            bring_operands<Config>(problem, barriers, drawn, shared, map_q, map_k, map_v, map_do, map_rows, counter);
        } else if (warp >= 1 && warp <= Shape::kOutStages && elect_one()) {
            take_away<Config>(problem, barriers, drawn, shared, warp - 1, map_dk, map_dv, sums, flags);
        }
        return;
    }

    warpgroup_reg_alloc<240>();
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };
    // A of the first two products: this warpgroup's keys.  B of dQ: all keys, and its columns
    const u64 own_k = wgmma_descriptor<kSpan>(shared + group * kBoxBytes);
    const u64 own_v = wgmma_descriptor<kSpan>(shared + Shape::kAtV + group * kBoxBytes);
    const u64 all_k = wgmma_descriptor<kSpan>(shared + group * Shape::kPartOffset, 8 * kSpan, kN * kSpan);
    const u64 first_q = wgmma_descriptor<kSpan>(shared + Shape::kAtQ);
    const u64 first_do = wgmma_descriptor<kSpan>(shared + Shape::kAtDo);
    const u64 first_q_mn = wgmma_descriptor<kSpan>(shared + Shape::kAtQ, 8 * kSpan, kM * kSpan);
    const u64 first_do_mn = wgmma_descriptor<kSpan>(shared + Shape::kAtDo, 8 * kSpan, kM * kSpan);
    const u64 first_ds = wgmma_descriptor<kSpan>(
        shared + Shape::kAtDs + (Shape::kByColumns ? 0 : group * kBoxBytes), 8 * kSpan, kBoxBytes);
    const u32 own_ds = shared_address(shared + Shape::kAtDs) + group * (kM / 64 * kBoxBytes);
    u8* const own_out = shared + Shape::kAtOut + group * Shape::kHalfBytes;
    BackwardScale units{Config::kSoftcap ? 2 * kLog2E * scale / softcap : kLog2E * scale, softcap * kLog2E, 0};

    Ring<2> ring_tile;
    Ring<1> keys;
    Ring<Shape::kStages> ring;
    Ring<Shape::kDsStages> ring_ds;
    Ring<Shape::kOutStages> ring_out;
    const auto to_leave = [&]() {  // when shared memory for what leaves is free
        barriers.out_empty[ring_out.stage].wait(ring_out.parity ^ 1);
        return own_out + ring_out.stage * Shape::kOutBytes;
    };
    const auto leave = [&]() {
        fence_proxy_async_shared();
        __syncwarp();
        release(barriers.out_full[ring_out.stage]);
        ring_out.advance();
    };
    for (;; ring_tile.advance()) {
        barriers.tile_full[ring_tile.stage].wait(ring_tile.parity);
        const BackwardTile& tile = drawn[ring_tile.stage];
        if (tile.key < 0) break;
        const int key = tile.key + int(group * kRowsOfGroup);
        const BackwardOwn<Config::kSpans> own_keys(problem, key);

        float dk[Shape::kD / 2], dv[Shape::kDv / 2], s[kM / 2];
#pragma unroll
        for (u32 i = 0; i < Shape::kD / 2; ++i) dk[i] = 0;
#pragma unroll
        for (u32 i = 0; i < Shape::kDv / 2; ++i) dv[i] = 0;
        float dp[kM / 2];
        u32 p[kM / 4], ds[kM / 4], stage = 0;
        BackwardVisit<Config::kSpans> visit(tile);
        const auto multiply_s = [&]() {  // of the queries that stand at the ring's next place
            stage = ring.stage;
            barriers.q_full[stage].wait(ring.parity);
            wgmma_fence();
            multiply_rows<Element, kM, Shape::kD, kN * kSpan, kM * kSpan>(
                s, own_k, wgmma_advance(first_q, stage * Shape::kQBytes));
        };
        const auto multiply_dv = [&]() {
            wgmma_fence();
            add_product<Element, kM, Shape::kDv>(dv, p, wgmma_advance(first_do_mn, stage * Shape::kDoBytes));
        };
        // With S on its way: dP, P, dV, dS
        const auto first_half = [&]() {
            barriers.do_full[stage].wait(ring.parity);
            ring.advance();
            wgmma_fence();
            multiply_rows<Element, kM, Shape::kDv, kN * kSpan, kM * kSpan>(
                dp, own_v, wgmma_advance(first_do, stage * Shape::kDoBytes));
            wgmma_wait<1>(s);
            const int row = visit.m(tile) * int(kM);
            const BackwardSeen seen = seen_queries<kM>(problem, own_keys, key, row);
            const float* const logs = reinterpret_cast<const float*>(shared + Shape::kAtRows + stage * Shape::kRowBytes);
            if constexpr (Config::kSlope) units.slope = slopes[tile.head * sharing + visit.head] * kLog2E;
            if (must_cut<kM>(problem, own_keys, key, row)) {
                to_probabilities<Config, true>(s, p, logs, units, seen);
            } else {
                to_probabilities<Config, false>(s, p, logs, units, seen);
            }
            if (Shape::kEarlyDv) multiply_dv();
            Shape::kEarlyDv ? wgmma_wait<1>(dp) : wgmma_wait<0>(dp);
            to_score_gradients<Config>(ds, p, s, dp, logs + kM);
            if (Shape::kDsStages == 1) named_barrier_sync(2, 128 * kBackwardGroups);
            stage_score_gradients<kM>(ds, own_ds + ring_ds.stage * Shape::kDsBytes);
            fence_proxy_async_shared();
            if (Shape::kEarlyDv) {
                wgmma_wait<0>(dv);  // products that run across the end of a loop make the assembler wait for each of them
                release(barriers.do_empty[stage]);
            }
            visit.next(tile);
        };
        // dK and dQ, and S of the next queries begun if there are `more`
        const auto second_half = [&](bool more) {
            const u32 own = stage;
            float dq[Shape::kPartColumns / 2];
            if (!Shape::kEarlyDv) multiply_dv();
            wgmma_fence();
            add_product<Element, kM, Shape::kD>(dk, ds, wgmma_advance(first_q_mn, own * Shape::kQBytes));
            if (!Shape::kEarlyDv) {
                wgmma_wait<1>();
                release(barriers.do_empty[own]);
            }
            named_barrier_sync(1, 128 * kBackwardGroups);  // dS of both warpgroups is there
            wgmma_fence();
            multiply_dq<Config>(dq, wgmma_advance(first_ds, ring_ds.stage * Shape::kDsBytes), all_k);
            ring_ds.advance();
            wgmma_wait<0>(dq);
            release(barriers.q_empty[own]);
            if (more) multiply_s();  // not before: registers

            struct alignas(16) Four { float of[4]; };
            Four* const place = reinterpret_cast<Four*>(to_leave()) + threadIdx.x % 128;
#pragma unroll
            for (u32 j = 0; j < Shape::kPartColumns / 8; ++j) {
                place[j * 128] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
            }
            leave();
        };
        if (tile.heads > 0) {
            barriers.k_full.wait(keys.parity);
            multiply_s();
            barriers.v_full.wait(keys.parity);
            first_half();
            while (visit.more(tile)) {
                second_half(true);
                first_half();
            }
            second_half(false);
            keys.advance();
            release(barriers.keys_empty);
        }
        __syncwarp();
        release(barriers.tile_empty[ring_tile.stage]);

        wgmma_wait<0>(dv);
        wgmma_wait<0>(dk);
        u8* const place_v = to_leave();
#pragma unroll
        for (u32 j = 0; j < Shape::kDv / 16; ++j) stage_columns<Element, kSpan>(dv + 8 * j, shared_address(place_v), 32 * j);
        leave();
#pragma unroll
        for (u32 i = 0; i < Shape::kD / 2; ++i) dk[i] *= scale;
        u8* const place_k = to_leave();
#pragma unroll
        for (u32 j = 0; j < Shape::kD / 16; ++j) stage_columns<Element, kSpan>(dk + 8 * j, shared_address(place_k), 32 * j);
        leave();
    }
}

}  // namespace tilewright
