// The body of the float8 forward: a producer warpgroup copies (copies.cuh), the consumer warpgroups issue the wgmmas and
// compute the softmax of their 64 queries each.
#pragma once

#include <tilewright/wgmma_rs.cuh>

#include "copies.cuh"
#include "fmha_forward/scores.cuh"
#include "fmha_forward/warpgroup_tile.cuh"
#include "result.cuh"
#include "softmax.cuh"

namespace tilewright {

struct Fp8Operands {
    Fp8Scales q, k, v;
    const float* sinks;
    float* lse;
    float scale, softcap;
};

// s = Q K^T of one warpgroup.
template <typename Config> __device__ inline void multiply_qk_fp8(float (&s)[Config::kBlockN / 2], u64 q, u64 k) {
    using Shape = Fp8Shape<Config>;
#pragma unroll
    for (u32 i = 0; i < Shape::kD / 32; ++i) {
        const u32 box = i * 32 / Shape::kSpan, offset = i * 32 % Shape::kSpan;
        wgmma<Shape::kN, float8_e4m3>(s, wgmma_advance(q, box * kWarpgroupM * Shape::kSpan + offset),
                                      wgmma_advance(k, box * Shape::kN * Shape::kSpan + offset), i > 0);
    }
    wgmma_commit();
}

// t = P V of kPart columns of V.
template <typename Config>
__device__ inline void multiply_pv_fp8(
    float (&t)[Fp8Shape<Config>::kPart / 2], const u32 (&p)[Config::kBlockN / 8], u64 v) {
    using Shape = Fp8Shape<Config>;
    wgmma_rs<Shape::kPart, float8_e4m3, Major::K, false>(t, p, v);
#pragma unroll
    for (u32 i = 1; i < Shape::kN / 32; ++i) {
        const u32 box = i * 32 / Shape::kSpanV, offset = i * 32 % Shape::kSpanV;
        wgmma_rs<Shape::kPart, float8_e4m3>(t, p + 4 * i, wgmma_advance(v, box * Shape::kDv * Shape::kSpanV + offset));
    }
    wgmma_commit();
}

template <typename Config>
__device__ __forceinline__ void attend_fp8(
    const Fp8Maps& maps, const Fp8Operands& operands, const Fp8Result<typename Config::Out>& result,
    const FmhaProblem& problem, const FmhaMask& mask) {
    using Shape = Fp8Shape<Config>;
    constexpr u32 kWarpgroups = Shape::kWarpgroups, kN = Shape::kN, kScores = kN / 2, kAcc = Shape::kDv / 2;
    constexpr u32 kParts = Config::kParts, kPartAcc = Shape::kPart / 2;
    // The last warpgroup may see key tiles that the first does not
    constexpr bool kUneven = !FmhaTile<Config>::kProgram && kWarpgroups * kWarpgroupM > kN;

    extern __shared__ __align__(1024) u8 stages_q[];
    u8* const stages_k = stages_q + Shape::kQStages * kWarpgroups * Shape::kQBytes;
    u8* const stages_v = stages_k + Shape::kStages * Shape::kKBytes;
    __shared__ Fp8Barriers<Config> barriers;

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
        warpgroup_reg_dealloc<kWarpgroups == 3 ? 32 : 24>();
        if (warp_index() == 4 * kWarpgroups && elect_one()) {
            tma_prefetch_descriptor(maps.k), tma_prefetch_descriptor(maps.v);
            load_kv_fp8<Config>(problem, mask, barriers, maps, operands.k, operands.v, stages_k, stages_v);
        } else if (warp_index() == 4 * kWarpgroups + 1 && elect_one()) {
            tma_prefetch_descriptor(maps.q);
            load_q_fp8<Config>(problem, mask, barriers, maps, stages_q);
        }
        return;
    }

