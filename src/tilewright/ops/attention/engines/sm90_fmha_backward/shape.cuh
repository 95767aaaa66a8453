// Sizes of the backward kernel, what lies where in shared memory, and its barriers.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

#include "sm90_fmha/shape.cuh"

namespace tilewright {

constexpr u32 kBackwardGroups = 2;                               // warpgroups that multiply, 64 keys each
constexpr u32 kBackwardKeys = kBackwardGroups * kRowsOfGroup;    // of a block
constexpr u32 kRowsPart = 2;                                     // floats a query: log of the sum, and delta

template <typename Config> struct BackwardShape {
    using Element = typename Config::Element;
    static constexpr u32 kD = Config::kD, kDv = Config::kDv, kM = Config::kBlockM, kN = kBackwardKeys;
    static constexpr u32 kStages = Config::kStages, kDsStages = Config::kDsStages, kOutStages = Config::kOutStages;
    static constexpr u32 kThreads = 128 * (kBackwardGroups + 1);  // and the movers'
    static constexpr u32 kWide = kSpan / sizeof(Element);         // elements of a row of a box
    // dQ of a tile is divided between the warpgroups: by rows if it has as many as both multiply, else by columns
    static constexpr bool kByColumns = kM < kN;
    static constexpr bool kEarlyDv = kM == 64;  // dV begun before dS is made: where registers hold P rounded and not
    static constexpr u32 kBoxes = (kD + kWide - 1) / kWide;
    static constexpr u32 kBoxesV = (kDv + kWide - 1) / kWide;
    static constexpr u32 kPartColumns = !kByColumns ? kD : kD <= kWide ? kWide / 2 : kWide;  // of a warpgroup's dQ
    // In K, from a warpgroup's columns to the next one's
    static constexpr u32 kPartOffset = !kByColumns ? 0 : kD <= kWide ? kSpan / 2 : kN * kSpan;
    // Boxes stand side by side; what of the last one lies beyond D is zero.
    static constexpr u32 kKBytes = kBoxes * kN * kSpan, kVBytes = kBoxesV * kN * kSpan;
    static constexpr u32 kQBytes = kBoxes * kM * kSpan, kDoBytes = kBoxesV * kM * kSpan;
    static constexpr u32 kDsBytes = kN * kM * sizeof(Element);
    static constexpr u32 kRowBytes = kRowsPart * kM * sizeof(float);
    // What leaves: dQ in float, and at the end of a tile of keys dV and dK
    static constexpr u32 kPartBytes = kRowsOfGroup * kPartColumns * sizeof(float);
    static constexpr u32 kKeysBytes = (kBoxes > kBoxesV ? kBoxes : kBoxesV) * kBoxBytes;
    static constexpr u32 kHalfBytes = kPartBytes > kKeysBytes ? kPartBytes : kKeysBytes;  // of a warpgroup
    static constexpr u32 kOutBytes = kBackwardGroups * kHalfBytes;
    static constexpr u32 kAtV = kKBytes, kAtQ = kAtV + kVBytes, kAtDo = kAtQ + kStages * kQBytes;
    static constexpr u32 kAtDs = kAtDo + kStages * kDoBytes, kAtOut = kAtDs + kDsStages * kDsBytes;
    static constexpr u32 kAtRows = kAtOut + kOutStages * kOutBytes, kShared = kAtRows + kStages * kRowBytes;
    static_assert(sizeof(Element) == 2, "bfloat16 or float16");
    static_assert(kM == 64 || kM == 128, "a tile of queries is one or two steps of wgmma");
    static_assert(kD % 16 == 0 && kDv % 16 == 0 && kD <= 128 && kDv <= 128, "whole steps of wgmma; sums fit registers");
    static_assert(kEarlyDv || !Config::kSoftcap, "registers do not hold the derivative of the cap");
    static_assert(kByColumns || kBoxes == 1, "the rows of a warpgroup's dQ stand in one box");
    static_assert(kOutStages >= 1 && kOutStages <= 3, "a warp for each");
};

template <typename Config> struct BackwardBarriers {
    using Shape = BackwardShape<Config>;
    static constexpr u32 kWarps = 4 * kBackwardGroups;
    Barrier tile_full[2], tile_empty[2];
    Barrier k_full, v_full, keys_empty;
    Barrier q_full[Shape::kStages], q_empty[Shape::kStages], do_full[Shape::kStages], do_empty[Shape::kStages];
    Barrier out_full[Shape::kOutStages], out_empty[Shape::kOutStages];

    __device__ void init() {
        for (u32 i = 0; i < 2; ++i) tile_full[i].init(1), tile_empty[i].init(kWarps + Shape::kOutStages);
        k_full.init(1), v_full.init(1), keys_empty.init(kWarps);
        for (u32 i = 0; i < Shape::kStages; ++i) {
            q_full[i].init(2), do_full[i].init(1);  // Q and the floats of its rows
            q_empty[i].init(kWarps), do_empty[i].init(kWarps);
        }
        for (u32 i = 0; i < Shape::kOutStages; ++i) out_full[i].init(kWarps), out_empty[i].init(1);
    }
};

}  // namespace tilewright
