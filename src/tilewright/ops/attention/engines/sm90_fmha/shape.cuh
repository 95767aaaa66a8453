// Sizes of the attention kernel, and what lies where in shared memory.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;                   // bytes of a row of a box, and the swizzle
constexpr u32 kRowsOfGroup = 64;             // queries of a warpgroup
constexpr u32 kBoxBytes = kRowsOfGroup * kSpan;

// From the first on, before the end.
struct alignas(8) Interval {
    int first, end;
};

template <typename Config> struct FmhaShape {
    using Element = typename Config::Element;
    static constexpr u32 kD = Config::kD, kDv = Config::kDv, kN = Config::kBlockN;
    static constexpr u32 kGroups = Config::kGroups, kStages = Config::kStages, kQStages = Config::kQStages;
    static constexpr u32 kM = kGroups * kRowsOfGroup;
    static constexpr u32 kThreads = 128 * (kGroups + 1);  // and the producers'
    static constexpr u32 kWide = kSpan / sizeof(Element);  // elements of a row of a box
    static constexpr u32 kBoxes = (kD + kWide - 1) / kWide, kBoxesV = (kDv + kWide - 1) / kWide;
    // Boxes stand side by side; what of the last one lies beyond D is zero, and is not multiplied.
    static constexpr u32 kQBytes = kBoxes * kBoxBytes;  // of a warpgroup
    static constexpr u32 kKBytes = kBoxes * kN * kSpan, kVBytes = kBoxesV * kN * kSpan;
    static constexpr u32 kShared = kQStages * kGroups * kQBytes + kStages * (kKBytes + kVBytes);
    static_assert(sizeof(Element) == 2, "bfloat16 or float16");
    static_assert(kGroups >= 1 && kGroups <= 3, "one to three warpgroups multiply");
    static_assert(kD % 16 == 0 && kDv % 16 == 0 && kD <= 256 && kDv <= 256, "whole steps of wgmma, at most 128 sums");
    static_assert(kDv <= kD, "O leaves through the memory of Q");
    static_assert(kN % 16 == 0 && kN <= 256, "keys are whole steps of wgmma");
};

// Barriers of a block.  Each warpgroup has its own Q and O.
template <typename Config> struct FmhaBarriers {
    using Shape = FmhaShape<Config>;
    Barrier q_full[Shape::kQStages][Shape::kGroups], o_full[Shape::kQStages][Shape::kGroups];
    Barrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];

    __device__ void init() {
        for (u32 i = 0; i < Shape::kQStages; ++i) {
            for (u32 g = 0; g < Shape::kGroups; ++g) {
                q_full[i][g].init(1);
                o_full[i][g].init(4);  // one arrival a warp
            }
        }
        for (u32 i = 0; i < Shape::kStages; ++i) {
            k_full[i].init(1), v_full[i].init(1);
            k_empty[i].init(4 * Shape::kGroups), v_empty[i].init(4 * Shape::kGroups);
        }
    }
};

}  // namespace tilewright
