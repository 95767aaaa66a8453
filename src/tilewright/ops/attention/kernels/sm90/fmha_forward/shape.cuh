// Sizes, the layout of shared memory and the barriers of the forward kernel.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kSwizzle = 128;    // bytes of a box row: the span of the TMA swizzle
constexpr u32 kWarpgroupM = 64;  // rows of one wgmma
constexpr u32 kBoxBytes = kWarpgroupM * kSwizzle;

// [first, end)
struct alignas(8) Interval {
    int first, end;
};

template <typename Config> struct FmhaShape {
    using Element = typename Config::Element;
    static constexpr u32 kD = Config::kD, kDv = Config::kDv, kN = Config::kBlockN;
    static constexpr u32 kWarpgroups = Config::kWarpgroups, kStages = Config::kStages, kQStages = Config::kQStages;
    static constexpr u32 kM = kWarpgroups * kWarpgroupM;
    static constexpr u32 kThreads = 128 * (kWarpgroups + 1);  // and one producer warpgroup
    static constexpr u32 kBoxColumns = kSwizzle / sizeof(Element);  // elements of a box row
    static constexpr u32 kBoxes = (kD + kBoxColumns - 1) / kBoxColumns, kBoxesV = (kDv + kBoxColumns - 1) / kBoxColumns;
    // Boxes of 64 columns lie one after another; TMA fills columns beyond D with zeros, and no wgmma reads them.
    static constexpr u32 kQBytes = kBoxes * kBoxBytes;  // of one warpgroup
    static constexpr u32 kKBytes = kBoxes * kN * kSwizzle, kVBytes = kBoxesV * kN * kSwizzle;
    static constexpr u32 kShared = kQStages * kWarpgroups * kQBytes + kStages * (kKBytes + kVBytes);
    static_assert(sizeof(Element) == 2, "bfloat16 or float16");
    static_assert(kWarpgroups >= 1 && kWarpgroups <= 3, "one to three consumer warpgroups");
    static_assert(kD % 16 == 0 && kDv % 16 == 0 && kD <= 256 && kDv <= 256, "whole wgmma K of 16; O fits 128 registers");
    static_assert(kDv <= kD, "O is staged in Q's buffer");
    static_assert(kN % 16 == 0 && kN <= 256, "whole wgmma K of 16");
};

// Each warpgroup has its own Q and O.
template <typename Config> struct FmhaBarriers {
    using Shape = FmhaShape<Config>;
    Barrier q_full[Shape::kQStages][Shape::kWarpgroups], o_full[Shape::kQStages][Shape::kWarpgroups];
    Barrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];

    __device__ void init() {
        for (u32 i = 0; i < Shape::kQStages; ++i) {
            for (u32 g = 0; g < Shape::kWarpgroups; ++g) {
                q_full[i][g].init(1);
                o_full[i][g].init(4);  // one arrival per warp
            }
        }
        for (u32 i = 0; i < Shape::kStages; ++i) {
            k_full[i].init(1), v_full[i].init(1);
            k_empty[i].init(4 * Shape::kWarpgroups), v_empty[i].init(4 * Shape::kWarpgroups);
        }
    }
};

}  // namespace tilewright
