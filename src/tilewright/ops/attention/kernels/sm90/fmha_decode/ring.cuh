// The ring of one warp: units of keys and values on their way from global memory, and where they lie there.
//
// A warp loads what it multiplies itself, so that no warp waits for another, and bytes are in flight while it computes: at
// D = 128 in 16 bits a unit is 16 keys, 8 KB, and eight warps with rings of two hold 128 KB.  Copies of 16 bytes need
// no tensor map and cost the same whatever the size of a page is: a lane looks up the page of one key, and the numbers of
// the pages of a unit are read before the copies of the unit before are issued.
#pragma once

#include <tilewright/copies.cuh>

#include "division.cuh"
#include "layout.cuh"

namespace tilewright {

// One key head.  Strides in bytes.  table: null for contiguous caches, whose page b is sequence b.
struct Cache {
    const u8* k;
    const u8* v;
    const int* table;
    const float* k_scale;
    const float* v_scale;
    i64 k_page, k_slot, v_page, v_slot, table_row;
    i64 k_scale_page, k_scale_slot, v_scale_page, v_scale_slot;  // in floats
    u32 page_size;
};

template <typename Config, typename All> struct UnitLoader {
    using Shape = Layout<Config>;
    static constexpr u32 kKeys = Shape::kKeys;

    const Cache& cache;  // of the key head
    Walk<All> walk;
    u32 left;       // units of the warp from this position on
    u8* ring;       // of this warp, in shared memory
    u32 stage = 0;
    int page = 0;   // of the lane's key of the next unit
    u32 slot = 0;
    bool valid = false;

    __device__ UnitLoader(const Cache& cache_, const Walk<All>& walk_, u32 units, u8* ring_)
        : cache(cache_), walk(walk_), left(units), ring(ring_) {
        look_up();
    }

    // Looks up the pages of this unit.
    __device__ void look_up() {
        if (left == 0) return;
        const Sequence& s = walk.s;
        const int key = int((s.first_unit + walk.unit) * kKeys + lane_index());
        const int first_key = walk.all.left < 0 ? 0 : s.length - s.tokens - walk.all.left;
        valid = lane_index() < kKeys && key < s.length && key >= first_key;
        if (cache.table == nullptr) {
            page = walk.b;
            slot = u32(key);
        } else {
            const u32 number = u32(key) / cache.page_size;
            slot = u32(key) - number * cache.page_size;
            page = valid ? __ldg(cache.table + i64(walk.b) * cache.table_row + number) : 0;
        }
    }

    // Issues the copies of one unit, as one group of cp.async; an empty group behind the end of the share.
    __device__ void issue() {
        if (left > 0) {
            u8* const unit = ring + stage * Shape::kStageBytes;
            const u32 to = shared_address(unit);
            i64 k_offset = 0, v_offset = 0;
            if (valid) {
                k_offset = page * cache.k_page + slot * cache.k_slot;
                v_offset = page * cache.v_page + slot * cache.v_slot;
            }
            const u32 copied = __ballot_sync(~0u, valid);
            const u32 chunk = lane_index() % Shape::kLanesPerRow;
#pragma unroll
            for (u32 i = 0; i < Shape::kCopies; ++i) {
                const u32 row = i * Shape::kRowsPerCopy + lane_index() / Shape::kLanesPerRow;
                const i64 from = __shfl_sync(~0u, k_offset, row) + chunk * 16;
                cp_async_16_once(to + Shape::offset(row, chunk), cache.k + from, copied >> row & 1);
            }
#pragma unroll
            for (u32 i = 0; i < Shape::kCopies; ++i) {
                const u32 row = i * Shape::kRowsPerCopy + lane_index() / Shape::kLanesPerRow;
                const i64 from = __shfl_sync(~0u, v_offset, row) + chunk * 16;
                cp_async_16_once(to + Shape::kTileBytes + Shape::offset(row, chunk), cache.v + from, copied >> row & 1);
            }
            if constexpr (Config::kTokenScales) {
                if (lane_index() < kKeys) {
                    u8* const scales = unit + Shape::kScalesOffset + lane_index() * 4;
                    const float* const ks = cache.k_scale + (valid ? page * cache.k_scale_page + slot * cache.k_scale_slot : 0);
                    const float* const vs = cache.v_scale + (valid ? page * cache.v_scale_page + slot * cache.v_scale_slot : 0);
                    cp_async_zfill(scales, ks, valid);
                    cp_async_zfill(scales + kKeys * 4, vs, valid);
                }
            }
            stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
            --left;
            if (left > 0) walk.advance(1);
            look_up();
        }
        cp_async_commit();
    }
};

}  // namespace tilewright
