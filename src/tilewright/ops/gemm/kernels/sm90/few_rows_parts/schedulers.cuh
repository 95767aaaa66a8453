// Tile schedulers: of one product or a batch of equal ones, or of groups whose rows only the device knows.
//
// A cluster takes tiles index, index + clusters, ...; tiles of the same weights follow each other.  All blocks of a
// cluster, and all warps of a block, schedule by themselves and see the same tiles.
#pragma once

#include <tilewright/ptx.cuh>

#include "layout.cuh"

namespace tilewright {

// Token rows from `row` on, at most kTokens and below `end`, and weight rows from `column` on; `tokens` and `weights` are
// the indices in the batches of A and D, and of B.
struct Tile { u32 row, column, tokens, weights, end; };

template <typename Config> class BatchScheduler {
  public:
    static constexpr bool kFirstTileIsKnown = true;  // while the previous kernel still runs

    __device__ BatchScheduler(u32 m, u32 n, u32 batches)
        : m_(m), tiles_m_((m + Config::kTokens - 1) / Config::kTokens), tiles_n_((n + kBlockN - 1) / kBlockN),
          num_tiles_(tiles_m_ * tiles_n_ * batches), tile_index_(blockIdx.x / Config::kSplit) {}

    __device__ bool more() const { return tile_index_ < num_tiles_; }
    __device__ Tile tile() const {
        const u32 batch = tile_index_ / tiles_m_ / tiles_n_;
        return {tile_index_ % tiles_m_ * Config::kTokens, tile_index_ / tiles_m_ % tiles_n_ * kBlockN, batch, batch, m_};
    }
    __device__ void advance() { tile_index_ += gridDim.x / Config::kSplit; }

  private:
    u32 m_, tiles_m_, tiles_n_, num_tiles_, tile_index_;
};

// Rows starts[g] .. ends[g] of A belong to weights g; without starts they follow those of g - 1.  Each warp keeps a window
// of kWindow groups in the registers of its lanes, kGroupsPerLane a lane, and loads the next when its tiles are done.  An
// empty group costs its share of a load, and the number of groups has no limit.  Bounds are clamped to the rows of A; a
// group whose end lies before its start is empty.
template <typename Config> class GroupScheduler {
    static constexpr u32 kGroupsPerLane = 4, kWindow = 32 * kGroupsPerLane;

  public:
    static constexpr bool kFirstTileIsKnown = false;

    // `masked`: A and D have a batch for each group; otherwise the rows of all groups are in one matrix of m rows.
    __device__ GroupScheduler(const int* starts, const int* ends, u32 groups, u32 m, u32 n, bool masked)
        : starts_(starts), ends_(ends), groups_(groups), m_(m), tiles_n_((n + kBlockN - 1) / kBlockN),
          masked_(masked), tile_index_(blockIdx.x / Config::kSplit) {
        load();
        seek();
    }

    __device__ bool more() const { return window_ < groups_; }
    __device__ Tile tile() const { return tile_; }
    __device__ void advance() {
        tile_index_ += gridDim.x / Config::kSplit;
        seek();
    }

  private:
    __device__ u32 num_tiles_of(u32 i) const {
        return (end_[i] - start_[i] + Config::kTokens - 1) / Config::kTokens * tiles_n_;
    }

    __device__ int first_row(u32 group) const {
        if (starts_ != nullptr) return starts_[group];
        return masked_ || group == 0 ? 0 : ends_[group - 1];
    }

    // Loads this lane's groups of the window; its tiles are tiles_begin_ .. tiles_end_ of the window, by a prefix sum.
    __device__ void load() {
        tiles_end_ = 0;
#pragma unroll
        for (u32 i = 0; i < kGroupsPerLane; ++i) {
            const u32 group = window_ + lane_index() * kGroupsPerLane + i;
            const int start = group < groups_ ? first_row(group) : 0, end = group < groups_ ? ends_[group] : 0;
            start_[i] = u32(min(max(start, 0), int(m_)));
            end_[i] = max(start_[i], u32(min(max(end, 0), int(m_))));
        }
#pragma unroll
        for (u32 i = 0; i < kGroupsPerLane; ++i) tiles_end_ += num_tiles_of(i);
        const u32 lane_tiles = tiles_end_;
#pragma unroll
        for (u32 offset = 1; offset < 32; offset *= 2) {
            const u32 before = __shfl_up_sync(~0u, tiles_end_, offset);
            if (lane_index() >= offset) tiles_end_ += before;
        }
        tiles_begin_ = tiles_end_ - lane_tiles;
    }

    // Sets tile_ to tile `tile_index_`, counted from the first of this window, of this window or of one after it.
    __device__ void seek() {
        u32 window_tiles;
        while (tile_index_ >= (window_tiles = __shfl_sync(~0u, tiles_end_, 31))) {
            tile_index_ -= window_tiles;
            window_ += kWindow;
            if (window_ >= groups_) return;
            load();
        }
        // The lane that has the tile finds its group; the values of the other lanes are not used
        const u32 owner = __ffs(__ballot_sync(~0u, tile_index_ < tiles_end_)) - 1;
        u32 index = tile_index_ - tiles_begin_, slot = 0, start = start_[0], end = end_[0];
#pragma unroll
        for (u32 i = 0; i + 1 < kGroupsPerLane; ++i) {
            if (slot == i && index >= num_tiles_of(i)) {
                index -= num_tiles_of(i), slot = i + 1, start = start_[i + 1], end = end_[i + 1];
            }
        }
        index = __shfl_sync(~0u, index, owner), slot = __shfl_sync(~0u, slot, owner);
        start = __shfl_sync(~0u, start, owner), end = __shfl_sync(~0u, end, owner);
        const u32 tiles_m = (end - start + Config::kTokens - 1) / Config::kTokens;
        const u32 group = window_ + owner * kGroupsPerLane + slot;
        tile_ = {start + index % tiles_m * Config::kTokens, index / tiles_m * kBlockN, masked_ ? group : 0, group, end};
    }

    const int *starts_, *ends_;
    u32 groups_, m_, tiles_n_;
    bool masked_;
    u32 tile_index_, window_ = 0;  // counted from the window's first tile; the window's first group
    u32 start_[kGroupsPerLane], end_[kGroupsPerLane], tiles_begin_, tiles_end_;
    Tile tile_;
};

}  // namespace tilewright
