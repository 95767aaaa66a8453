// Sizes, the layout of shared memory and the barriers of latent decoding.
//
// Everything in shared memory is made of slabs: 64 rows of 64 columns, 128 bytes a row under the 128-byte swizzle.  A key tile
// is nine slabs: a left and a right quad of four, which are its values, and the rotated part.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kRowBytes = 128, kSlabBytes = 64 * kRowBytes, kQuadBytes = 4 * kSlabBytes;

// Warpgroups by role.
enum Role : u32 { kScoring = 0, kLeft = 1, kRight = 2, kCopying = 3 };

template <typename Config> struct DecodeShape {
    using Element = typename Config::Element;
    static constexpr u32 kThreads = 512, kD = 576, kDv = 512, kM = 64, kN = 64;
    static constexpr u32 kQuads = Config::kQuads, kRopes = Config::kRopes;
    static constexpr u32 kPStages = 2;
    // Slabs of q in registers of the scoring warpgroup; the others stay in shared memory, the rotated part last
    static constexpr u32 kQRegisters = Config::kQRegisters, kQSlabs = 9 - kQRegisters;
    static constexpr u32 kQQuads = kQRegisters > 4 ? 2 : 1;  // of the ring, through which they come
    static constexpr u32 kBoxRows = Config::kBoxRows, kBoxes = kN / kBoxRows;  // boxes of a slab: a page each, or a part
    static constexpr u32 kShared = kQuads * kQuadBytes + (kRopes + kQSlabs + kPStages) * kSlabBytes;
    static_assert(sizeof(Element) == 2, "bfloat16 or float16");
    static constexpr bool kGather = Config::kPacked || Config::kSparse;  // each row of keys has an address (gather.cuh)
    static_assert(kQRegisters >= 4 && kQRegisters < 8, "the left quad of q, and a part of the right one");
    static_assert(kQuads >= 5, "two key tiles are in use, and one quad is being loaded");
    static_assert(kN % kBoxRows == 0, "a box lies in one page");
    // Registers of each thread: 512 in all for the four warpgroups
    static constexpr u32 kScoringRegisters = kGather ? 128 : 160, kValueRegisters = 160;
    static constexpr u32 kCopyingRegisters = 512 - kScoringRegisters - 2 * kValueRegisters;
};

template <typename Config> struct DecodeBarriers {
    using Shape = DecodeShape<Config>;
    Barrier quad_full[Shape::kQuads], quad_empty[Shape::kQuads], rope_full[Shape::kRopes], rope_empty[Shape::kRopes];
    Barrier q_full, q_empty;
    // P goes from the scoring warpgroup to the two others, and with it how its rows are rescaled
    Barrier p_full[Shape::kPStages], p_empty[Shape::kPStages], s_done[Shape::kPStages];

    __device__ void init() {
        constexpr u32 kWriters = Shape::kGather ? 4 : 1;
        for (u32 i = 0; i < Shape::kQuads; ++i) quad_full[i].init(kWriters), quad_empty[i].init(4);
        for (u32 i = 0; i < Shape::kRopes; ++i) rope_full[i].init(kWriters), rope_empty[i].init(4);
        q_full.init(1), q_empty.init(4);
        for (u32 i = 0; i < Shape::kPStages; ++i) p_full[i].init(4), p_empty[i].init(8), s_done[i].init(4);
    }
};

// How O's rows are rescaled before P of a stage is added, if any row of a warp is; after the last key tile, how O is
// normalised.
template <typename Config> struct RowScales {
    float factor[DecodeShape<Config>::kPStages][64];
    u32 needed[DecodeShape<Config>::kPStages][4];  // by warp
};

// Which of the 16 rows of each copying warp hold a key that is seen.
template <typename Config> struct KeyMasks {
    u32 seen[DecodeShape<Config>::kRopes][4];
};

// Releases a stage that this warp has read by wgmma.
__device__ inline void release_stage(Barrier& empty) {
    if (lane_index() == 0) empty.arrive();
}

// Releases a stage that the lanes of this warp have loaded to registers.  An arrival does not wait for loads that are under
// way (ldmatrix): without the fence the next TMA copy overwrites rows that are not read yet.
__device__ inline void release_read(Barrier& empty) {
    fence_proxy_async_shared();
    __syncwarp();
    release_stage(empty);
}

}  // namespace tilewright
