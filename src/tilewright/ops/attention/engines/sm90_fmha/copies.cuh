// The two producers, a thread each: one keeps the rings of K and V filled, the other brings Q and takes O away.
//
// Maps: FmhaMaps, or MlaMaps, whose last box of Q and of K is that of the rotated columns.
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

struct FmhaMaps {
    static constexpr bool kRotated = false;
    const TensorMap &q, &k, &v, &o;
};

// Rotated columns of their own, at most a box, behind those of q and k; all heads have the same in k_pe.
struct MlaMaps {
    static constexpr bool kRotated = true;
    const TensorMap &q, &q_pe, &k, &k_pe, &v, &o;
};

// Keys and values from the last tile to the first, in the order in which they are multiplied: K is one tile ahead of V.
template <typename Config, typename Maps>
__device__ inline void bring_keys(
    const FmhaProblem& problem, const FmhaMask& mask, FmhaBarriers<Config>& barriers, const Maps& maps, u8* stages_k,
    u8* stages_v) {
    using Shape = FmhaShape<Config>;
    constexpr u32 kOfK = Shape::kBoxes - Maps::kRotated;
    Ring<Shape::kStages> ring_k, ring_v;
    FmhaSchedule<Config> schedule(problem, mask);
    for (FmhaTile<Config> tile; schedule.next(tile);) {
        const int head = tile.head / problem.sharing;
        const auto bring_k = [&](int at) {
            const int key = tile.key(at);
            Barrier& full = barriers.k_full[ring_k.stage];
            barriers.k_empty[ring_k.stage].wait(ring_k.parity ^ 1);
            full.arrive_and_expect_tx(Shape::kKBytes);
#pragma unroll
            for (u32 i = 0; i < kOfK; ++i) {
                u8* const to = stages_k + ring_k.stage * Shape::kKBytes + i * Shape::kN * kSpan;
                tma_load(to, maps.k, full, i * Shape::kWide, key, head, tile.batch);
            }
            if constexpr (Maps::kRotated) {
                u8* const to = stages_k + ring_k.stage * Shape::kKBytes + kOfK * Shape::kN * kSpan;
                tma_load(to, maps.k_pe, full, 0, key, 0, tile.batch);
            }
            ring_k.advance();
        };
        const auto bring_v = [&](int at) {
            const int key = tile.key(at);
            Barrier& full = barriers.v_full[ring_v.stage];
            barriers.v_empty[ring_v.stage].wait(ring_v.parity ^ 1);
            full.arrive_and_expect_tx(Shape::kVBytes);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxesV; ++i) {
                u8* const to = stages_v + ring_v.stage * Shape::kVBytes + i * Shape::kN * kSpan;
                tma_load(to, maps.v, full, i * Shape::kWide, key, head, tile.batch);
            }
            ring_v.advance();
        };
        for (int at = tile.end - 1; at >= tile.first; --at) {
            bring_k(at);
            if (at + 1 < tile.end) bring_v(at + 1);
        }
        if (!tile.empty()) bring_v(tile.first);
    }
}

// Q of a tile, and when a warpgroup has put its O there, O away and the Q that comes kQStages tiles later in.
template <typename Config, typename Maps>
__device__ inline void bring_queries(
    const FmhaProblem& problem, const FmhaMask& mask, FmhaBarriers<Config>& barriers, const Maps& maps,
    u8* stages_q) {
    using Shape = FmhaShape<Config>;
    constexpr u32 kOfQ = Shape::kBoxes - Maps::kRotated;
    FmhaSchedule<Config> ahead(problem, mask), schedule(problem, mask);
    Ring<Shape::kQStages> ring;
    const auto bring = [&](const FmhaTile<Config>& tile, u32 stage, u32 group) {
        Barrier& full = barriers.q_full[stage][group];
        full.arrive_and_expect_tx(Shape::kQBytes);
        const int row = tile.row + int(group * kRowsOfGroup);
#pragma unroll
        for (u32 i = 0; i < kOfQ; ++i) {
            u8* const to = stages_q + (stage * Shape::kGroups + group) * Shape::kQBytes + i * kBoxBytes;
            tma_load(to, maps.q, full, i * Shape::kWide, row, tile.head, tile.batch, CacheHint::EvictFirst);
        }
        if constexpr (Maps::kRotated) {
            u8* const to = stages_q + (stage * Shape::kGroups + group) * Shape::kQBytes + kOfQ * kBoxBytes;
            tma_load(to, maps.q_pe, full, 0, row, tile.head, tile.batch, CacheHint::EvictFirst);
        }
    };
    FmhaTile<Config> later;
    for (u32 stage = 0; stage < Shape::kQStages; ++stage) {
        if (!ahead.next(later)) break;
        for (u32 group = 0; group < Shape::kGroups; ++group) bring(later, stage, group);
    }
    for (FmhaTile<Config> tile; schedule.next(tile); ring.advance()) {
        const bool more = ahead.next(later);
        for (u32 group = 0; group < Shape::kGroups; ++group) {
            barriers.o_full[ring.stage][group].wait(ring.parity);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxesV; ++i) {  // what lies beyond S_q or D_v is not written
                const u32 place = ring.stage * Shape::kGroups + group;
                const u8* const from = stages_q + place * Shape::kQBytes + i * kBoxBytes;
                tma_store(maps.o, from, i * Shape::kWide, tile.row + int(group * kRowsOfGroup), tile.head, tile.batch,
                          CacheHint::EvictFirst);
            }
            tma_commit();
            if (more) {
                tma_wait_read<0>();
                bring(later, ring.stage, group);
            }
        }
    }
    tma_wait_read<0>();  // shared memory must outlive the stores
}

}  // namespace tilewright
