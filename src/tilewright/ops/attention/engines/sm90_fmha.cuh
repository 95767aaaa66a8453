// O = softmax(scale Q K^T) V under a mask, and the log of the sums: attention forward for Hopper.
//
// A block stays on its multiprocessor and walks over tiles of 64 queries a warpgroup.  S = Q K^T of a tile of kBlockN
// keys is multiplied from shared memory; its softmax runs in registers, where P stays as the A of P V.  Two things hide
// the softmax, which the tensor cores cannot do:
// - a warpgroup has S of the next keys and P V of these in flight at once, and computes the softmax of the one while
//   the other still multiplies;
// - warpgroups take turns at issuing, so that while one computes its softmax the others' products run.
// One thread brings K and V through two rings, another Q, and takes O away, which leaves through the memory of Q.  All
// walk over the same tiles (schedule.cuh).  A mask is looked at in those tiles alone that it cuts.  The order of work
// is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608); the offset of the softmax may be stale (softmax.cuh), so
// O is rescaled in few tiles only.
//
// Config: kD, kDv (multiples of 16; D and D_v rounded up), kGroups, kBlockN, kStages, kQStages; kTurns; kModify (scores
// are brought to units of log2 before the softmax: always right; needed for kSoftcap, kSlope, and where scale <= 0);
// Element; Mask (mask_program.cuh; NoProgram: the band left, right) and Index, of its lists of tiles.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/wgmma_registers.cuh>

#include "sm90_fmha/copies.cuh"
#include "sm90_fmha/scores.cuh"

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

template <typename Config>
__global__ void __launch_bounds__(FmhaShape<Config>::kThreads, 1) sm90_fmha(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* lse, const float* sinks,
    const float* slopes, const int* mask, const int* counts, const void* indices, int s_q, int s_k, int heads,
    int batches, int sharing, int left, int right, bool paired, int lists_of_batch, int lists_of_head, int pitch,
    float scale, float softcap) {
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
    const FmhaProblem problem{s_q, s_k, heads, batches, sharing, left, right, paired};
    const FmhaLists lists{counts, indices, lists_of_batch, lists_of_head, pitch};

    if (group == kGroups) {
        give_registers<kGroups == 3 ? 32 : 40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch(map_k), tma_prefetch(map_v);
            bring_keys<Config>(problem, lists, barriers, map_k, map_v, stages_k, stages_v);
        } else if (warp_index() == 4 * kGroups + 1 && elect_one()) {
            tma_prefetch(map_q), tma_prefetch(map_o);
            bring_queries<Config>(problem, lists, barriers, map_q, map_o, stages_q);
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