    // Consumer warpgroups
    warpgroup_reg_alloc<kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 160 : 240>();
    const u64 desc_k = wgmma_descriptor<Shape::kSpan>(stages_k);
    const u64 desc_v = wgmma_descriptor<Shape::kSpanV>(stages_v);
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };
    const TurnBarrier<kWarpgroups, (Config::kTurns && kWarpgroups > 1)> turn{group};
    turn.start();

    const VisibleKeys<typename Config::Mask> visible(problem, mask);
    FmhaScheduler<Config> scheduler(problem, mask);
    Ring<Shape::kQStages> ring_q;
    Ring<Shape::kStages> ring_k, ring_v;
    for (WarpgroupTile<Config> current; current.next(scheduler, visible, group); ring_q.advance()) {
        const int batch = current.tile.batch, head = current.tile.head;
        const float* const q_scales = operands.q.of_head(batch, head);
        const float q_scale = operands.scale * q_scales[operands.q.block(min(current.row, problem.s_q - 1))];
        const u8* const smem_q = stages_q + (ring_q.stage * kWarpgroups + group) * Shape::kQBytes;
        const u64 desc_q = wgmma_descriptor<Shape::kSpan>(smem_q);
        const FmhaScores<kScores> scores{problem.position(current.row + int(fragment_row()))};
        Fp8Softmax<kScores> softmax;
        softmax.reset();

        float acc[kAcc];
        u32 p[kScores / 4];
        // S of a key tile; and a part of its P V: if they have one size they are one array, so that ptxas gives both the same
        // registers (and it serialises the wgmmas if one is a piece of the other)
        constexpr bool kTied = kPartAcc == kScores;
        float s[kScores];
        using Part = float[kPartAcc];
        const auto wait_k = [&]() { barriers.k_full[ring_k.stage].wait(ring_k.parity); };
        const auto wait_v = [&]() { barriers.v_full[ring_v.stage].wait(ring_v.parity); };
        const auto issue_qk = [&]() {
            multiply_qk_fp8<Config>(s, desc_q, wgmma_advance(desc_k, ring_k.stage * Shape::kKBytes));
        };
        const auto release_k = [&]() {
            release(barriers.k_empty[ring_k.stage]);
            ring_k.advance();
        };
        const auto release_v = [&]() {
            release(barriers.v_empty[ring_v.stage]);
            ring_v.advance();
        };
        // acc = alpha acc + P V, a part of the columns after the other
        const auto attend_values = [&]() {
            Part apart;
            Part& t = *reinterpret_cast<Part*>(kTied ? s : apart);
            barriers.v_full[ring_v.stage].wait(ring_v.parity);
            const float v_scale = Config::kScaleV ? barriers.v_scale[ring_v.stage] : 1;
#pragma unroll
            for (u32 part = 0; part < kParts; ++part) {
                const u32 offset = ring_v.stage * Shape::kVBytes + part * Shape::kPart * Shape::kSpanV;
                wgmma_fence();
                multiply_pv_fp8<Config>(t, p, wgmma_advance(desc_v, offset));
                wgmma_wait<0>(t);
                if (part + 1 == kParts) release_v();
#pragma unroll
                for (u32 i = 0; i < kPartAcc; ++i) {
                    float& sum = acc[part * kPartAcc + i];
                    sum = sum * softmax.alpha[i % 4 / 2] + (Config::kScaleV ? t[i] * v_scale : t[i]);
                }
            }
        };
        // Scale, softcap, mask and softmax of key tile n
        const auto softmax_step = [&](int n, float k_scale) {
            const auto key = [&]() { return current.tile.key(n); };
            float c = q_scale * k_scale;
            if constexpr (Config::kModify) {
                scores.template apply_softcap_alibi<Config::kSoftcap, false>(s, key(), c, operands.softcap, 0);
                c = 1;
            } else {
                c = fmaxf(c * kLog2E, kLeastScale);
            }
            if constexpr (FmhaTile<Config>::kProgram) {
                if (n < current.tile.partial) {
                    const MaskData data{mask.data, batch, head};
                    scores.template mask_program<typename Config::Mask>(s, key(), problem.s_k, data);
                }
            } else {
                const auto row_keys = [&](u32 h) {
                    return FmhaTile<Config>::kPacked ? current.row_keys[h] : current.keys_of_row(visible, h);
                };
                if (n >= current.full_end) scores.mask_right(s, key(), row_keys(0).end, row_keys(1).end);
                if (n < current.full_first) scores.mask_left(s, key(), row_keys(0).first, row_keys(1).first);
            }
            softmax.step(s, c);
            round_to_e4m3(s, p);
        };
#pragma unroll
        for (u32 i = 0; i < kAcc; ++i) acc[i] = 0;

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
            float k_scale = barriers.k_scale[ring_k.stage];
            turn.wait();
            wgmma_fence();
            issue_qk();
            turn.pass();
            wgmma_wait<0>(s);
            release_k();
            softmax_step(n, k_scale);

            // Main loop: P V of key tile n + 1, S and softmax of key tile n
            while (--n >= current.tile.first) {
                turn.wait();
                attend_values();
                // Placed here so that ptxas does not sink the additions below the next line, where S needs registers
                wait_k();
                k_scale = barriers.k_scale[ring_k.stage];
                wgmma_fence();
                issue_qk();
                turn.pass();
                wgmma_wait<0>(s);
                release_k();
                softmax_step(n, k_scale);
            }

            // P V of the last key tile
            release(barriers.q_empty[ring_q.stage][group]);
            attend_values();
        } else {
            release(barriers.q_empty[ring_q.stage][group]);
        }

        // Normalise O, write it and lse
        const float sink = operands.sinks == nullptr ? -infinity() : operands.sinks[head] * kLog2E;
        const float v_scale = Config::kScaleV ? 1 : *operands.v.of_head(batch, head / problem.heads_per_kv);
        const i64 lse_row = (i64(batch) * problem.heads + head) * problem.s_q;
        float norm[2], row_lse[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            norm[h] = softmax.finish(h, sink, row_lse[h]) * v_scale;
            const int row = current.row + int(fragment_row() + 8 * h);
            if (fragment_column() == 0 && row < problem.s_q) operands.lse[lse_row + row] = row_lse[h];
        }
#pragma unroll
        for (u32 i = 0; i < kAcc; ++i) acc[i] = norm[i % 4 / 2] == 0 ? 0 : acc[i] * norm[i % 4 / 2];
        result.store(acc, batch, head, current.row);
    }
    turn.end();
}

}  // namespace tilewright
