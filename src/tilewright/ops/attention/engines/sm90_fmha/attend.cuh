// What the warps of a block do: two threads copy (copies.cuh); the warpgroups multiply, and compute the softmax of
// their queries between the products.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_registers.cuh>

#include "copies.cuh"
#include "scores.cuh"

namespace tilewright {

// Warpgroups issue their products one after another.
template <u32 kGroups, bool kTurns> struct Turn {
    u32 group;

    __device__ void start() const {
        if (kTurns && group == kGroups - 1) arrive_at(1, 256);
    }
    __device__ void take() const {
        if (kTurns) sync_threads(1 + group, 256);
    }
    __device__ void pass() const {
        if (kTurns) arrive_at(group + 1 == kGroups ? 1 : group + 2, 256);
    }
    __device__ void end() const {  // of the turns one is left over
        if (group == 0) take();
    }
};

// s = Q K^T, of a warpgroup.
template <typename Config> __device__ inline void multiply_qk(float (&s)[Config::kBlockN / 2], u64 q, u64 k) {
    using Shape = FmhaShape<Config>;
#pragma unroll
    for (u32 i = 0; i < Shape::kD / 16; ++i) {
        const u32 box = i / 4, within = i % 4 * kWgmmaKBytes;
        wgmma<Shape::kN, typename Config::Element>(s, wgmma_advance(q, box * kBoxBytes + within),
                                                   wgmma_advance(k, box * Shape::kN * kSpan + within), i > 0);
    }
    wgmma_commit();
}

// o += P V.
template <typename Config>
__device__ inline void multiply_pv(float (&o)[Config::kDv / 2], const u32 (&p)[Config::kBlockN / 4], u64 v) {
    using Shape = FmhaShape<Config>;
#pragma unroll
    for (u32 i = 0; i < Shape::kN / 16; ++i) {
        const u64 keys = wgmma_advance(v, i * 16 * kSpan);
        wgmma_registers<Shape::kDv, typename Config::Element, Major::Mn>(o, p + 4 * i, keys);
    }
    wgmma_commit();
}

// The kernel behind its parameters.
template <typename Config, typename Maps>
__device__ __forceinline__ void attend(
    const Maps& maps, float* lse, const float* sinks, const float* slopes, const int* mask, const FmhaProblem& problem,
    const FmhaLists& lists, float scale, float softcap) {
    using Shape = FmhaShape<Config>;
    using Element = typename Config::Element;
    constexpr u32 kGroups = Shape::kGroups, kN = Shape::kN, kScores = kN / 2, kSums = Shape::kDv / 2;
    constexpr bool kUneven = !FmhaTile<Config>::kProgram && kGroups * kRowsOfGroup > kN;

    extern __shared__ __align__(1024) u8 stages_q[];
    u8* const stages_k = stages_q + Shape::kQStages * kGroups * Shape::kQBytes;
    u8* const stages_v = stages_k + Shape::kStages * Shape::kKBytes;
    __shared__ FmhaBarriers<Config> barriers;

    const u32 group = warp_index() / 4;
    if (threadIdx.x == 0) {
        barriers.init();
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int s_q = problem.s_q, s_k = problem.s_k, heads = problem.heads;
    const int left = problem.left, right = problem.right;

    if (group == kGroups) {
        give_registers<kGroups == 3 ? 32 : 40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch(maps.k), tma_prefetch(maps.v);
            if constexpr (Maps::kRotated) tma_prefetch(maps.k_pe);
            bring_keys<Config>(problem, lists, barriers, maps, stages_k, stages_v);
        } else if (warp_index() == 4 * kGroups + 1 && elect_one()) {
            tma_prefetch(maps.q), tma_prefetch(maps.o);
            if constexpr (Maps::kRotated) tma_prefetch(maps.q_pe);
            bring_queries<Config>(problem, lists, barriers, maps, stages_q);
        }
        return;
    }

    take_registers<kGroups == 3 ? 160 : 232>();
    const u64 first_k = wgmma_descriptor<kSpan>(stages_k);
    const u64 first_v = wgmma_descriptor<kSpan>(stages_v, 8 * kSpan, kN * kSpan);
    const float c = Config::kModify ? 1 : scale * kLog2E, slack = Config::kModify ? kSlack : kSlack / c;
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };
    const Turn<kGroups, (Config::kTurns && kGroups > 1)> turn{group};
    turn.start();

