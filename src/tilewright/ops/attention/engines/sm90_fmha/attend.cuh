// What the warps of a block do: two threads copy (copies.cuh); the warpgroups multiply, and compute the softmax of
// their queries between the products.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_rs.cuh>

#include "copies.cuh"
#include "scores.cuh"

namespace tilewright {

// Warpgroups issue their products one after another.
template <u32 kGroups, bool kTurns> struct Turn {
    u32 group;

    __device__ void start() const {
        if (kTurns && group == kGroups - 1) named_barrier_arrive(1, 256);
    }
    __device__ void take() const {
        if (kTurns) named_barrier_sync(1 + group, 256);
    }
    __device__ void pass() const {
        if (kTurns) named_barrier_arrive(group + 1 == kGroups ? 1 : group + 2, 256);
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
        wgmma_rs<Shape::kDv, typename Config::Element, Major::Mn>(o, p + 4 * i, keys);
    }
    wgmma_commit();
}

// A tile of queries, as a warpgroup sees it.
template <typename Config> struct FmhaVisit {
    static constexpr int kN = Config::kBlockN;

    FmhaTile<Config> tile;
    int row;               // first of this warpgroup
    // Unless tiles of keys are listed:
    int whole, whole_end;  // between these tiles each of the warpgroup's rows sees every key
    int end;               // from here on none sees one
    Interval own[2];       // of packed sequences: the keys that this thread's rows see

    // The next one; false if there is none.
    __device__ bool draw(FmhaSchedule<Config>& schedule, const FmhaKeys<typename Config::Mask>& keys, u32 group) {
        if (!schedule.next(tile)) return false;
        row = tile.row + int(group * kRowsOfGroup);
        if constexpr (!FmhaTile<Config>::kListed) {
            const Interval top = keys.of(row), bottom = keys.of(row + int(kRowsOfGroup) - 1);
            whole = (bottom.first + kN - 1) / kN, whole_end = top.end / kN;
            end = max((bottom.end + kN - 1) / kN, tile.first + 1);
            own[0] = seen(keys, 0), own[1] = seen(keys, 1);
        }
        return true;
    }
    __device__ Interval seen(const FmhaKeys<typename Config::Mask>& keys, u32 h) const {
        return keys.of(row + int(fragment_row() + 8 * h));
    }
};

// The kernel behind its parameters.
template <typename Config, typename Maps>
__device__ __forceinline__ void attend(
    const Maps& maps, float* lse, const float* sinks, const float* slopes, const FmhaProblem& problem, const FmhaMask& mask,
    float scale, float softcap) {
    using Shape = FmhaShape<Config>;
    using Element = typename Config::Element;
    constexpr u32 kGroups = Shape::kGroups, kN = Shape::kN, kScores = kN / 2, kSums = Shape::kDv / 2;
    constexpr bool kUneven = !FmhaTile<Config>::kListed && kGroups * kRowsOfGroup > kN;
    constexpr u32 kRegisters = kGroups == 3 ? 160 : 232;  // of a thread: scores, P, sums, and all else
    // The next tile of queries is found beside the last products of this one, where registers hold two (64: all but
    // scores, P and sums).  Not of lists: measured, it costs 7 % there
    constexpr bool kEarly = !FmhaTile<Config>::kListed && kScores * 3 / 2 + kSums + 64 <= kRegisters;

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
    griddepcontrol_wait();
    launch_dependents();

    if (group == kGroups) {
        warpgroup_reg_dealloc<kGroups == 3 ? 32 : 40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch_descriptor(maps.k), tma_prefetch_descriptor(maps.v);
            if constexpr (Maps::kRotated) tma_prefetch_descriptor(maps.k_pe);
            bring_keys<Config>(problem, mask, barriers, maps, stages_k, stages_v);
        } else if (warp_index() == 4 * kGroups + 1 && elect_one()) {
            tma_prefetch_descriptor(maps.q), tma_prefetch_descriptor(maps.o);
            if constexpr (Maps::kRotated) tma_prefetch_descriptor(maps.q_pe);
            bring_queries<Config>(problem, mask, barriers, maps, stages_q);
        }
        return;
    }

    warpgroup_reg_alloc<kRegisters>();
    const u64 first_k = wgmma_descriptor<kSpan>(stages_k);
    const u64 first_v = wgmma_descriptor<kSpan>(stages_v, 8 * kSpan, kN * kSpan);
    const float c = Config::kModify ? 1 : scale * kLog2E, slack = Config::kModify ? kSlack : kSlack / c;
    const auto release = [](Barrier& empty) {
        if (lane_index() == 0) empty.arrive();
    };
    const Turn<kGroups, (Config::kTurns && kGroups > 1)> turn{group};
    turn.start();

