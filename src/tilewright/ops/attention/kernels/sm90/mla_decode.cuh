// Latent attention of a few new tokens over a cache of latents, for Hopper.
//
// A block has 64 query rows (tokens times heads) and goes over tiles of 64 keys.  O, 64 x 512 in float, is half of the register
// file, so each kind of work has its own warpgroup:
// - the copying warp fetches keys by TMA (copies.cuh);
// - the scoring warpgroup computes S = q K^T with most of q in registers, the softmax, and writes P to shared memory
//   (scores.cuh);
// - two value warpgroups compute O += P V for half of the columns each; V is the first 512 columns of the same keys
//   (values.cuh).
// Work is divided on the device (schedule.cuh); row tiles that were cut are joined by a second kernel (mla_decode_combine.cuh).
// A tile of 64 rows and 64 keys is 2176 cycles of the tensor cores and about 2000 of the shared memory.  The idea of two
// column halves that share P is FlashMLA's (DeepSeek-AI 2025), where the halves also compute the scores in turns.
//
// Config: kQuads, kRopes, kQRegisters, kTail (steps of S of 36 that the right half need not wait for), kLateLeft and
// kLateRight (steps of P V of four that wait for the next scores), kAhead (key tiles that gathering fetches ahead into the
// L2), kBoxRows, kPacked, kSparse, Element.
#pragma once

#include "mla_decode_parts/copies.cuh"
#include "mla_decode_parts/gather.cuh"
#include "mla_decode_parts/scores.cuh"
#include "mla_decode_parts/values.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(DecodeShape<Config>::kThreads, 1) sm90_mla_decode(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_kv, const u8* cache,
    typename Config::Element* o, float* lse, float* partial_o, float* partial_lse, const int* lengths,
    const int* block_table, const int* indices, const float* sinks, int batches, int tiles, int rows, int heads, int s_q,
    int capacity, int each, int table_stride, int page_size, int pages, int page_units, int row_units, bool causal,
    int blocks, int least, int cost, float scale) {
    using Shape = DecodeShape<Config>;
    extern __shared__ __align__(1024) u8 quads[];
    u8* const ropes = quads + Shape::kQuads * kQuadBytes;
    u8* const slabs_q = ropes + Shape::kRopes * kSlabBytes;
    u8* const slabs_p = slabs_q + Shape::kQSlabs * kSlabBytes;
    __shared__ DecodeBarriers<Config> barriers;
    __shared__ RowScales<Config> scales;
    __shared__ KeyMasks<Config> masks;
    __shared__ DecodePlace places[Shape::kThreads / 32];

    const u32 role = warp_index() / 4;
    if (threadIdx.x == 0) {
        barriers.init();
        fence_barrier_init();
        tma_prefetch_descriptor(map_q);
        if (!Shape::kGather) tma_prefetch_descriptor(map_kv);
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();

    const DecodeProblem problem{lengths, batches, tiles, rows, heads, s_q, capacity, each, causal, blocks, least, cost};
    const int block = int(blockIdx.x);
    if (role == kCopying) {
        warpgroup_reg_dealloc<Shape::kCopyingRegisters>();
        if constexpr (Shape::kGather) {
            DecodeSchedule schedule(problem, places[warp_index()], block);
            const GatherCache gathered{cache, block_table, indices, table_stride, page_size, pages, page_units, row_units};
            GatherWarpgroup<Config> copies{map_q, gathered, barriers, masks, quads, ropes, slabs_q, warp_index() % 4, lane_index()};
            copies.run(schedule);
        } else if (warp_index() % 4 == 0) {
            DecodeSchedule schedule(problem, places[warp_index()], block);
            const DecodeCache cache{block_table, table_stride, page_size, pages};
            CopyWarp<Config> copies{map_q, map_kv, cache, barriers, quads, ropes, slabs_q, lane_index()};
            copies.run(schedule);
        }
    } else if (role == kScoring) {
        if constexpr (Shape::kScoringRegisters > 128) warpgroup_reg_alloc<Shape::kScoringRegisters>();
        DecodeSchedule schedule(problem, places[warp_index()], block);
        ScoringWarpgroup<Config> scoring{barriers, scales, masks, quads, ropes, slabs_q, slabs_p};
        scoring.run(schedule, scale, sinks, lse, partial_lse);
    } else {
        warpgroup_reg_alloc<Shape::kValueRegisters>();
        DecodeSchedule schedule(problem, places[warp_index()], block);
        if (role == kLeft) {
            ValueWarpgroup<Config, 0> values{barriers, scales, quads, slabs_p};
            values.run(schedule, o, partial_o);
        } else {
            ValueWarpgroup<Config, 1> values{barriers, scales, quads, slabs_p};
            values.run(schedule, o, partial_o);
        }
    }
}

}  // namespace tilewright
