// Copies a matrix with the TMA alone: no thread touches an element.
//
// One thread of each block keeps a pipeline of tiles in flight: it loads tile i + kStages - 1 while tile i, once landed, is
// stored.  Proves tensor maps, mbarrier phases, loads, stores, ragged edges and the tile scheduler.
//
// Config: kRows, kColumns (the box), kStages, Element.
#pragma once

#include <tilewright/mbarrier.cuh>
#include <tilewright/raster.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(32, 1) tma_copy(
    const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap target, int rows, int columns) {
    constexpr u32 kTileBytes = Config::kRows * Config::kColumns * sizeof(typename Config::Element);
    constexpr u32 kStages = Config::kStages;
    static_assert(kTileBytes % 128 == 0, "the TMA needs each stage aligned to 128 bytes");
    static_assert(kStages >= 2, "with one stage every load would wait for the previous store");

    extern __shared__ __align__(128) u8 stages[];
    __shared__ Barrier full[kStages];
    if (threadIdx.x != 0) return;

    // Initialise the barriers
    for (u32 i = 0; i < kStages; ++i) full[i].init(1);
    fence_barrier_init();

    const u32 tile_rows = (rows + Config::kRows - 1) / Config::kRows;
    const u32 tile_columns = (columns + Config::kColumns - 1) / Config::kColumns;
    StaticTileScheduler<4> to_load(tile_rows, tile_columns), to_store(tile_rows, tile_columns);
    Ring<kStages> load, store;

    const auto load_one = [&] {
        u32 row, column;
        if (!to_load.next(row, column)) return;
        full[load.stage].arrive_and_expect_tx(kTileBytes);  // a box that reaches over an edge also counts in full
        tma_load(stages + load.stage * kTileBytes, source, full[load.stage], column * Config::kColumns, row * Config::kRows);
        load.advance();
    };

    // Fill the pipeline
    for (u32 i = 0; i < kStages - 1; ++i) load_one();

    u32 row, column;
    while (to_store.next(row, column)) {
        // Wait for the tile, and store it
        full[store.stage].wait(store.parity);
        tma_store(target, stages + store.stage * kTileBytes, column * Config::kColumns, row * Config::kRows);
        tma_commit();

        // The next load overwrites the previous store's stage: wait until that store has read it
        tma_wait_read<1>();
        load_one();
        store.advance();
    }
    tma_wait_read<0>();  // shared memory must outlive the stores
}

}  // namespace tilewright
