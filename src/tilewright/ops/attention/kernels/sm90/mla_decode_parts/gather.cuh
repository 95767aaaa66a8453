// The copying warpgroup where each row of a key tile has an address of its own, or is widened: tokens of 656 bytes, slots that
// indices name.
//
// A warp has 16 rows.  A step is 256 bytes of each, 16 bytes a lane and row pair, which go through registers: while a
// step is stored, the loads of the next one are issued.  A row that holds no token, or that an index does not name, is zeros.
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace tilewright {

__device__ inline uint4 load_stream(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ inline void store_shared(u32 address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four e4m3 in a word, scaled in float and rounded once.
template <typename Element> __device__ inline uint2 widen(u32 word, float scale) {
    u32 result[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(word >> 16 * i)));
        result[i] = pack<Element>(scale * to_float(float16{u16(halves)}), scale * to_float(float16{u16(halves >> 16)}));
    }
    return make_uint2(result[0], result[1]);
}

// Fetches `bytes`, a multiple of 16, into the L2.  [cp.async.bulk.prefetch]
__device__ inline void prefetch_l2(const u8* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

struct GatherCache {
    const u8* cache;
    const int* table;    // nullptr: page b is sequence b
    const int* indices;  // (sequence, capacity) slots; then there is no table
    int table_stride, page_size, pages;
    int page_units, row_units;  // strides in units of 16 bytes
};

template <typename Config> struct GatherWarpgroup {
    using Shape = DecodeShape<Config>;
    using Element = typename Config::Element;
    static constexpr bool kPacked = Config::kPacked, kSparse = Config::kSparse;
    static constexpr u32 kStep = 256, kSteps = (kPacked ? 1 : 2) * Shape::kDv / kStep, kQuadSteps = kSteps / 2;
    static constexpr u32 kRopeAt = kPacked ? Shape::kDv + 16 : 2 * Shape::kDv, kScalesAt = Shape::kDv;
    static constexpr u32 kNone = ~0u, kTokenBytes = kPacked ? 656 : 2 * Shape::kD;
    static constexpr int kAhead = Config::kAhead;

    const TensorMap& map_q;
    GatherCache cache;
    DecodeBarriers<Config>& barriers;
    KeyMasks<Config>& masks;
    u8 *quads, *ropes, *slabs_q;
    u32 warp, lane;
    Ring<Shape::kQuads> quad;
    Ring<Shape::kRopes> rope;
    uint4 raw[8];
    float scale;

    __device__ void pass(Barrier& full) const {
        fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) full.arrive();
    }

    // Where row 16 * warp + lane % 16 of the key tile that begins at `key` lies, in units of 16 bytes.
    __device__ u32 find(const DecodeProblem& problem, int batch, int length, int key) const {
        const int k = key + int(16 * warp + lane % 16);
        if (k >= length) return kNone;
        int page = batch, row = k;
        if constexpr (kSparse) {
            const int slot = cache.indices[i64(batch) * problem.capacity + k];
            if (slot < 0 || slot >= cache.pages * cache.page_size) return kNone;
            page = int(u32(slot) / u32(cache.page_size)), row = slot - page * cache.page_size;
        } else if (cache.table != nullptr) {
            const int at = int(u32(k) / u32(cache.page_size));
            page = cache.table[i64(batch) * cache.table_stride + at], row = k - at * cache.page_size;
        }
        return u32(i64(page) * cache.page_units + i64(row) * cache.row_units);
    }

    __device__ void fetch(u32 offset) const {
        if (lane < 16 && offset != kNone) prefetch_l2(cache.cache + u64(offset) * 16, kTokenBytes);
    }

    // Byte `at` of row 16 * warp + row of the tile.
    __device__ uint4 load(u32 offset, u32 row, u32 at) const {
        const u32 place = __shfl_sync(~0u, offset, int(row));
        return place == kNone ? make_uint4(0, 0, 0, 0) : load_stream(cache.cache + u64(place) * 16 + at);
    }
    __device__ void load_rope(u32 offset, u32 i) { raw[i] = load(offset, 4 * i + lane / 8, kRopeAt + lane % 8 * 16); }
    __device__ void load_step(u32 offset, u32 step, u32 i) {
        raw[i] = load(offset, 2 * i + lane / 16, step * kStep + lane % 16 * 16);
    }
    // Of the 16 rows and the two groups of 128 columns of a step, one a lane.
    __device__ float load_scale(u32 offset, u32 step) const {
        const u32 place = __shfl_sync(~0u, offset, int(lane / 2));
        if (!kPacked || place == kNone) return 0;
        return *reinterpret_cast<const float*>(cache.cache + u64(place) * 16 + kScalesAt + 4 * (2 * step + lane % 2));
    }

    // Row r of a slab has its 16-byte chunks permuted by r % 8.  The rows of one lane differ by multiples of two (four in a
    // rotated part): the permutation of row i is that of row 0 and a constant.
    __device__ void store_rope(u32 slab, u32 i) const {
        uint4 v = raw[i];
        if constexpr (kPacked && !Same<Element, bfloat16>::value) {  // stored as bf16
            u32* const words = &v.x;
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                words[k] = pack<Element>(to_float(bfloat16{u16(words[k])}), to_float(bfloat16{u16(words[k] >> 16)}));
            }
        }
        const u32 row = lane / 8, chunk = lane % 8 * 16 ^ row * 16;
        store_shared(slab + (16 * warp + row) * kRowBytes + 4 * i * kRowBytes + (chunk ^ i % 2 * 64), v);
    }
    // to: a quad.   place: of this lane's first chunk in it, in row 0
    __device__ void store_step(u32 to, u32 place, u32 chunk, u32 step, u32 i) const {
        const u32 at = to + place + 2 * i * kRowBytes, row_chunk = chunk ^ i % 4 * 32;
        if constexpr (kPacked) {
            const u32 columns = lane % 16;
            const float s = __shfl_sync(~0u, scale, int((2 * i + lane / 16) * 2 + columns / 8));
            const uint2 a = widen<Element>(raw[i].x, s), b = widen<Element>(raw[i].y, s);
            const uint2 c = widen<Element>(raw[i].z, s), d = widen<Element>(raw[i].w, s);
            const uint4 low = make_uint4(a.x, a.y, b.x, b.y), high = make_uint4(c.x, c.y, d.x, d.y);
            // Neighbouring slabs in opposite order, so that eight lanes reach all banks
            const u32 turned = columns / 4 % 2 * 16;
            store_shared(at + (row_chunk ^ turned), turned != 0 ? high : low);
            store_shared(at + (row_chunk ^ turned ^ 16), turned != 0 ? low : high);
        } else {
            store_shared(at + step % kQuadSteps * 2 * kSlabBytes + row_chunk, raw[i]);
        }
    }

    __device__ void load_q(const DecodeSegment& segment, u32 parity) {
        const bool copies = warp == 0 && lane == 0;
        const auto slabs = [&](u8* to, Barrier& full, u32 first, u32 count) {
            if (!copies) return;
            full.arrive_and_expect_tx(count * kSlabBytes);
            for (u32 s = 0; s < count; ++s) {
                tma_load(to + s * kSlabBytes, map_q, full, int(first + s) * 64, segment.tile * 64, segment.batch);
            }
        };
        for (u32 half = 0; half < Shape::kQQuads; ++half) {
            Barrier& full = barriers.quad_full[quad.stage];
            barriers.quad_empty[quad.stage].wait(quad.parity ^ 1);
            slabs(quads + quad.stage * kQuadBytes, full, 4 * half, half == 0 ? 4 : Shape::kQRegisters - 4);
            __syncwarp();  // see CopyWarp::run
            if (warp > 0 && lane == 0) full.arrive();
            quad.advance();
        }
        if (warp == 0) {
            barriers.q_empty.wait(parity ^ 1);
            slabs(slabs_q, barriers.q_full, Shape::kQRegisters, Shape::kQSlabs);
            __syncwarp();
        }
    }

    __device__ void run(DecodeSchedule& schedule) {
        const u32 columns = lane % 16, slab_chunks = kPacked ? 4 : 8, high = lane / 16;
        const u32 place = columns / slab_chunks * kSlabBytes + (16 * warp + high) * kRowBytes;
        u32 chunk = columns % slab_chunks * (kPacked ? 32 : 16) ^ high * 16, parity = 0;
        for (; schedule.next(); parity ^= 1) {
            const DecodeSegment segment = schedule.segment();
            load_q(segment, parity);
            u32 offset = find(schedule.problem, segment.batch, segment.length, segment.begin * 64);
            float next_scale = load_scale(offset, 0);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) load_step(offset, 0, i);
            for (int n = segment.begin + 1; n < min(segment.begin + kAhead, segment.end); ++n) {
                fetch(find(schedule.problem, segment.batch, segment.length, n * 64));
            }
            for (int n = segment.begin; n < segment.end; ++n) {
                const int later = n + 1 < segment.end ? segment.length : 0;
                const u32 next = find(schedule.problem, segment.batch, later, (n + 1) * 64);
                if (kAhead > 0 && n + kAhead < segment.end) fetch(find(schedule.problem, segment.batch, later, (n + kAhead) * 64));

                // The steps of both quads; meanwhile the next step is loaded, after the last one the rotated part
#pragma unroll 1
                for (u32 step = 0; step < kSteps; ++step) {
                    asm volatile("" : "+r"(chunk), "+r"(lane));  // what follows from them is not kept in registers
                    scale = next_scale;
                    if (step % kQuadSteps == 0) barriers.quad_empty[quad.stage].wait(quad.parity ^ 1);
                    next_scale = step + 1 < kSteps ? load_scale(offset, step + 1) : load_scale(next, 0);
                    const u32 to = shared_address(quads) + quad.stage * kQuadBytes;
#pragma unroll
                    for (u32 i = 0; i < 8; ++i) {
                        store_step(to, place, chunk, step, i);
                        if (step + 1 < kSteps) {
                            load_step(offset, step + 1, i);
                        } else if (i < 4) {
                            load_rope(offset, i);
                        }
                    }
                    if (step % kQuadSteps == kQuadSteps - 1) {
                        pass(barriers.quad_full[quad.stage]);
                        quad.advance();
                    }
                }

                // The rotated part; meanwhile the next key tile's first step is loaded
                const u32 slab = shared_address(ropes) + rope.stage * kSlabBytes;
                barriers.rope_empty[rope.stage].wait(rope.parity ^ 1);
                if constexpr (kSparse) {
                    const u32 seen = __ballot_sync(~0u, offset != kNone) & 0xffff;
                    if (lane == 0) masks.seen[rope.stage][warp] = seen;
                }
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    if (i < 4) store_rope(slab, i);
                    load_step(next, 0, i);
                }
                pass(barriers.rope_full[rope.stage]);
                rope.advance();
                offset = next;
            }
        }
    }
};

}  // namespace tilewright
