// A query tile from the view of one consumer warpgroup, and the order in which warpgroups issue their wgmmas.
#pragma once

#include <tilewright/epilogue.cuh>

#include "schedule.cuh"

namespace tilewright {

// Named barriers by which the warpgroups issue their wgmmas in turns (ping-pong).
template <u32 kWarpgroups, bool kTurns> struct TurnBarrier {
    u32 group;

    __device__ void start() const {
        if (kTurns && group == kWarpgroups - 1) named_barrier_arrive(1, 256);
    }
    __device__ void wait() const {
        if (kTurns) named_barrier_sync(1 + group, 256);
    }
    __device__ void pass() const {
        if (kTurns) named_barrier_arrive(group + 1 == kWarpgroups ? 1 : group + 2, 256);
    }
    __device__ void end() const {  // consumes the last arrival at warpgroup 0's barrier
        if (group == 0) wait();
    }
};

// One query tile, from the view of one warpgroup.
template <typename Config> struct WarpgroupTile {
    using Visible = VisibleKeys<typename Config::Mask>;
    static constexpr int kN = Config::kBlockN;

    FmhaTile<Config> tile;
    int row;                   // first query of this warpgroup
    // Band and packed:
    int full_first, full_end;  // key tiles of which every query of the warpgroup sees every key
    int end;                   // no query of the warpgroup sees a key from this tile on
    Interval row_keys[2];      // the keys that this thread's two queries see

    // Takes the next tile; false if there is none.
    __device__ bool next(FmhaScheduler<Config>& scheduler, const Visible& visible, u32 group) {
        if (!scheduler.next(tile)) return false;
        row = tile.row + int(group * kWarpgroupM);
        if constexpr (!FmhaTile<Config>::kProgram) {
            const Interval top = visible.of_row(row, tile.batch);
            const Interval bottom = visible.of_row(row + int(kWarpgroupM) - 1, tile.batch);
            full_first = (bottom.first + kN - 1) / kN, full_end = top.end / kN;
            end = max((bottom.end + kN - 1) / kN, tile.first + 1);
            row_keys[0] = keys_of_row(visible, 0), row_keys[1] = keys_of_row(visible, 1);
        }
        return true;
    }
    __device__ Interval keys_of_row(const Visible& visible, u32 h) const {
        return visible.of_row(row + int(fragment_row() + 8 * h), tile.batch);
    }
};

}  // namespace tilewright
