// A matrix copied by the copy engine alone: no thread touches an element.
//
// One thread of each block keeps a ring of tiles in flight: it asks for tile i + kAhead while tile i, once landed, is on
// its way out.  Proves tensor maps, mbarrier phases, loads, stores, ragged edges and the tile scheduler.
//
// Config: kRows, kColumns (the box), kStages, Element.
#pragma once

#include <tilewright/mbarrier.cuh>
#include <tilewright/scheduler.cuh>
#include <tilewright/tma.cuh>

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(32, 1) tma_copy(
    const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap target, int rows, int columns) {
    constexpr u32 kTileBytes = Config::kRows * Config::kColumns * sizeof(typename Config::Element);
    constexpr u32 kStages = Config::kStages;
    static_assert(kTileBytes % 128 == 0, "the copy engine wants each stage aligned to 128 bytes");
    static_assert(kStages >= 2, "with one stage a load would wait for the store before it");

    extern __shared__ __align__(128) u8 stages[];
    __shared__ Barrier full[kStages];
    if (threadIdx.x != 0) return;

    for (u32 i = 0; i < kStages; ++i) full[i].init(1);
    fence_barrier_init();

    const u32 tile_rows = (rows + Config::kRows - 1) / Config::kRows;
    const u32 tile_columns = (columns + Config::kColumns - 1) / Config::kColumns;
    TileScheduler<4> to_load(tile_rows, tile_columns), to_store(tile_rows, tile_columns);
    Ring<kStages> in, out;

    const auto load_one = [&] {
        u32 row, column;
        if (!to_load.next(row, column)) return;
        full[in.stage].expect(kTileBytes);  // a box at an edge counts in full, too
        tma_load(stages + in.stage * kTileBytes, source, full[in.stage], column * Config::kColumns, row * Config::kRows);
        in.advance();
    };

    for (u32 i = 0; i < kStages - 1; ++i) load_one();
    u32 row, column;
    while (to_store.next(row, column)) {
        full[out.stage].wait(out.parity);
        tma_store(target, stages + out.stage * kTileBytes, column * Config::kColumns, row * Config::kRows);
        tma_commit();
        tma_wait_read<1>();  // the store before this one has left its stage, which is the next to be filled
        load_one();
        out.advance();
    }
    tma_wait_read<0>();  // shared memory must outlive the stores
}

}  // namespace tilewright
