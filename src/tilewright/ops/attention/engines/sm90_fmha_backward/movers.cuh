// Those who move: one thread draws tiles and brings their operands, others take away what the warpgroups computed.
#pragma once

#include <tilewright/copies.cuh>

#include "schedule.cuh"

namespace tilewright {

// A box of each 64 columns, side by side.
__device__ inline void copy_boxes(
    u8* to, const TensorMap& map, Barrier& full, u32 boxes, u32 box_bytes, int row, int head, int batch) {
    full.arrive_and_expect_tx(boxes * box_bytes);
#pragma unroll 1
    for (u32 i = 0; i < boxes; ++i) tma_load(to + i * box_bytes, map, full, int(i * (kSpan / 2)), row, head, batch);
}

// Draws tiles and says which; K and V of a tile once, Q, dO and the rows' floats through rings.
template <typename Config>
__device__ inline void bring_operands(
    const BackwardProblem<Config::kSpans>& problem, BackwardBarriers<Config>& barriers, BackwardTile (&drawn)[2], u8* shared,
    const TensorMap& map_q, const TensorMap& map_k, const TensorMap& map_v, const TensorMap& map_do,
    const TensorMap& map_rows, int* counter) {
    using Shape = BackwardShape<Config>;
    Ring<2> ring_tile;
    Ring<1> keys;
    Ring<Shape::kStages> ring;  // Q's and dO's run in step
    for (;;) {
        const int number = atomicAdd(counter, 1);
        BackwardTile& tile = drawn[ring_tile.stage];
        barriers.tile_empty[ring_tile.stage].wait(ring_tile.parity ^ 1);
        tile.find<Shape::kM>(problem, number);
        barriers.tile_full[ring_tile.stage].arrive();
        ring_tile.advance();
        if (tile.key < 0) return;
        bool resident = false;
#pragma unroll 1
        for (BackwardVisit<Config::kSpans> visit(tile); visit.more(tile); visit.next(tile)) {
            const int m = visit.m(tile), head = tile.head * problem.sharing + visit.head;
            Barrier& q_full = barriers.q_full[ring.stage];
            barriers.q_empty[ring.stage].wait(ring.parity ^ 1);
            q_full.arrive_and_expect_tx(Shape::kRowBytes);
            tma_load(shared + Shape::kAtRows + ring.stage * Shape::kRowBytes, map_rows, q_full, 0,
                     tile.place + visit.head * problem.template tiles<Shape::kM>() + m);
            copy_boxes(shared + Shape::kAtQ + ring.stage * Shape::kQBytes, map_q, q_full, Shape::kBoxes, Shape::kM * kSpan,
                       m * int(Shape::kM), head, tile.batch);
            if (!resident) {
                barriers.keys_empty.wait(keys.parity ^ 1);
                copy_boxes(shared, map_k, barriers.k_full, Shape::kBoxes, Shape::kN * kSpan, tile.key, tile.head, tile.batch);
            }
            barriers.do_empty[ring.stage].wait(ring.parity ^ 1);
            copy_boxes(shared + Shape::kAtDo + ring.stage * Shape::kDoBytes, map_do, barriers.do_full[ring.stage],
                       Shape::kBoxesV, Shape::kM * kSpan, m * int(Shape::kM), head, tile.batch);
            if (!resident) {
                copy_boxes(shared + Shape::kAtV, map_v, barriers.v_full, Shape::kBoxesV, Shape::kN * kSpan, tile.key, tile.head,
                           tile.batch);
                keys.advance();
                resident = true;
            }
            ring.advance();
        }
    }
}

// Takes away what lies in place `own` of those that the warpgroups fill in turn: dQ of each tile of queries to the sums in
// global memory, then dV and dK.
template <typename Config>
__device__ inline void take_away(
    const BackwardProblem<Config::kSpans>& problem, BackwardBarriers<Config>& barriers, const BackwardTile (&drawn)[2],
    const u8* shared, u32 own, const TensorMap& map_dk, const TensorMap& map_dv, float* sums, int* flags) {
    using Shape = BackwardShape<Config>;
    const u8* const from = shared + Shape::kAtOut + own * Shape::kOutBytes;
    Ring<2> ring_tile;
    Ring<Shape::kOutStages> turn;  // of all places
    const auto mine = [&]() {      // the next; and it is there
        const bool yes = turn.stage == own;
        if (yes) barriers.out_full[own].wait(turn.parity);
        turn.advance();
        return yes;
    };
    for (;; ring_tile.advance()) {
        barriers.tile_full[ring_tile.stage].wait(ring_tile.parity);
        const BackwardTile& tile = drawn[ring_tile.stage];
        if (tile.key < 0) break;
#pragma unroll 1
        for (BackwardVisit<Config::kSpans> visit(tile); visit.more(tile); visit.next(tile)) {
            if (!mine()) continue;
            const int m = visit.m(tile), at = tile.place + visit.head * problem.template tiles<Shape::kM>() + m;
            const int rank = tile.template rank<Shape::kM>(problem, m);
            while (load_acquire(flags + at) != rank) {
            }
            fence_proxy_async_global();
            float* to = sums + i64(at) * (kBackwardGroups * Shape::kPartBytes / sizeof(float));
#pragma unroll 1
            for (u32 g = 0; g < kBackwardGroups; ++g, to += Shape::kPartBytes / sizeof(float)) {
                if (rank == 0) {
                    bulk_store(to, from + g * Shape::kHalfBytes, Shape::kPartBytes);
                } else {
                    bulk_reduce_add(to, from + g * Shape::kHalfBytes, Shape::kPartBytes);
                }
            }
            tma_commit();
            tma_wait_read<0>();
            barriers.out_empty[own].arrive();
            bulk_wait<0>();
            fence_proxy_async_global();
            store_release(flags + at, rank + 1);
        }
#pragma unroll 1
        for (u32 which = 0; which < 2; ++which) {  // what lies beyond S_k, D or D_v is not written
            if (!mine()) continue;
            const u32 boxes = which == 0 ? Shape::kBoxesV : (Shape::kD + Shape::kWide - 1) / Shape::kWide;
#pragma unroll 1
            for (u32 i = 0; i < kBackwardGroups * boxes; ++i) {
                const u32 g = i / boxes, box = i - g * boxes;
                tma_store(which == 0 ? map_dv : map_dk, from + g * Shape::kHalfBytes + box * kBoxBytes, int(box * Shape::kWide),
                          tile.key + int(g * kRowsOfGroup), tile.head, tile.batch, CacheHint::EvictFirst);
            }
            tma_commit();
            tma_wait_read<0>();
            barriers.out_empty[own].arrive();
        }
        barriers.tile_empty[ring_tile.stage].arrive();
    }
}

}  // namespace tilewright
