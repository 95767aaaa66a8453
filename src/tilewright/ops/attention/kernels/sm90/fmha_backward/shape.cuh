// Sizes, the layout of shared memory and the barriers of the backward kernel.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

#include "fmha_forward/shape.cuh"

namespace tilewright {

constexpr u32 kBackwardWarpgroups = 2;                            // consumers, 64 keys each
constexpr u32 kBackwardKeys = kBackwardWarpgroups * kWarpgroupM;  // keys of a block
constexpr u32 kRowFloats = 2;                                     // floats per query: lse and delta

template <typename Config> struct BackwardShape {
    using Element = typename Config::Element;
    static constexpr u32 kD = Config::kD, kDv = Config::kDv, kM = Config::kBlockM, kN = kBackwardKeys;
    static constexpr u32 kStages = Config::kStages, kDsStages = Config::kDsStages, kOutStages = Config::kOutStages;
    static constexpr u32 kThreads = 128 * (kBackwardWarpgroups + 1);  // and one producer warpgroup
    static constexpr u32 kBoxColumns = kSwizzle / sizeof(Element);  // elements of a box row
    // The warpgroups divide dQ of a query tile by rows if it has 64 for each, else by columns
    static constexpr bool kSplitColumns = kM < kN;
    // Issue dV before dS is computed: needs registers for P both in fp32 and rounded
    static constexpr bool kEarlyDv = kM == 64;
    static constexpr u32 kBoxes = (kD + kBoxColumns - 1) / kBoxColumns;
    static constexpr u32 kBoxesV = (kDv + kBoxColumns - 1) / kBoxColumns;
    // Three boxes of K: dS is computed from P rounded, and dQ stored in two parts, because dK and dV leave no registers
    static constexpr bool kWide = kBoxes > 2;
    // Columns of dQ of one warpgroup: all, half of one box, or one of two boxes, then half of the third
    static constexpr u32 kDqBoxColumns = !kSplitColumns ? kD : kD <= kBoxColumns ? kBoxColumns / 2 : kBoxColumns;
    static constexpr u32 kDqRestColumns = kWide ? kBoxColumns / 2 : 0, kDqColumns = kDqBoxColumns + kDqRestColumns;
    // First column of the j-th group of eight columns of dQ of warpgroup `group`
    __device__ static u32 dq_column(u32 group, u32 j) {
        if (kWide && 8 * j >= kDqBoxColumns) return kDqBoxColumns + group * kDqRestColumns + 8 * j;
        return 8 * j + (kSplitColumns ? group * kDqBoxColumns : 0);
    }
    // In K: bytes from the columns of one warpgroup to those of the next
    static constexpr u32 kDqKOffset = !kSplitColumns ? 0 : kD <= kBoxColumns ? kSwizzle / 2 : kN * kSwizzle;
    // Boxes of 64 columns lie one after another; TMA fills columns beyond D with zeros.
    static constexpr u32 kKBytes = kBoxes * kN * kSwizzle, kVBytes = kBoxesV * kN * kSwizzle;
    static constexpr u32 kQBytes = kBoxes * kM * kSwizzle, kDoBytes = kBoxesV * kM * kSwizzle;
    static constexpr u32 kDsBytes = kN * kM * sizeof(Element);
    static constexpr u32 kStatsBytes = kRowFloats * kM * sizeof(float);
    // Output stages: dQ in fp32, and dV and dK at the end of a key tile
    static constexpr u32 kDqBytes = kWarpgroupM * kDqColumns * sizeof(float);
    static constexpr u32 kDqBoxBytes = kWarpgroupM * kDqBoxColumns * sizeof(float);
    static constexpr u32 kDkvBytes = (kBoxes > kBoxesV ? kBoxes : kBoxesV) * kBoxBytes;
    static constexpr u32 kWarpgroupOutBytes = kDqBytes > kDkvBytes ? kDqBytes : kDkvBytes;  // of one warpgroup
    static constexpr u32 kOutBytes = kBackwardWarpgroups * kWarpgroupOutBytes;
    static constexpr u32 kVOffset = kKBytes, kQOffset = kVOffset + kVBytes, kDoOffset = kQOffset + kStages * kQBytes;
    static constexpr u32 kDsOffset = kDoOffset + kStages * kDoBytes, kOutOffset = kDsOffset + kDsStages * kDsBytes;
    static constexpr u32 kStatsOffset = kOutOffset + kOutStages * kOutBytes, kShared = kStatsOffset + kStages * kStatsBytes;
    static_assert(sizeof(Element) == 2, "bfloat16 or float16");
    static_assert(kM == 64 || kM == 128, "a query tile is 64 or 128 rows");
    static_assert(kD % 16 == 0 && kDv % 16 == 0 && kD <= 192 && kDv <= 128, "whole wgmma K of 16; dK and dV fit the registers");
    static_assert(!kWide || (kEarlyDv && !Config::kSoftcap), "no registers for more queries, or for the softcap's derivative");
    static_assert(kEarlyDv || !Config::kSoftcap, "128 queries leave no registers for the derivative of the softcap");
    static_assert(kSplitColumns || kBoxes == 1, "dQ split by rows needs K in one box");
    static_assert(kOutStages >= 1 && kOutStages <= 3, "one warp stores each output stage");
};

template <typename Config> struct BackwardBarriers {
    using Shape = BackwardShape<Config>;
    static constexpr u32 kWarps = 4 * kBackwardWarpgroups;
    Barrier tile_full[2], tile_empty[2];
    Barrier k_full, v_full, kv_empty;
    Barrier q_full[Shape::kStages], q_empty[Shape::kStages], do_full[Shape::kStages], do_empty[Shape::kStages];
    Barrier out_full[Shape::kOutStages], out_empty[Shape::kOutStages];

    __device__ void init() {
        for (u32 i = 0; i < 2; ++i) tile_full[i].init(1), tile_empty[i].init(kWarps + Shape::kOutStages);
        k_full.init(1), v_full.init(1), kv_empty.init(kWarps);
        for (u32 i = 0; i < Shape::kStages; ++i) {
            q_full[i].init(2), do_full[i].init(1);  // Q, and lse and delta of its rows
            q_empty[i].init(kWarps), do_empty[i].init(kWarps);
        }
        for (u32 i = 0; i < Shape::kOutStages; ++i) out_full[i].init(kWarps), out_empty[i].init(1);
    }
};

}  // namespace tilewright
