// The copying warp: q of each segment, then its key tiles, through the ring of quads and that of rotated parts.
//
// Pages: a slab is copied in boxes of kBoxRows rows, each inside of one page; a lane of the warp has one or two boxes and copies
// them for all slabs.  A box behind the length is asked for in a page that does not exist, and is filled with zeros.
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

struct DecodeCache {
    const int* table;  // nullptr: page b is sequence b
    int table_stride, page_size, pages;
};

template <typename Config> struct CopyWarp {
    using Shape = DecodeShape<Config>;
    static constexpr u32 kBoxes = Shape::kBoxes, kEach = (kBoxes + 31) / 32;
    static constexpr u32 kLanes = kBoxes < 32 ? kBoxes : 32, kMask = ~0u >> (32 - kLanes);  // that have a box

    const TensorMap& map_q;
    const TensorMap& map_kv;
    DecodeCache cache;
    DecodeBarriers<Config>& barriers;
    u8* quads;
    u8* ropes;
    u8* slabs_q;
    u32 lane;
    Ring<Shape::kQuads> quad;
    Ring<Shape::kRopes> rope;
    int page[kEach], row[kEach];  // of this lane's boxes

    // Announces `bytes` at `full`, once every reader has released the stage.
    __device__ void acquire(Barrier& full, Barrier& empty, u32 parity, u32 bytes) {
        if (kLanes > 1) __syncwarp(kMask);
        empty.wait(parity ^ 1);
        if (is_first()) full.arrive_and_expect_tx(bytes);
        if (kLanes > 1) __syncwarp(kMask);
    }
    __device__ bool is_first() const { return kLanes == 1 || lane == 0; }

    // Finds this lane's boxes of the key tile that begins at `key`.
    __device__ void find(int batch, int length, int key) {
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
            const u32 box = kLanes == 1 ? 0 : lane + 32 * i;
            const int k = key + int(box * Shape::kBoxRows);
            page[i] = cache.pages, row[i] = 0;
            if (k < length) {
                const int at = cache.table == nullptr ? 0 : int(u32(k) / u32(cache.page_size));
                page[i] = cache.table == nullptr ? batch : cache.table[i64(batch) * cache.table_stride + at];
                row[i] = k - at * cache.page_size;
            }
        }
    }

    // Slabs [slab, slab + kCount) of the key tile to `to`.
    template <u32 kCount> __device__ void load(u8* to, Barrier& full, u32 slab) {
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
            const u32 box = kLanes == 1 ? 0 : lane + 32 * i;
#pragma unroll
            for (u32 s = 0; s < kCount; ++s) {
                u8* const smem = to + s * kSlabBytes + box * Shape::kBoxRows * kRowBytes;
                tma_load(smem, map_kv, full, int(slab + s) * 64, row[i], page[i], CacheHint::EvictFirst);
            }
        }
    }

    __device__ void load_quad(u32 first) {
        Barrier& full = barriers.quad_full[quad.stage];
        acquire(full, barriers.quad_empty[quad.stage], quad.parity, kQuadBytes);
        load<4>(quads + quad.stage * kQuadBytes, full, first);
        quad.advance();
    }

    __device__ void load_q(const DecodeSegment& segment, u32 parity) {
        constexpr u32 kRest = Shape::kQRegisters - 4;
        const int first_row = segment.tile * 64;
        const auto slab = [&](u8* to, Barrier& full, u32 s) {
            if (is_first()) tma_load(to, map_q, full, int(s) * 64, first_row, segment.batch, CacheHint::EvictFirst);
        };
        for (u32 half = 0; half < Shape::kQQuads; ++half) {
            const u32 count = half == 0 ? 4 : kRest;
            Barrier& full = barriers.quad_full[quad.stage];
            acquire(full, barriers.quad_empty[quad.stage], quad.parity, count * kSlabBytes);
            for (u32 s = 0; s < count; ++s) slab(quads + quad.stage * kQuadBytes + s * kSlabBytes, full, 4 * half + s);
            quad.advance();
        }
        acquire(barriers.q_full, barriers.q_empty, parity, Shape::kQSlabs * kSlabBytes);
        for (u32 s = 0; s < Shape::kQSlabs; ++s) slab(slabs_q + s * kSlabBytes, barriers.q_full, Shape::kQRegisters + s);
    }

    __device__ void copy(const DecodeSegment& segment, u32 parity) {
        load_q(segment, parity);
        for (int n = segment.begin; n < segment.end; ++n) {
            find(segment.batch, segment.length, n * 64);
            load_quad(0), load_quad(4);
            Barrier& full = barriers.rope_full[rope.stage];
            acquire(full, barriers.rope_empty[rope.stage], rope.parity, kSlabBytes);
            load<1>(ropes + rope.stage * kSlabBytes, full, 8);
            rope.advance();
        }
    }

    // Lanes without a box stay out of the copies: the TMA's operands are in registers that a warp has once, and must not be
    // prepared by some lanes while others wait elsewhere.
    __device__ void run(DecodeSchedule& schedule) {
        for (u32 parity = 0; schedule.next(); parity ^= 1) {
            const DecodeSegment segment = schedule.segment();
            if (lane < kLanes) copy(segment, parity);
            __syncwarp();
        }
    }
};

}  // namespace tilewright