    const FmhaKeys<typename Config::Mask> keys(problem, mask);
    FmhaSchedule<Config> schedule(problem, mask);
    Ring<Shape::kQStages> ring_q;
    Ring<Shape::kStages> ring_k, ring_v;
    FmhaVisit<Config> visit, next;
    bool more = kEarly && next.draw(schedule, keys, group);
    for (;; ring_q.advance()) {
        if constexpr (kEarly) {
            if (!more) break;
            visit = next;
        } else if (!visit.draw(schedule, keys, group)) {
            break;
        }
        u8* const own = stages_q + (ring_q.stage * kGroups + group) * Shape::kQBytes;
        const u64 q = wgmma_descriptor<kSpan>(own);
        const FmhaScores<kScores> scores{problem.position(visit.row + int(fragment_row()))};
        const float slope = Config::kSlope ? slopes[visit.tile.head] * kLog2E : 0;
        OnlineSoftmax<kScores> softmax;
        softmax.reset();

        float s[kScores], o[kSums];
        u32 p[kScores / 2];
        const auto wait_for_keys = [&]() { barriers.k_full[ring_k.stage].wait(ring_k.parity); };
        const auto multiply_keys = [&]() {
            multiply_qk<Config>(s, q, wgmma_advance(first_k, ring_k.stage * Shape::kKBytes));
        };
        const auto multiply_values = [&]() {
            barriers.v_full[ring_v.stage].wait(ring_v.parity);
            multiply_pv<Config>(o, p, wgmma_advance(first_v, ring_v.stage * Shape::kVBytes));
        };
        const auto pass_keys = [&]() {
            release(barriers.k_empty[ring_k.stage]);
            ring_k.advance();
        };
        const auto pass_values = [&]() {
            release(barriers.v_empty[ring_v.stage]);
            ring_v.advance();
        };
        const auto normalise = [&](int at) {
            const auto key = [&]() { return visit.tile.key(at); };
            if constexpr (Config::kModify) {
                scores.template modify<Config::kSoftcap, Config::kSlope>(s, key(), scale, softcap, slope);
            }
            if constexpr (FmhaTile<Config>::kListed) {
                if (at < visit.tile.partial) {
                    const MaskData data{mask.numbers, visit.tile.batch, visit.tile.head};
                    scores.template cut<typename Config::Mask>(s, key(), problem.s_k, data);
                }
            } else {
                const auto seen = [&](u32 h) { return FmhaTile<Config>::kPacked ? visit.own[h] : visit.seen(keys, h); };
                if (at >= visit.whole_end) scores.cut_right(s, key(), seen(0).end, seen(1).end);
                if (at < visit.whole) scores.cut_left(s, key(), seen(0).first, seen(1).first);
            }
            return softmax.step(s, c, slack);
        };
        const auto round = [&]() {
#pragma unroll
            for (u32 i = 0; i < kScores / 2; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        };
#pragma unroll
        for (u32 i = 0; i < kSums; ++i) o[i] = 0;
        const auto draw_next = [&]() { more = next.draw(schedule, keys, group); };

        barriers.q_full[ring_q.stage][group].wait(ring_q.parity);
        if (!visit.tile.empty()) {
            int at = visit.tile.end - 1;
            if constexpr (kUneven) {  // tiles that the warpgroups behind this one alone see; it keeps its turns
                for (; at >= visit.end; --at) {
                    wait_for_keys();
                    turn.take();
                    turn.pass();
                    pass_keys();
                    barriers.v_full[ring_v.stage].wait(ring_v.parity);
                    pass_values();
                }
            }
            wait_for_keys();
            turn.take();
            wgmma_fence();
            multiply_keys();
            turn.pass();
            wgmma_wait<0>(s);
            pass_keys();
            normalise(at);
            round();
            if (at > visit.tile.first) wait_for_keys();
            while (--at >= visit.tile.first) {
                turn.take();
                wgmma_fence();
                multiply_keys();
                multiply_values();
                turn.pass();
                wgmma_wait<1>(s);
                pass_keys();
                const bool rescale = normalise(at);
                // Here it also keeps the assembler from computing P behind the line after
                if (at > visit.tile.first) wait_for_keys();
                wgmma_wait<0>(o);
                pass_values();
                if (rescale) {
#pragma unroll
                    for (u32 i = 0; i < kSums; ++i) o[i] *= softmax.factor[i % 4 / 2];
                }
                round();
            }
            wgmma_fence();
            multiply_values();
            if constexpr (kEarly) draw_next();
            wgmma_wait<0>(o);
            pass_values();
        }

        const float sink = sinks == nullptr ? -infinity() : sinks[visit.tile.head] * kLog2E;
        const i64 line = (i64(visit.tile.batch) * problem.heads + visit.tile.head) * problem.s_q;
        float inverse[2], logs[2];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            inverse[h] = softmax.finish(h, sink, logs[h]);
            const int at = visit.row + int(fragment_row() + 8 * h);
            if (fragment_column() == 0 && at < problem.s_q) lse[line + at] = logs[h];
        }
#pragma unroll
        for (u32 i = 0; i < kSums; ++i) o[i] *= inverse[i % 4 / 2];
        named_barrier_sync(8 + group, 128);  // no warp of ours reads Q any more
#pragma unroll
        for (u32 j = 0; j < kSums / 8; ++j) stage_columns<Element, kSpan>(o + 8 * j, shared_address(own), 32 * j);
        fence_proxy_async_shared();
        __syncwarp();
        release(barriers.o_full[ring_q.stage][group]);
        if constexpr (kEarly) {
            if (visit.tile.empty()) draw_next();
        }
    }
    turn.end();
}

}  // namespace tilewright
