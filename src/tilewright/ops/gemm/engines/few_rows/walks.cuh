// Which tiles a cluster works on: of one product or a batch of equal ones, or of groups whose rows the device knows.
//
// A cluster takes tiles index, index + clusters, ...; tiles of the same weights follow each other.  All blocks of a
// cluster, and all warps of a block, walk by themselves and see the same tiles.
#pragma once

#include <tilewright/ptx.cuh>

#include "layout.cuh"

namespace tilewright {

// Token rows `row` .. below `end`, of which the first kTokens belong to the tile, and weight rows from `column` on;
// `tokens` and `weights` are the indices in the batches of A and D, and of B.
struct Tile { u32 row, column, tokens, weights, end; };

template <typename Config> class BatchWalk {
  public:
    static constexpr bool kFirstIsKnown = true;  // before the kernel before has ended

    __device__ BatchWalk(u32 m, u32 n, u32 batches)
        : height_(m), rows_((m + Config::kTokens - 1) / Config::kTokens), columns_((n + kBlockN - 1) / kBlockN),
          all_(rows_ * columns_ * batches), tile_(blockIdx.x / Config::kSplit) {}

    __device__ bool more() const { return tile_ < all_; }
    __device__ Tile tile() const {
        const u32 batch = tile_ / rows_ / columns_;
        return {tile_ % rows_ * Config::kTokens, tile_ / rows_ % columns_ * kBlockN, batch, batch, height_};
    }
    __device__ void advance() { tile_ += gridDim.x / Config::kSplit; }

  private:
    u32 height_, rows_, columns_, all_, tile_;
};

// Rows starts[g] .. ends[g] of A belong to the weights g; without starts they follow those of g - 1.  Each warp keeps a
// window of kWindow groups in the registers of its lanes, kEach a lane, and moves on when its tiles are done: empty groups
// cost their share of a load, and their number has no limit.  Bounds beyond A are cut, and where an end lies before its
// start there is nothing.
template <typename Config> class GroupWalk {
    static constexpr u32 kEach = 4, kWindow = 32 * kEach;

  public:
    static constexpr bool kFirstIsKnown = false;

    // `batched`: A and D have a batch for each group; else all groups' rows lie in one matrix of m rows.
    __device__ GroupWalk(const int* starts, const int* ends, u32 groups, u32 m, u32 n, bool batched)
        : starts_(starts), ends_(ends), groups_(groups), height_(m), columns_((n + kBlockN - 1) / kBlockN),
          batched_(batched), tile_(blockIdx.x / Config::kSplit) {
        load();
        find();
    }

    __device__ bool more() const { return window_ < groups_; }
    __device__ Tile tile() const { return found_; }
    __device__ void advance() {
        tile_ += gridDim.x / Config::kSplit;
        find();
    }

  private:
    __device__ u32 tiles(u32 i) const { return (end_[i] - start_[i] + Config::kTokens - 1) / Config::kTokens * columns_; }

    __device__ int first_row(u32 group) const {
        if (starts_ != nullptr) return starts_[group];
        return batched_ || group == 0 ? 0 : ends_[group - 1];
    }

    // This lane's groups of the window, and how many tiles all lanes before it have, and it.
    __device__ void load() {
        until_ = 0;
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
            const u32 group = window_ + lane_index() * kEach + i;
            const int start = group < groups_ ? first_row(group) : 0, end = group < groups_ ? ends_[group] : 0;
            start_[i] = u32(min(max(start, 0), int(height_)));
            end_[i] = max(start_[i], u32(min(max(end, 0), int(height_))));
        }
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) until_ += tiles(i);
        const u32 own = until_;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 before = __shfl_up_sync(~0u, until_, step);
            if (lane_index() >= step) until_ += before;
        }
        from_ = until_ - own;
    }

    // Tile `tile_` of this window or of one after it, into `found_`.
    __device__ void find() {
        u32 all;
        while (tile_ >= (all = __shfl_sync(~0u, until_, 31))) {
            tile_ -= all;
            window_ += kWindow;
            if (window_ >= groups_) return;
            load();
        }
        const u32 owner = __ffs(__ballot_sync(~0u, tile_ < until_)) - 1;
        u32 at = tile_ - from_, which = 0, start = start_[0], end = end_[0];  // of use in the owner alone
#pragma unroll
        for (u32 i = 0; i + 1 < kEach; ++i) {
            if (which == i && at >= tiles(i)) at -= tiles(i), which = i + 1, start = start_[i + 1], end = end_[i + 1];
        }
        at = __shfl_sync(~0u, at, owner), which = __shfl_sync(~0u, which, owner);
        start = __shfl_sync(~0u, start, owner), end = __shfl_sync(~0u, end, owner);
        const u32 rows = (end - start + Config::kTokens - 1) / Config::kTokens;
        const u32 group = window_ + owner * kEach + which;
        found_ = {start + at % rows * Config::kTokens, at / rows * kBlockN, batched_ ? group : 0, group, end};
    }

    const int *starts_, *ends_;
    u32 groups_, height_, columns_;
    bool batched_;
    u32 tile_, window_ = 0;  // counted from the window's first tile; the window's first group
    u32 start_[kEach], end_[kEach], from_, until_;
    Tile found_;
};

}  // namespace tilewright
