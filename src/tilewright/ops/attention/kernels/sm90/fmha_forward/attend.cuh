// The body of the forward kernel: a producer warpgroup copies (copies.cuh), the consumer warpgroups issue the wgmmas and
// compute the softmax of their 64 queries each.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_rs.cuh>

#include "copies.cuh"
#include "scores.cuh"
#include "warpgroup_tile.cuh"

namespace tilewright {

// s = Q K^T of one warpgroup.
template <typename Config> __device__ inline void multiply_qk(float (&s)[Config::kBlockN / 2], u64 q, u64 k) {
    using Shape = FmhaShape<Config>;
#pragma unroll
    for (u32 i = 0; i < Shape::kD / 16; ++i) {
        const u32 box = i / 4, offset = i % 4 * kWgmmaKBytes;
        wgmma<Shape::kN, typename Config::Element>(s, wgmma_advance(q, box * kBoxBytes + offset),
                                                   wgmma_advance(k, box * Shape::kN * kSwizzle + offset), i > 0);
    }
    wgmma_commit();
}

// acc += P V.
template <typename Config>
__device__ inline void multiply_pv(float (&acc)[Config::kDv / 2], const u32 (&p)[Config::kBlockN / 4], u64 v) {
    using Shape = FmhaShape<Config>;
#pragma unroll
    for (u32 i = 0; i < Shape::kN / 16; ++i) {
        const u64 v_rows = wgmma_advance(v, i * 16 * kSwizzle);
        wgmma_rs<Shape::kDv, typename Config::Element, Major::Mn>(acc, p + 4 * i, v_rows);
    }
    wgmma_commit();
}

template <typename Config, typename Maps>
__device__ __forceinline__ void attend(
    const Maps& maps, float* lse, const float* sinks, const float* slopes, const FmhaProblem& problem, const FmhaMask& mask,
    float scale, float softcap) {
    using Shape = FmhaShape<Config>;
    using Element = typename Config::Element;
    constexpr u32 kWarpgroups = Shape::kWarpgroups, kN = Shape::kN, kScores = kN / 2, kAcc = Shape::kDv / 2;
    // The last warpgroup may see key tiles that the first does not
    constexpr bool kUneven = !FmhaTile<Config>::kProgram && kWarpgroups * kWarpgroupM > kN;
    constexpr u32 kRegisters = kWarpgroups == 3 ? 160 : 232;  // per thread
    // Schedule the next query tile while the last P V of this one is in flight, if registers allow two tiles (64: all but s,
    // p and acc).  Not for mask programs: there it costs 7 %, measured
    constexpr bool kScheduleEarly = !FmhaTile<Config>::kProgram && kScores * 3 / 2 + kAcc + 64 <= kRegisters;

    extern __shared__ __align__(1024) u8 stages_q[];
    u8* const stages_k = stages_q + Shape::kQStages * kWarpgroups * Shape::kQBytes;
    u8* const stages_v = stages_k + Shape::kStages * Shape::kKBytes;
    __shared__ FmhaBarriers<Config> barriers;

    const u32 group = warp_index() / 4;
    if (threadIdx.x == 0) {
        barriers.init();
        fence_barrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();

    // Producer warpgroup
    if (group == kWarpgroups) {
        warpgroup_reg_dealloc<kWarpgroups == 3 ? 32 : 40>();
        if (warp_index() == 4 * kWarpgroups && elect_one()) {
            tma_prefetch_descriptor(maps.k), tma_prefetch_descriptor(maps.v);
            if constexpr (Maps::kRope) tma_prefetch_descriptor(maps.k_pe);
            load_kv<Config>(problem, mask, barriers, maps, stages_k, stages_v);
        } else if (warp_index() == 4 * kWarpgroups + 1 && elect_one()) {
            tma_prefetch_descriptor(maps.q), tma_prefetch_descriptor(maps.o);
            if constexpr (Maps::kRope) tma_prefetch_descriptor(maps.q_pe);
            load_q_store_o<Config>(problem, mask, barriers, maps, stages_q);
        }
        return;
    }

    // Consumer warpgroups
    warpgroup_reg_alloc<kRegisters>();
    const u64 desc_k = wgmma_descriptor<kSwizzle>(stages_k);
    const u64 desc_v = wgmma_descriptor<kSwizzle>(stages_v, 8 * kSwizzle, kN * kSwizzle);
    const float c = Config::kModify ? 1 : scale * kLog2E, slack = Config::kModify ? kSlack : kSlack / c;
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };
    const TurnBarrier<kWarpgroups, (Config::kTurns && kWarpgroups > 1)> turn{group};
    turn.start();

    const VisibleKeys<typename Config::Mask> visible(problem, mask);
    FmhaScheduler<Config> scheduler(problem, mask);
    Ring<Shape::kQStages> ring_q;
    Ring<Shape::kStages> ring_k, ring_v;
    WarpgroupTile<Config> current, next;
    bool more = kScheduleEarly && next.next(scheduler, visible, group);
    for (;; ring_q.advance()) {
        // Schedule a query tile
        if constexpr (kScheduleEarly) {
            if (!more) break;
            current = next;
        } else if (!current.next(scheduler, visible, group)) {
            break;
        }
        u8* const smem_q = stages_q + (ring_q.stage * kWarpgroups + group) * Shape::kQBytes;
        const u64 desc_q = wgmma_descriptor<kSwizzle>(smem_q);
        const FmhaScores<kScores> scores{problem.position(current.row + int(fragment_row()))};
        const float slope = Config::kSlope ? slopes[current.tile.head] * kLog2E : 0;
        OnlineSoftmax<kScores> softmax;
        softmax.reset();

        float s[kScores], acc[kAcc];
        u32 p[kScores / 2];
        const auto wait_k = [&]() { barriers.k_full[ring_k.stage].wait(ring_k.parity); };
        const auto issue_qk = [&]() {
            multiply_qk<Config>(s, desc_q, wgmma_advance(desc_k, ring_k.stage * Shape::kKBytes));
        };
        const auto issue_pv = [&]() {
            barriers.v_full[ring_v.stage].wait(ring_v.parity);
            multiply_pv<Config>(acc, p, wgmma_advance(desc_v, ring_v.stage * Shape::kVBytes));
        };
        const auto release_k = [&]() {
            release(barriers.k_empty[ring_k.stage]);
            ring_k.advance();
        };
        const auto release_v = [&]() {
            release(barriers.v_empty[ring_v.stage]);
            ring_v.advance();
        };
        // Softcap, ALiBi, mask and softmax of key tile n
        const auto softmax_step = [&](int n) {
            const auto key = [&]() { return current.tile.key(n); };
            if constexpr (Config::kModify) {
                scores.template apply_softcap_alibi<Config::kSoftcap, Config::kSlope>(s, key(), scale, softcap, slope);
            }
            if constexpr (FmhaTile<Config>::kProgram) {
                if (n < current.tile.partial) {
                    const MaskData data{mask.data, current.tile.batch, current.tile.head};
                    scores.template mask_program<typename Config::Mask>(s, key(), problem.s_k, data);
                }
            } else {
                const auto row_keys = [&](u32 h) {
                    return FmhaTile<Config>::kPacked ? current.row_keys[h] : current.keys_of_row(visible, h);
                };
                if (n >= current.full_end) scores.mask_right(s, key(), row_keys(0).end, row_keys(1).end);
                if (n < current.full_first) scores.mask_left(s, key(), row_keys(0).first, row_keys(1).first);
            }
            return softmax.step(s, c, slack);
        };
        const auto round_p = [&]() {
#pragma unroll
            for (u32 i = 0; i < kScores / 2; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        };
#pragma unroll
        for (u32 i = 0; i < kAcc; ++i) acc[i] = 0;
        const auto schedule_next = [&]() { more = next.next(scheduler, visible, group); };

        barriers.q_full[ring_q.stage][group].wait(ring_q.parity);
        if (!current.tile.empty()) {
            int n = current.tile.end - 1;

            // Skip key tiles that only the warpgroups after this one see, but keep the turns
            if constexpr (kUneven) {
                for (; n >= current.end; --n) {
                    wait_k();
                    turn.wait();
                    turn.pass();
                    release_k();
                    barriers.v_full[ring_v.stage].wait(ring_v.parity);
                    release_v();
                }
            }

            // First key tile: S, softmax
            wait_k();
            turn.wait();
            wgmma_fence();
            issue_qk();
            turn.pass();
            wgmma_wait<0>(s);
            release_k();
            softmax_step(n);
            round_p();
            if (n > current.tile.first) wait_k();

            // Main loop: S and softmax of key tile n while P V of tile n + 1 is in flight
            while (--n >= current.tile.first) {
                turn.wait();
                wgmma_fence();
                issue_qk();
                issue_pv();
                turn.pass();
                wgmma_wait<1>(s);
                release_k();
                const bool rescale = softmax_step(n);
                // Placed here so that ptxas does not sink the computation of P below the next line
                if (n > current.tile.first) wait_k();
                wgmma_wait<0>(acc);
                release_v();
                if (rescale) {
#pragma unroll
                    for (u32 i = 0; i < kAcc; ++i) acc[i] *= softmax.alpha[i % 4 / 2];
                }
                round_p();
            }

            // P V of the last key tile
            wgmma_fence();
            issue_pv();
            if constexpr (kScheduleEarly) schedule_next();
            wgmma_wait<0>(acc);
            release_v();
        }

        // Normalise O and write lse
        const float sink = sinks == nullptr ? -infinity() : sinks[current.tile.head] * kLog2E;
        const i64 lse_row = (i64(current.tile.batch) * problem.heads + current.tile.head) * problem.s_q;
        float norm[2], row_lse[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            norm[h] = softmax.finish(h, sink, row_lse[h]);
            const int row = current.row + int(fragment_row() + 8 * h);
            if (fragment_column() == 0 && row < problem.s_q) lse[lse_row + row] = row_lse[h];
        }
#pragma unroll
        for (u32 i = 0; i < kAcc; ++i) acc[i] *= norm[i % 4 / 2];

        // Stage O in Q's buffer, once no warp of the warpgroup reads Q
        named_barrier_sync(8 + group, 128);
#pragma unroll
        for (u32 j = 0; j < kAcc / 8; ++j) stage_columns<Element, kSwizzle>(acc + 8 * j, shared_address(smem_q), 32 * j);
        fence_proxy_async_shared();
        __syncwarp();
        release(barriers.o_full[ring_q.stage][group]);
        if constexpr (kScheduleEarly) {
            if (current.tile.empty()) schedule_next();
        }
    }
    turn.end();
}

}  // namespace tilewright
