// The producer warpgroup: one thread loads K and V through two rings, another loads Q and stores O.
//
// Maps: FmhaMaps; or MlaMaps, with the rope columns as the last box of Q and of K.
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

struct FmhaMaps {
    static constexpr bool kRope = false;
    const TensorMap &q, &k, &v, &o;
};

// Rope columns of q and k are separate tensors, at most one box wide; all heads share k_pe.
struct MlaMaps {
    static constexpr bool kRope = true;
    const TensorMap &q, &q_pe, &k, &k_pe, &v, &o;
};

// Loads K and V from the last key tile to the first, in the order of the wgmma: K is one tile ahead of V.
template <typename Config, typename Maps>
__device__ inline void load_kv(
    const FmhaProblem& problem, const FmhaMask& mask, FmhaBarriers<Config>& barriers, const Maps& maps, u8* stages_k,
    u8* stages_v) {
    using Shape = FmhaShape<Config>;
    constexpr u32 kBoxesK = Shape::kBoxes - Maps::kRope;
    Ring<Shape::kStages> ring_k, ring_v;
    FmhaScheduler<Config> scheduler(problem, mask);
    for (FmhaTile<Config> tile; scheduler.next(tile);) {
        const int head = tile.head / problem.heads_per_kv;
        const auto load_k = [&](int n) {
            const int key = tile.key(n);
            Barrier& full = barriers.k_full[ring_k.stage];
            barriers.k_empty[ring_k.stage].wait(ring_k.parity ^ 1);
            full.arrive_and_expect_tx(Shape::kKBytes);
#pragma unroll
            for (u32 i = 0; i < kBoxesK; ++i) {
                u8* const smem = stages_k + ring_k.stage * Shape::kKBytes + i * Shape::kN * kSwizzle;
                tma_load(smem, maps.k, full, i * Shape::kBoxColumns, key, head, tile.batch);
            }
            if constexpr (Maps::kRope) {
                u8* const smem = stages_k + ring_k.stage * Shape::kKBytes + kBoxesK * Shape::kN * kSwizzle;
                tma_load(smem, maps.k_pe, full, 0, key, 0, tile.batch);
            }
            ring_k.advance();
        };
        const auto load_v = [&](int n) {
            const int key = tile.key(n);
            Barrier& full = barriers.v_full[ring_v.stage];
            barriers.v_empty[ring_v.stage].wait(ring_v.parity ^ 1);
            full.arrive_and_expect_tx(Shape::kVBytes);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxesV; ++i) {
                u8* const smem = stages_v + ring_v.stage * Shape::kVBytes + i * Shape::kN * kSwizzle;
                tma_load(smem, maps.v, full, i * Shape::kBoxColumns, key, head, tile.batch);
            }
            ring_v.advance();
        };
        for (int n = tile.end - 1; n >= tile.first; --n) {
            load_k(n);
            if (n + 1 < tile.end) load_v(n + 1);
        }
        if (!tile.empty()) load_v(tile.first);
    }
}

// Loads Q of a tile.  O is staged in Q's buffer: stores it when the warpgroup has written it, then loads the Q that comes
// kQStages tiles later.
template <typename Config, typename Maps>
__device__ inline void load_q_store_o(
    const FmhaProblem& problem, const FmhaMask& mask, FmhaBarriers<Config>& barriers, const Maps& maps,
    u8* stages_q) {
    using Shape = FmhaShape<Config>;
    constexpr u32 kBoxesQ = Shape::kBoxes - Maps::kRope;
    FmhaScheduler<Config> scheduler_ahead(problem, mask), scheduler(problem, mask);
    Ring<Shape::kQStages> ring;
    const auto load_q = [&](const FmhaTile<Config>& tile, u32 stage, u32 group) {
        Barrier& full = barriers.q_full[stage][group];
        full.arrive_and_expect_tx(Shape::kQBytes);
        const int row = tile.row + int(group * kWarpgroupM);
#pragma unroll
        for (u32 i = 0; i < kBoxesQ; ++i) {
            u8* const smem = stages_q + (stage * Shape::kWarpgroups + group) * Shape::kQBytes + i * kBoxBytes;
            tma_load(smem, maps.q, full, i * Shape::kBoxColumns, row, tile.head, tile.batch, CacheHint::EvictFirst);
        }
        if constexpr (Maps::kRope) {
            u8* const smem = stages_q + (stage * Shape::kWarpgroups + group) * Shape::kQBytes + kBoxesQ * kBoxBytes;
            tma_load(smem, maps.q_pe, full, 0, row, tile.head, tile.batch, CacheHint::EvictFirst);
        }
    };

    // Fill the stages
    FmhaTile<Config> later;
    for (u32 stage = 0; stage < Shape::kQStages; ++stage) {
        if (!scheduler_ahead.next(later)) break;
        for (u32 group = 0; group < Shape::kWarpgroups; ++group) load_q(later, stage, group);
    }

    // Store O of each tile and refill its stage
    for (FmhaTile<Config> tile; scheduler.next(tile); ring.advance()) {
        const bool more = scheduler_ahead.next(later);
        for (u32 group = 0; group < Shape::kWarpgroups; ++group) {
            barriers.o_full[ring.stage][group].wait(ring.parity);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxesV; ++i) {  // the TMA does not write beyond S_q and D_v
                const u32 buffer = ring.stage * Shape::kWarpgroups + group;
                const u8* const smem = stages_q + buffer * Shape::kQBytes + i * kBoxBytes;
                tma_store(maps.o, smem, i * Shape::kBoxColumns, tile.row + int(group * kWarpgroupM), tile.head, tile.batch,
                          CacheHint::EvictFirst);
            }
            tma_commit();
            if (more) {
                tma_wait_read<0>();
                load_q(later, ring.stage, group);
            }
        }
    }
    tma_wait_read<0>();  // the stores read shared memory of this block
}

}  // namespace tilewright
