// Which tile a block works on next, in a kernel that stays on the machine: grid = number of multiprocessors (or less),
// block b takes tiles b, b + gridDim.x, ...
//
// Tiles are walked in bands of kBand rows, column by column inside a band, so that the blocks running at one time share
// few rows of A and few columns of B: a wave of W tiles reads about W / kBand columns and kBand rows, least where the two
// cost the same.  Every tile comes exactly once, for any grid.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// The place of tile `index` among `rows` x `columns` tiles walked in bands of `band` rows.
__device__ inline void tile_in_bands(u32 index, u32 rows, u32 columns, u32 band, u32& row, u32& column) {
    const u32 which = index / (band * columns);
    const u32 within = index - which * band * columns;
    const u32 first = which * band;
    const u32 height = min(band, rows - first);  // the last band may be lower
    row = first + within % height;
    column = within / height;
}

template <u32 kBand> class TileScheduler {
    static_assert(kBand >= 1, "a band has at least one row of tiles");

  public:
    __device__ TileScheduler(u32 rows, u32 columns) : rows_(rows), columns_(columns), next_(blockIdx.x) {}

    // The next tile of this block; false when there is none.
    __device__ bool next(u32& row, u32& column) {
        if (next_ >= rows_ * columns_) return false;
        tile_in_bands(next_, rows_, columns_, kBand, row, column);
        next_ += gridDim.x;
        return true;
    }

  private:
    u32 rows_, columns_, next_;
};

}  // namespace tilewright
