// A start before the previous kernel ends: the first stages of B to the L2.
#pragma once

#include <tilewright/tile_scheduler.cuh>

namespace tilewright {

// Prefetches the first 32 KB of B, or its first stage, of this block's first tile.  Called by one thread before
// griddepcontrol_wait(): the previous kernel seldom writes B, and if it does, the L2 is coherent.  Much more is slower, since
// the load fetches again what is still on its way (few_rows.cuh).  share: as of B::load.
template <typename Scheduler, typename B>
__device__ inline void prefetch_first_b(
    const TensorMap& map, const SchedulerArgs& args, const typename Scheduler::Table& table, u32 rank, u32 share) {
    constexpr u32 kBytes = 32 * 1024, kStages = B::kBytes < kBytes ? kBytes / B::kBytes : 1;
    Scheduler scheduler(args, table, rank);
    Tile tile;
    if (!scheduler.next(tile)) return;
    for (u32 i = 0; i < min(tile.k_blocks, kStages); ++i) {
        B::prefetch_l2(map, tile.column, tile.k + i * B::kBlockK, tile.batch_b, share);
    }
}

}  // namespace tilewright
