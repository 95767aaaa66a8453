// The scoring warpgroup: S = q K^T of a key tile, its softmax, and P to shared memory.
//
// Most of q is the A operand in registers, read once for all key tiles of a segment: from shared memory it would be as many
// bytes as K, and with the values' the 128 bytes a cycle that shared memory delivers would be the bound.
#pragma once

#include <tilewright/epilogue.cuh>
#include <tilewright/mma_sync.cuh>
#include <tilewright/wgmma_rs.cuh>

#include "../fmha_forward/softmax.cuh"
#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

// The A operand of four wgmmas: a slab of q, 64 rows by 64 columns.
__device__ inline void load_slab(u32* q, const u8* slab) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        u32 m[4];
        ldmatrix_x4(m, shared_address(slab) + swizzle<kRowBytes>(row * kRowBytes + 32 * k + lane / 16 * 16));
#pragma unroll
        for (u32 i = 0; i < 4; ++i) q[4 * k + i] = m[i];
    }
}

template <typename Config> struct ScoringWarpgroup {
    using Shape = DecodeShape<Config>;
    using Element = typename Config::Element;
    static constexpr u32 kScores = Shape::kN / 2;
    // The last wgmmas of S are a group of their own: when only they are in flight the right half may issue its P V
    static constexpr u32 kTail = Config::kTail;

    DecodeBarriers<Config>& barriers;
    RowScales<Config>& scales;
    const KeyMasks<Config>& masks;
    u8 *quads, *ropes, *slabs_q, *slabs_p;
    Ring<Shape::kQuads> quad;
    Ring<Shape::kRopes> rope;
    Ring<Shape::kPStages> p;

    // S of one key tile: 16 steps for each quad, then four for the rotated part.
    __device__ void multiply(float (&s)[kScores], const u32* q, u64 desc_q, u64 desc_quads, u64 desc_ropes) {
        u64 k_slabs = 0;
#pragma unroll
        for (u32 i = 0; i < kScores; ++i) s[i] = 0;
#pragma unroll
        for (u32 i = 0; i < 36; ++i) {
            const u32 slab = i / 4, offset = i % 4 * kWgmmaKBytes;
            if (i % 16 == 0) {
                if (i < 32) {
                    barriers.quad_full[quad.stage].wait(quad.parity);
                    k_slabs = wgmma_advance(desc_quads, quad.stage * kQuadBytes);
                    quad.advance();
                } else {
                    barriers.rope_full[rope.stage].wait(rope.parity);
                    k_slabs = wgmma_advance(desc_ropes, rope.stage * kSlabBytes);
                }
                if (i == 0) wgmma_fence();
            }
            if (i + kTail == 36) wgmma_commit();
            const u64 k = wgmma_advance(k_slabs, slab % 4 * kSlabBytes + offset);
            if (slab < Shape::kQRegisters) {
                wgmma_rs<64, Element>(s, q + 4 * i, k);
            } else {
                wgmma<64, Element>(s, wgmma_advance(desc_q, (slab - Shape::kQRegisters) * kSlabBytes + offset), k, true);
            }
        }
        wgmma_commit();
    }

    // Hands over a stage of P and of its row scales.
    __device__ void pass() {
        __syncwarp();
        if (lane_index() == 0) barriers.p_full[p.stage].arrive();
        p.advance();
    }

    // -infinity where no index names a key.
    __device__ void hide_unseen(float (&s)[kScores], u32 stage) const {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 seen = masks.seen[stage][j] >> fragment_column();
            if (masks.seen[stage][j] == 0xffff) continue;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                s[8 * j + i] = seen >> (i / 4 * 8 + i % 2) & 1 ? s[8 * j + i] : -infinity();
            }
        }
        __syncwarp();
    }

    __device__ void write_factors(const float (&factor)[2]) {
        if (fragment_column() == 0) {
            scales.factor[p.stage][fragment_row()] = factor[0], scales.factor[p.stage][fragment_row() + 8] = factor[1];
        }
    }

    // lse: of whole row tiles (batches * rows); partial_lse: (slot, 64)
    __device__ void run(DecodeSchedule& schedule, float scale, const float* sinks, float* lse, float* partial_lse) {
        const DecodeProblem& problem = schedule.problem;
        const u64 desc_q = wgmma_descriptor<kRowBytes>(slabs_q), desc_quads = wgmma_descriptor<kRowBytes>(quads);
        const u64 desc_ropes = wgmma_descriptor<kRowBytes>(ropes);
        const float c = scale * kLog2E, slack = kSlack / c;
        u32 q_parity = 0;
        for (; schedule.next(); q_parity ^= 1) {
            const DecodeSegment& segment = schedule.segment();
            const int last = segment.end - 1;
            // q: the left quad and a part of the right one to registers
            u32 q[16 * Shape::kQRegisters];
#pragma unroll
            for (u32 half = 0; half < Shape::kQQuads; ++half) {
                barriers.quad_full[quad.stage].wait(quad.parity);
#pragma unroll
                for (u32 s = 4 * half; s < (half == 0 ? 4 : Shape::kQRegisters); ++s) {
                    load_slab(q + 16 * s, quads + quad.stage * kQuadBytes + s % 4 * kSlabBytes);
                }
                release_read(barriers.quad_empty[quad.stage]);
                quad.advance();
            }
            barriers.q_full.wait(q_parity);

            const auto row_of = [&](u32 h) {
                return segment.tile * 64 + int(fragment_row() + 8 * h);
            };
            const int all_see = problem.causal ? segment.length - problem.s_q + 1 : segment.length;  // keys that all rows see

            OnlineSoftmax<kScores> softmax;
            softmax.reset();
            float s[kScores];
            for (int n = segment.begin; n <= last; ++n) {
                const u32 rope_stage = rope.stage;
                multiply(s, q, desc_q, desc_quads, desc_ropes);
                wgmma_wait<(kTail > 0)>();
                if (lane_index() == 0) barriers.s_done[p.stage].arrive();
                wgmma_wait<0>(s);
                if constexpr (Config::kSparse) hide_unseen(s, rope_stage);
                release_stage(barriers.rope_empty[rope_stage]);
                rope.advance();
                if (n == last && lane_index() == 0) barriers.q_empty.arrive();

                // Mask and softmax
                if ((n + 1) * 64 > all_see) {
                    const int column = n * 64 + int(fragment_column());
                    int end[2];
#pragma unroll
                    for (u32 h = 0; h < 2; ++h) {
                        const int later = problem.causal ? max(problem.s_q - 1 - row_of(h) / problem.heads, 0) : 0;
                        end[h] = segment.length - later;
                    }
#pragma unroll
                    for (u32 i = 0; i < kScores; ++i) {
                        s[i] = column + int(i / 4 * 8 + i % 2) < end[i % 4 / 2] ? s[i] : -infinity();
                    }
                }
                const bool rescale = softmax.step(s, c, slack);

                // P, once the stage is free
                barriers.p_empty[p.stage].wait(p.parity ^ 1);
                if (lane_index() == 0) scales.needed[p.stage][threadIdx.x / 32 % 4] = rescale;
                if (rescale) write_factors(softmax.alpha);
                const u32 slab = shared_address(slabs_p + p.stage * kSlabBytes);
#pragma unroll
                for (u32 j = 0; j < kScores / 8; ++j) stage_columns<Element, kRowBytes>(s + 8 * j, slab, 32 * j);
                fence_proxy_async_shared();
                pass();
            }

            // The factors that normalise O, as one more stage, and lse
            float norm[2];
            barriers.p_empty[p.stage].wait(p.parity ^ 1);
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const int row = row_of(h);
                const bool whole = segment.slot < 0, exists = row < problem.rows;
                const bool has_sink = whole && exists && sinks != nullptr;
                float row_lse;
                norm[h] = softmax.finish(h, has_sink ? sinks[row % problem.heads] * kLog2E : -infinity(), row_lse);
                if (fragment_column() == 0 && exists) {
                    if (whole) {
                        lse[i64(segment.batch) * problem.rows + row] = row_lse;
                    } else {
                        partial_lse[segment.slot * 64 + fragment_row() + 8 * h] = row_lse;
                    }
                }
            }
            write_factors(norm);
            if (lane_index() == 0) barriers.s_done[p.stage].arrive();
            pass();
        }
    }
};

}  // namespace tilewright
