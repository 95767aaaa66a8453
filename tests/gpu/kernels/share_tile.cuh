// Each cluster of two blocks reads one 32 x 32 float tile once: block 0 multicasts it, both add it to the output, block 1
// one row of tiles further down.  Proves tma_load_multicast, arrival in another block, cluster barriers and tma_reduce_add.
#pragma once

#include <tilewright/tma.cuh>

namespace tilewright {

template <typename Config>
__global__ void share_tile(
    const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap sum, int distance) {
    constexpr u32 kSide = Config::kSide, kBytes = kSide * kSide * sizeof(float);
    __shared__ alignas(128) float tile[kSide * kSide];
    __shared__ Barrier full, empty;
    const u32 rank = cluster_rank(), column = blockIdx.x / 2 * kSide;
    if (threadIdx.x == 0) {
        full.init(1);
        empty.init(2);
        fence_barrier_init();
    }
    cluster_sync();  // neither block may write a barrier that is not there yet
    if (threadIdx.x == 0) {
        full.arrive_and_expect_tx(kBytes);
        empty.arrive_remote(0);  // both blocks tell block 0 that their tile may be filled
        if (rank == 0) {
            empty.wait(0);
            tma_load_multicast(tile, source, full, 0b11, column, 0);
        }
        full.wait(0);
        tma_reduce_add(sum, tile, column, rank * distance);
        tma_commit();
        tma_wait_read<0>();
    }
    cluster_sync();  // shared memory of both must live until the copies have ended
}

}  // namespace tilewright
