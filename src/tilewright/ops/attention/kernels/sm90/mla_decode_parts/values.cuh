// The two value warpgroups: O += P V, each for half of the columns of V, and O to global memory.
//
// Both products run on the same tensor cores, and while the scoring warpgroup computes a softmax it issues none.  So the right
// half waits until the scores of the next key tile are complete: it multiplies while their softmax runs.
#pragma once

#include <tilewright/epilogue.cuh>

#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

template <typename Config, u32 kHalf> struct ValueWarpgroup {
    using Shape = DecodeShape<Config>;
    using Element = typename Config::Element;
    static constexpr u32 kColumns = Shape::kDv / 2, kAcc = kColumns / 2, kSteps = Shape::kN / 16;
    static constexpr u32 kParts = 2;  // wgmmas of 128 columns: ptxas has one of 256 only with more registers at launch
    static constexpr u32 kLate = kHalf == 0 ? Config::kLateLeft : Config::kLateRight;  // steps behind the next scores

    DecodeBarriers<Config>& barriers;
    const RowScales<Config>& scales;
    u8 *quads, *slabs_p;
    Ring<Shape::kQuads> quad;
    Ring<Shape::kPStages> p;

    // P's weights of keys behind the length are zeros, but what such a slot holds may be NaN.
    __device__ void clear_rows(u8* v, u32 first) {
        const u32 thread = threadIdx.x % 128;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        for (u32 i = first * 8 + thread; i < 64 * 8; i += 128) {
#pragma unroll
            for (u32 slab = 0; slab < 4; ++slab) *reinterpret_cast<uint4*>(v + slab * kSlabBytes + i * 16) = zeros;
        }
        fence_proxy_async_shared();
        named_barrier_sync(1 + kHalf, 128);
    }

    __device__ void rescale(float (&acc)[kParts][kAcc / kParts]) const {
        const float factor[2] = {scales.factor[p.stage][fragment_row()], scales.factor[p.stage][fragment_row() + 8]};
#pragma unroll
        for (u32 i = 0; i < kAcc; ++i) acc[i / (kAcc / kParts)][i % (kAcc / kParts)] *= factor[i % 4 / 2];
    }

    static __device__ float at(const float (&acc)[kParts][kAcc / kParts], u32 i) { return acc[i / (kAcc / kParts)][i % (kAcc / kParts)]; }

    __device__ void release_p() {
        __syncwarp();
        if (lane_index() == 0) barriers.p_empty[p.stage].arrive();
    }

    // o: (batches * rows, 512); partial_o: (slot, 64, 512)
    __device__ void run(DecodeSchedule& schedule, Element* o, float* partial_o) {
        const DecodeProblem& problem = schedule.problem;
        const u64 desc_p = wgmma_descriptor<kRowBytes>(slabs_p);
        const u64 desc_v = wgmma_descriptor<kRowBytes>(quads, 8 * kRowBytes, kSlabBytes);
        while (schedule.next()) {
            const DecodeSegment& segment = schedule.segment();
            const int last = segment.end - 1;
            for (u32 i = 0; i < Shape::kQQuads; ++i) quad.advance();  // q's
            float acc[kParts][kAcc / kParts];
#pragma unroll
            for (u32 i = 0; i < kAcc; ++i) acc[i / (kAcc / kParts)][i % (kAcc / kParts)] = 0;
            for (int n = segment.begin; n <= last; ++n) {
                if (kHalf == 1) quad.advance();
                Ring<Shape::kPStages> next = p;
                next.advance();
                barriers.p_full[p.stage].wait(p.parity);
                if (scales.needed[p.stage][threadIdx.x / 32 % 4] != 0) rescale(acc);
                if (!Shape::kGather && n == last && segment.length < n * 64 + 64) {
                    clear_rows(quads + quad.stage * kQuadBytes, u32(max(segment.length - n * 64, 0)));
                }
                const u64 desc_ps = wgmma_advance(desc_p, p.stage * kSlabBytes);
                const u64 desc_vs = wgmma_advance(desc_v, quad.stage * kQuadBytes);
                const auto step = [&](u32 k) {
#pragma unroll
                    for (u32 i = 0; i < kParts; ++i) {
                        wgmma<kColumns / kParts, Element, Major::K, Major::Mn>(
                            acc[i], wgmma_advance(desc_ps, k * kWgmmaKBytes),
                            wgmma_advance(desc_vs, i * (4 / kParts) * kSlabBytes + k * 16 * kRowBytes), true);
                    }
                };
                wgmma_fence();
#pragma unroll
                for (u32 k = 0; k < kSteps; ++k) {
                    if (k + kLate == kSteps && n < last) barriers.s_done[next.stage].wait(next.parity);
                    step(k);
                }
                wgmma_commit();
                wgmma_wait<0>();
#pragma unroll
                for (u32 i = 0; i < kParts; ++i) wgmma_wait<0>(acc[i]);
                release_stage(barriers.quad_empty[quad.stage]);
                quad.advance();
                if (kHalf == 0) quad.advance();
                release_p();
                p = next;
            }

            // Normalise and write
            barriers.p_full[p.stage].wait(p.parity);
            rescale(acc);
            release_read(barriers.p_empty[p.stage]);
            p.advance();
            const int tile_row = segment.tile * 64 + int(fragment_row());
            const u32 column = kHalf * kColumns + fragment_column();
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const int row = tile_row + 8 * int(h);
                if (row >= problem.rows) continue;
                if (segment.slot < 0) {
                    Element* const out = o + (i64(segment.batch) * problem.rows + row) * Shape::kDv + column;
#pragma unroll
                    for (u32 j = 0; j < kAcc / 4; ++j) {
                        *reinterpret_cast<u32*>(out + 8 * j) = pack<Element>(at(acc, 4 * j + 2 * h), at(acc, 4 * j + 2 * h + 1));
                    }
                } else {
                    const i64 place = i64(segment.slot) * 64 + fragment_row() + 8 * h;
                    float* const out = partial_o + place * Shape::kDv + column;
#pragma unroll
                    for (u32 j = 0; j < kAcc / 4; ++j) {
                        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(at(acc, 4 * j + 2 * h), at(acc, 4 * j + 2 * h + 1));
                    }
                }
            }
        }
    }
};

}  // namespace tilewright
