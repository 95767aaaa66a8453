// The producer warpgroup: warp 0 schedules key tiles and loads their operands; one warp per output stage stores results.
#pragma once

#include <tilewright/copies.cuh>

#include "schedule.cuh"

namespace tilewright {

// Loads boxes of 64 columns each, one after another in shared memory.
__device__ inline void load_boxes(
    u8* smem, const TensorMap& map, Barrier& full, u32 boxes, u32 box_bytes, int row, int head, int batch) {
    full.arrive_and_expect_tx(boxes * box_bytes);
#pragma unroll 1
    for (u32 i = 0; i < boxes; ++i) tma_load(smem + i * box_bytes, map, full, int(i * (kSwizzle / 2)), row, head, batch);
}

// Loads K and V once per key tile; Q, dO, lse and delta through a ring.
template <typename Config>
__device__ inline void load_operands(
    const BackwardProblemOf<Config>& problem, BackwardBarriers<Config>& barriers, BackwardTile (&tiles)[2], u8* smem,
    const TensorMap& map_q, const TensorMap& map_k, const TensorMap& map_v, const TensorMap& map_do,
    const TensorMap& map_stats, int* counter) {
    using Shape = BackwardShape<Config>;
    Ring<2> ring_tile;
    Ring<1> ring_kv;
    Ring<Shape::kStages> ring;  // stages of Q and of dO advance together
    for (;;) {
        // Draw the next work item and publish it
        const int number = atomicAdd(counter, 1);
        BackwardTile& tile = tiles[ring_tile.stage];
        barriers.tile_empty[ring_tile.stage].wait(ring_tile.parity ^ 1);
        tile.assign<Shape::kM>(problem, number);
        barriers.tile_full[ring_tile.stage].arrive();
        ring_tile.advance();
        if (tile.key < 0) return;

        bool kv_loaded = false;
#pragma unroll 1
        for (QueryTileIterator<Config::kPacked> query(tile); query.more(tile); query.next(tile)) {
            // Load Q, lse and delta
            const int m = query.m(tile), head = tile.head * problem.heads_per_kv + query.head;
            Barrier& q_full = barriers.q_full[ring.stage];
            barriers.q_empty[ring.stage].wait(ring.parity ^ 1);
            q_full.arrive_and_expect_tx(Shape::kStatsBytes);
            tma_load(smem + Shape::kStatsOffset + ring.stage * Shape::kStatsBytes, map_stats, q_full, 0,
                     tile.dq_tile + query.head * problem.template query_tile_count<Shape::kM>() + m);
            load_boxes(smem + Shape::kQOffset + ring.stage * Shape::kQBytes, map_q, q_full, Shape::kBoxes,
                       Shape::kM * kSwizzle, m * int(Shape::kM), head, tile.batch);

            // Load K, before the first dO
            if (!kv_loaded) {
                barriers.kv_empty.wait(ring_kv.parity ^ 1);
                load_boxes(smem, map_k, barriers.k_full, Shape::kBoxes, Shape::kN * kSwizzle, tile.key, tile.head, tile.batch);
            }

            // Load dO
            barriers.do_empty[ring.stage].wait(ring.parity ^ 1);
            load_boxes(smem + Shape::kDoOffset + ring.stage * Shape::kDoBytes, map_do, barriers.do_full[ring.stage],
                       Shape::kBoxesV, Shape::kM * kSwizzle, m * int(Shape::kM), head, tile.batch);

            // Load V, which is needed last
            if (!kv_loaded) {
                load_boxes(smem + Shape::kVOffset, map_v, barriers.v_full, Shape::kBoxesV, Shape::kN * kSwizzle, tile.key,
                           tile.head, tile.batch);
                ring_kv.advance();
                kv_loaded = true;
            }
            ring.advance();
        }
    }
}

// Stores what the warpgroups write to output stage `stage`: dQ of each query tile, added to dq_acc in global memory, then dV
// and dK.  The warpgroups fill the stages in turn.
template <typename Config>
__device__ inline void store_results(
    const BackwardProblemOf<Config>& problem, BackwardBarriers<Config>& barriers, const BackwardTile (&tiles)[2],
    const u8* smem, u32 stage, const TensorMap& map_dk, const TensorMap& map_dv, float* dq_acc, int* flags) {
    using Shape = BackwardShape<Config>;
    const u8* const out = smem + Shape::kOutOffset + stage * Shape::kOutBytes;
    Ring<2> ring_tile;
    Ring<Shape::kOutStages> ring_out;
    // Whether the next result goes to this warp's stage; if so, waits for it
    const auto next_is_ours = [&]() {
        const bool ours = ring_out.stage == stage;
        if (ours) barriers.out_full[stage].wait(ring_out.parity);
        ring_out.advance();
        return ours;
    };
    for (;; ring_tile.advance()) {
        barriers.tile_full[ring_tile.stage].wait(ring_tile.parity);
        const BackwardTile& tile = tiles[ring_tile.stage];
        if (tile.key < 0) break;
#pragma unroll 1
        for (QueryTileIterator<Config::kPacked> query(tile); query.more(tile); query.next(tile)) {
            if (!next_is_ours()) continue;
            const int m = query.m(tile);
            const int dq_tile = tile.dq_tile + query.head * problem.template query_tile_count<Shape::kM>() + m;

            // Wait until the key tiles before this one have added theirs
            const int rank = tile.template rank<Shape::kM>(problem, m);
            while (load_acquire(flags + dq_tile) != rank) {
            }
            fence_proxy_async_global();

            // Write dQ, or add it
            float* dst = dq_acc + i64(dq_tile) * (kBackwardWarpgroups * Shape::kDqBytes / sizeof(float));
#pragma unroll 1
            for (u32 g = 0; g < kBackwardWarpgroups; ++g, dst += Shape::kDqBytes / sizeof(float)) {
                if (rank == 0) {
                    bulk_store(dst, out + g * Shape::kWarpgroupOutBytes, Shape::kDqBytes);
                } else {
                    bulk_reduce_add(dst, out + g * Shape::kWarpgroupOutBytes, Shape::kDqBytes);
                }
            }
            tma_commit();

            // Release the stage once it has been read, the flag once dQ is in global memory
            tma_wait_read<0>();
            barriers.out_empty[stage].arrive();
            bulk_wait<0>();
            fence_proxy_async_global();
            store_release(flags + dq_tile, rank + 1);
        }

        // Store dV, then dK; the TMA does not write beyond S_k, D and D_v
#pragma unroll 1
        for (u32 result = 0; result < 2; ++result) {
            if (!next_is_ours()) continue;
            const u32 boxes = result == 0 ? Shape::kBoxesV : (Shape::kD + Shape::kBoxColumns - 1) / Shape::kBoxColumns;
#pragma unroll 1
            for (u32 i = 0; i < kBackwardWarpgroups * boxes; ++i) {
                const u32 g = i / boxes, box = i - g * boxes;
                tma_store(result == 0 ? map_dv : map_dk, out + g * Shape::kWarpgroupOutBytes + box * kBoxBytes,
                          int(box * Shape::kBoxColumns), tile.key + int(g * kWarpgroupM), tile.head, tile.batch,
                          CacheHint::EvictFirst);
            }
            tma_commit();
            tma_wait_read<0>();
            barriers.out_empty[stage].arrive();
        }
        barriers.tile_empty[ring_tile.stage].arrive();
    }
}

}  // namespace tilewright