    Ring<Shape::kQStages> ring_q;
    Ring<Shape::kStages> ring_k, ring_v;
    FmhaSchedule<Config> schedule(problem, lists);
    for (FmhaTile<Config> tile; schedule.next(tile); ring_q.advance()) {
        u8* const own = stages_q + (ring_q.stage * kGroups + group) * Shape::kQBytes;
        const u64 q = wgmma_descriptor<kSpan>(own);
        const int row = tile.row + int(group * kRowsOfGroup);  // first of this warpgroup
        const FmhaScores<kScores> scores{problem.position(row + int(fragment_row()))};
        const float slope = Config::kSlope ? slopes[tile.head] * kLog2E : 0;
        // Of a band: tiles of keys from `whole_end` on, and below `whole`, have a key that one of our rows does not see
        const int last_row = row + int(kRowsOfGroup) - 1;
        const int keys_end = right < 0 ? s_k : min(s_k, max(0, problem.position(row) + right + 1));
        const int keys_begin = left < 0 ? 0 : max(0, problem.position(last_row) - left);
        const int whole_end = keys_end / int(kN), whole = (keys_begin + int(kN) - 1) / int(kN);
        OnlineSoftmax<kScores> softmax;
        softmax.reset();

        float s[kScores], o[kSums];
        u32 p[kScores / 2];
        const auto normalise = [&](int at) {
            if constexpr (Config::kModify) {
                scores.template modify<Config::kSoftcap, Config::kSlope>(s, tile.key(at), scale, softcap, slope);
            }
            if constexpr (FmhaTile<Config>::kProgram) {
                if (at < tile.partial) {
                    const MaskData data{mask, tile.batch, tile.head};
                    scores.template cut<typename Config::Mask>(s, tile.key(at), s_k, data);
                }
            } else {
                if (at >= whole_end) scores.cut_right(s, tile.key(at), problem);
                if (at < whole) scores.cut_left(s, tile.key(at), problem);
            }
            return softmax.step(s, c, slack);
        };
        const auto round = [&]() {
#pragma unroll
            for (u32 i = 0; i < kScores / 2; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        };
#pragma unroll
        for (u32 i = 0; i < kSums; ++i) o[i] = 0;

        barriers.q_full[ring_q.stage][group].wait(ring_q.parity);
        if (tile.first < tile.end) {
            int at = tile.end - 1;
            if constexpr (kUneven) {  // tiles that the warpgroups behind this one alone see; it keeps its turns
                const int last_end = right < 0 ? s_k : min(s_k, problem.position(last_row) + right + 1);
                for (const int end = max((last_end + int(kN) - 1) / int(kN), tile.first + 1); at >= end; --at) {
                    barriers.k_full[ring_k.stage].wait(ring_k.parity);
                    turn.take();
                    turn.pass();
                    release(barriers.k_empty[ring_k.stage]);
                    ring_k.advance();
                    barriers.v_full[ring_v.stage].wait(ring_v.parity);
                    release(barriers.v_empty[ring_v.stage]);
                    ring_v.advance();
                }
            }
            barriers.k_full[ring_k.stage].wait(ring_k.parity);
            turn.take();
            wgmma_fence();
            multiply_qk<Config>(s, q, wgmma_advance(first_k, ring_k.stage * Shape::kKBytes));
            turn.pass();
            wgmma_wait<0>(s);
            release(barriers.k_empty[ring_k.stage]);
            ring_k.advance();
            normalise(at);
            round();
            if (at > tile.first) barriers.k_full[ring_k.stage].wait(ring_k.parity);
            while (--at >= tile.first) {
                turn.take();
                wgmma_fence();
                multiply_qk<Config>(s, q, wgmma_advance(first_k, ring_k.stage * Shape::kKBytes));
                barriers.v_full[ring_v.stage].wait(ring_v.parity);
                multiply_pv<Config>(o, p, wgmma_advance(first_v, ring_v.stage * Shape::kVBytes));
                turn.pass();
                wgmma_wait<1>(s);
                release(barriers.k_empty[ring_k.stage]);
                ring_k.advance();
                const bool rescale = normalise(at);
                // Here it also keeps the assembler from computing P behind the line after
                if (at > tile.first) barriers.k_full[ring_k.stage].wait(ring_k.parity);
                wgmma_wait<0>(o);
                release(barriers.v_empty[ring_v.stage]);
                ring_v.advance();
                if (rescale) {
#pragma unroll
                    for (u32 i = 0; i < kSums; ++i) o[i] *= softmax.factor[i % 4 / 2];
                }
                round();
            }
            barriers.v_full[ring_v.stage].wait(ring_v.parity);
            wgmma_fence();
            multiply_pv<Config>(o, p, wgmma_advance(first_v, ring_v.stage * Shape::kVBytes));
            wgmma_wait<0>(o);
            release(barriers.v_empty[ring_v.stage]);
            ring_v.advance();
        }

        const float sink = sinks == nullptr ? -infinity() : sinks[tile.head] * kLog2E;
        float inverse[2], logs[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            inverse[h] = softmax.finish(h, sink, logs[h]);
            const int at = row + int(fragment_row() + 8 * h);
            if (fragment_column() == 0 && at < s_q) lse[(i64(tile.batch) * heads + tile.head) * s_q + at] = logs[h];
        }
#pragma unroll
        for (u32 i = 0; i < kSums; ++i) o[i] *= inverse[i % 4 / 2];
        sync_threads(8 + group, 128);  // no warp of ours reads Q any more
#pragma unroll
        for (u32 j = 0; j < kSums / 8; ++j) stage_columns<Element, kSpan>(o + 8 * j, shared_address(own), 32 * j);
        fence_shared_for_async();
        __syncwarp();
        release(barriers.o_full[ring_q.stage][group]);
    }
    turn.end();
}

}  // namespace tilewright
