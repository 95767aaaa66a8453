// The producer warpgroup: warp 0 schedules key tiles and loads their operands; one warp per output stage stores results.
#pragma once

#include <tilewright/copies.cuh>
#include <tilewright/epilogue.cuh>

#include "schedule.cuh"

namespace tilewright {

struct FmhaBackwardMaps {
    static constexpr bool kRope = false, kParts = false;
    const TensorMap &q, &k, &v, &d_o, &dk, &dv, &stats;
};

// The query heads of a kv head are divided into parts, which are the kv heads of the problem, of dk and of dv.
struct PartsBackwardMaps : FmhaBackwardMaps {
    static constexpr bool kParts = true;
    int parts;  // that read one head of k and v
};

// Rope columns of q and k are separate tensors, at most one box wide; all heads share k_pe.
struct MlaBackwardMaps {
    static constexpr bool kRope = true, kParts = false;
    const TensorMap &q, &q_pe, &k, &k_pe, &v, &d_o, &dk, &dv, &stats;
    float* dk_pe;  // (B, H, S_k, d_pe)
    int d_pe;
};

// Loads boxes of 64 columns each, one after another in shared memory.
__device__ inline void load_boxes(
    u8* smem, const TensorMap& map, Barrier& full, u32 boxes, u32 box_bytes, int row, int head, int batch) {
    full.arrive_and_expect_tx(boxes * box_bytes);
#pragma unroll 1
    for (u32 i = 0; i < boxes; ++i) tma_load(smem + i * box_bytes, map, full, int(i * (kSwizzle / 2)), row, head, batch);
}

// The same with a rope part as the last box, of head `rope_head` of its own tensor.
__device__ inline void load_boxes(
    u8* smem, const TensorMap& map, const TensorMap& map_pe, Barrier& full, u32 boxes, u32 box_bytes, int row, int head,
    int rope_head, int batch) {
    full.arrive_and_expect_tx(boxes * box_bytes);
#pragma unroll 1
    for (u32 i = 0; i + 1 < boxes; ++i) tma_load(smem + i * box_bytes, map, full, int(i * (kSwizzle / 2)), row, head, batch);
    tma_load(smem + (boxes - 1) * box_bytes, map_pe, full, 0, row, rope_head, batch);
}

// Loads K and V once per key tile; Q, dO, lse and delta through a ring.
template <typename Config, typename Maps>
__device__ inline void load_operands(
    const BackwardProblemOf<Config>& problem, BackwardBarriers<Config>& barriers, BackwardTile (&tiles)[2], u8* smem,
    const Maps& maps, int* counter) {
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

        const auto kv_head = [&]() {
            if constexpr (Maps::kParts) return tile.head / maps.parts;
            return tile.head;
        };
        bool kv_loaded = false;
#pragma unroll 1
        for (QueryTileIterator<Config::kPacked> query(tile); query.more(tile); query.next(tile)) {
            // Load Q, lse and delta
            const int m = query.m(tile), head = tile.head * problem.heads_per_kv + query.head;
            Barrier& q_full = barriers.q_full[ring.stage];
            barriers.q_empty[ring.stage].wait(ring.parity ^ 1);
            q_full.arrive_and_expect_tx(Shape::kStatsBytes);
            tma_load(smem + Shape::kStatsOffset + ring.stage * Shape::kStatsBytes, maps.stats, q_full, 0,
                     tile.dq_tile + query.head * problem.template query_tile_count<Shape::kM>() + m);
            u8* const smem_q = smem + Shape::kQOffset + ring.stage * Shape::kQBytes;
            if constexpr (Maps::kRope) {
                load_boxes(smem_q, maps.q, maps.q_pe, q_full, Shape::kBoxes, Shape::kM * kSwizzle, m * int(Shape::kM), head,
                           head, tile.batch);
            } else {
                load_boxes(smem_q, maps.q, q_full, Shape::kBoxes, Shape::kM * kSwizzle, m * int(Shape::kM), head, tile.batch);
            }

            // Load K, before the first dO
            if (!kv_loaded) {
                barriers.kv_empty.wait(ring_kv.parity ^ 1);
                if constexpr (Maps::kRope) {
                    load_boxes(smem, maps.k, maps.k_pe, barriers.k_full, Shape::kBoxes, Shape::kN * kSwizzle, tile.key,
                               kv_head(), 0, tile.batch);
                } else {
                    load_boxes(smem, maps.k, barriers.k_full, Shape::kBoxes, Shape::kN * kSwizzle, tile.key, kv_head(),
                               tile.batch);
                }
            }

            // Load dO
            barriers.do_empty[ring.stage].wait(ring.parity ^ 1);
            load_boxes(smem + Shape::kDoOffset + ring.stage * Shape::kDoBytes, maps.d_o, barriers.do_full[ring.stage],
                       Shape::kBoxesV, Shape::kM * kSwizzle, m * int(Shape::kM), head, tile.batch);

            // Load V, which is needed last
            if (!kv_loaded) {
                load_boxes(smem + Shape::kVOffset, maps.v, barriers.v_full, Shape::kBoxesV, Shape::kN * kSwizzle, tile.key,
                           kv_head(), tile.batch);
                ring_kv.advance();
                kv_loaded = true;
            }
            ring.advance();
        }
    }
}

// Stores what the warpgroups write to output stage `stage`: dQ of each query tile, added to dq_acc in global memory, then dV
// and dK.  The warpgroups fill the stages in turn.
template <typename Config, typename Maps>
__device__ inline void store_results(
    const BackwardProblemOf<Config>& problem, BackwardBarriers<Config>& barriers, const BackwardTile (&tiles)[2],
    const u8* smem, u32 stage, const Maps& maps, float* dq_acc, int* flags) {
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
            const u32 boxes = result == 0 ? Shape::kBoxesV : Shape::kBoxes - Maps::kRope;
#pragma unroll 1
            for (u32 i = 0; i < kBackwardWarpgroups * boxes; ++i) {
                const u32 g = i / boxes, box = i - g * boxes;
                tma_store(result == 0 ? maps.dv : maps.dk, out + g * Shape::kWarpgroupOutBytes + box * kBoxBytes,
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

// Stores the rope columns of dK, those from column kFirst of the accumulators on, to `rows` rows of dk_pe from `first` on.
template <u32 kFirst, u32 kCount>
__device__ inline void store_rope(const MlaBackwardMaps& maps, i64 first, int rows, const float (&dk)[kCount]) {
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const int row = int(fragment_row() + 8 * h);
        float* const to = maps.dk_pe + (first + row) * maps.d_pe;
#pragma unroll
        for (u32 j = 0; j < kCount / 4 - kFirst / 8; ++j) {
            const int column = int(8 * j + fragment_column());
            const u32 i = kFirst / 2 + 4 * j + 2 * h;
            if (row < rows && column < maps.d_pe) *reinterpret_cast<Pair*>(to + column) = {dk[i], dk[i + 1]};
        }
    }
}

}  // namespace tilewright
