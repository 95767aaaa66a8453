// Tile order of a persistent kernel: grid = number of SMs (or fewer), block b takes tiles b, b + gridDim.x, ...
//
// Tiles are rastered in groups of group_m rows of tiles, column by column within a group (GROUP_SIZE_M of Triton's matmul
// tutorial), so that the blocks of a wave share few rows of A and few columns of B: a wave of W tiles reads about W / group_m
// columns and group_m rows, least where the two cost the same.  Every tile is visited exactly once, for any grid.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// Row and column of tile `index` among rows x columns tiles, in groups of `group_m` rows.
__device__ inline void grouped_raster(u32 index, u32 rows, u32 columns, u32 group_m, u32& row, u32& column) {
    const u32 group = index / (group_m * columns);
    const u32 index_in_group = index - group * group_m * columns;
    const u32 first_row = group * group_m;
    const u32 group_rows = min(group_m, rows - first_row);  // the last group may have fewer
    row = first_row + index_in_group % group_rows;
    column = index_in_group / group_rows;
}

template <u32 kGroupM> class StaticTileScheduler {
    static_assert(kGroupM >= 1, "a group has at least one row of tiles");

  public:
    __device__ StaticTileScheduler(u32 rows, u32 columns) : rows_(rows), columns_(columns), next_(blockIdx.x) {}

    // The next tile of this block; false when there is none.
    __device__ bool next(u32& row, u32& column) {
        if (next_ >= rows_ * columns_) return false;
        grouped_raster(next_, rows_, columns_, kGroupM, row, column);
        next_ += gridDim.x;
        return true;
    }

  private:
    u32 rows_, columns_, next_;
};

}  // namespace tilewright
