// The tiles of one block of a persistent GEMM, one after the other.
//
// Clusters take units of kClusterM x kClusterN tiles; the blocks of a cluster take those of a unit by their rank.
#pragma once

#include <tilewright/scheduler.cuh>

namespace tilewright {

// First row of A and D, first column of op(B) and D, and the product of a batch it belongs to.
struct Tile { u32 row, column, batch; };

template <typename Config> class TileWalk {
    static constexpr u32 kCluster = Config::kClusterM * Config::kClusterN;

  public:
    __device__ TileWalk(u32 m, u32 n, u32 batches, u32 band, u32 rank)
        : rows_((m + Config::kBlockM * Config::kClusterM - 1) / (Config::kBlockM * Config::kClusterM)),
          columns_((n + Config::kBlockN * Config::kClusterN - 1) / (Config::kBlockN * Config::kClusterN)),
          units_(rows_ * columns_ * batches), band_(band), rank_(rank), unit_(blockIdx.x / kCluster) {}

    // The next tile of this block, which may lie outside of D; false when there is none.
    __device__ bool next(Tile& tile) {
        if (unit_ >= units_) return false;
        u32 row, column;
        tile.batch = unit_ / (rows_ * columns_);
        tile_in_bands(unit_ - tile.batch * rows_ * columns_, rows_, columns_, band_, row, column);
        row = row * Config::kClusterM + (Config::kClusterM > 1 ? rank_ : 0);
        column = column * Config::kClusterN + (Config::kClusterN > 1 ? rank_ : 0);
        tile.row = row * Config::kBlockM, tile.column = column * Config::kBlockN;
        unit_ += gridDim.x / kCluster;
        return true;
    }

  private:
    u32 rows_, columns_, units_, band_, rank_, unit_;
};

}  // namespace tilewright
