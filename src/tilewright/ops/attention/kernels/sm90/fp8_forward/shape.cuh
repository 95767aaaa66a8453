// Sizes, the layout of shared memory and the barriers of the float8 forward.
#pragma once

#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

#include "fmha_forward/shape.cuh"

namespace tilewright {

constexpr u32 kScaleBlock = 128;  // tokens that share a scale, where scales are not those of whole heads

template <typename Config> struct Fp8Shape {
    static constexpr u32 kD = Config::kD, kDv = Config::kDv, kN = Config::kBlockN;
    static constexpr u32 kWarpgroups = Config::kWarpgroups, kStages = Config::kStages, kQStages = Config::kQStages;
    static constexpr u32 kThreads = 128 * (kWarpgroups + 1);  // and one producer warpgroup
    // Boxes of Q and K: rows are tokens, of kSpan columns; TMA fills columns beyond D with zeros
    static constexpr u32 kSpan = kD > 64 ? 128 : 64, kBoxes = (kD + kSpan - 1) / kSpan;
    // Boxes of V: rows are its columns, of kSpanV keys
    static constexpr u32 kSpanV = kN % 128 == 0 ? 128 : kN % 64 == 0 ? 64 : 32, kBoxesV = kN / kSpanV;
    static constexpr u32 kQBytes = kBoxes * kWarpgroupM * kSpan;  // of one warpgroup
    static constexpr u32 kKBytes = kBoxes * kN * kSpan, kVBytes = kDv * kN;
    static constexpr u32 kShared = kQStages * kWarpgroups * kQBytes + kStages * (kKBytes + kVBytes);
    static constexpr u32 kPart = kDv / Config::kParts;  // columns of V whose products a thread holds at once
    static_assert(kWarpgroups >= 1 && kWarpgroups <= 4, "one to four consumer warpgroups");
    static_assert(kD % 32 == 0 && kDv % 16 == 0 && kD <= 256 && kDv <= 256, "whole wgmma K of 32; O fits 128 registers");
    static_assert(kPart % 8 == 0 && kDv % kPart == 0, "whole wgmma N of 8");
    static_assert(kN % 32 == 0 && kN <= 256, "whole wgmma K of 32");
};

template <typename Config> struct Fp8Barriers {
    using Shape = Fp8Shape<Config>;
    Barrier q_full[Shape::kQStages][Shape::kWarpgroups], q_empty[Shape::kQStages][Shape::kWarpgroups];
    Barrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
    float k_scale[Shape::kStages], v_scale[Shape::kStages];  // written before, and read with, the tile of that stage

    __device__ void init() {
        for (u32 i = 0; i < Shape::kQStages; ++i) {
            for (u32 g = 0; g < Shape::kWarpgroups; ++g) {
                q_full[i][g].init(1);
                q_empty[i][g].init(4);  // one arrival per warp
            }
        }
        for (u32 i = 0; i < Shape::kStages; ++i) {
            k_full[i].init(1), v_full[i].init(1);
            k_empty[i].init(4 * Shape::kWarpgroups), v_empty[i].init(4 * Shape::kWarpgroups);
        }
    }
};

}  // namespace tilewright
