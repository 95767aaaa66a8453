// Attention of a few query rows of each sequence over a KV cache: every key and value is read once, at memory speed.
//
// The tensor cores are mostly idle: at 4.4 TB/s a multiprocessor of 132 takes 8 KB of keys and values in 430 cycles, and
// multiplies them with 8 query rows in 16 matrix instructions.  What counts is bytes in flight.  So each warp has a ring of
// its own and loads for itself (fmha_decode/ring.cuh): no warp waits for another but where a row tile ends, and there the
// loads of what follows are already on their way.  Units of keys are dealt to the warps of a block in turn, also across row
// tiles and sequences.
//
// Keys are divided among blocks on the device (fmha_decode/division.cuh).  A row tile that one block has alone is written
// at once.  Of the others each block leaves a partial sum, and a second kernel, launched before this one ends, adds them;
// or, with few sequences, the blocks of a cluster read each other's shared memory.
//
// Config: kD, kRows (of a row tile), kKeys (of a unit), kLeast (units of a share), kWarps, kStages, kDivision, kCluster,
// kTokenScales, Element (of q and o), Cache (Element, or float8_e4m3).
#pragma once

#include "fmha_decode/division.cuh"
#include "fmha_decode/layout.cuh"
#include "fmha_decode/merge.cuh"
#include "fmha_decode/ring.cuh"
#include "fmha_decode/unit.cuh"

namespace tilewright {

// The row tile, or the first of them, and the units of a block; 0: nothing to do.
template <typename Config, typename All>
__device__ inline u32 find_share(Walk<All>& walk, const All& all, u32 kv_heads, u32 most, u32 blocks) {
    if constexpr (Division(Config::kDivision) == Division::Cluster) {
        const u32 tile = blockIdx.x / Config::kCluster, rank = cluster_rank();
        const u32 row_tiles = (all.each * all.group + Config::kRows - 1) / Config::kRows;
        const u32 b = tile / (row_tiles * kv_heads);
        walk.start(b, 0);
        walk.head = tile / row_tiles % kv_heads, walk.row_tile = tile % row_tiles;
        const u32 end = walk.s.units * (rank + 1) / Config::kCluster;
        walk.unit = walk.s.units * rank / Config::kCluster;
        return end - walk.unit;
    } else if constexpr (Division(Config::kDivision) == Division::Own) {
        const OwnShares own{Config::kLeast, most};
        const auto weight = [&](int b) {
            const Sequence s = all[b];
            return s.row_tiles * kv_heads * own.count(s.units);
        };
        const Place place = Line(all.count(), weight).locate(blockIdx.x);
        if (place.index == all.count()) return 0;
        const Sequence s = all[place.index];
        const u32 count = own.count(s.units), tile = place.offset / count, begin = place.offset % count * own.units(s.units);
        walk.start(place.index, tile * s.units + begin);
        return min(own.units(s.units), s.units - begin);
    } else {
        const auto weight = [&](int b) { return all[b].all_units(kv_heads); };
        const Line line(all.count(), weight);
        const EqualShares<Config::kLeast> shares(line.total, blocks);
        if (blockIdx.x >= shares.shares) return 0;
        const u32 begin = shares.begin(blockIdx.x);
        const Place place = line.locate(begin);
        walk.start(place.index, place.offset);
        return shares.begin(blockIdx.x + 1) - begin;
    }
}

// Strides are in elements of their tensor.  each, left: as in Sequences.   most: shares of a row tile (Own).   blocks: as
// many as there can be shares (Equal).
template <typename Config>
__global__ void __launch_bounds__(Config::kWarps * 32, 1) sm90_decode(
    const typename Config::Element* q, typename Config::Element* o, float* lse, float* partial, float* stats, const u8* k,
    const u8* v, const int* lengths, const int* block_table, const int* cu_seqlens, const float* sinks,
    const float* k_scale, const float* v_scale, int batch, int tokens, int each, int kv_heads, int group, int capacity,
    int page_size, int left, bool causal, int most, int blocks, float scale, float softcap, i64 q_token,
    i64 q_head, i64 k_page, i64 k_slot, i64 k_head, i64 v_page, i64 v_slot, i64 v_head, i64 table_row, i64 k_scale_page,
    i64 k_scale_slot, i64 k_scale_head, i64 v_scale_page, i64 v_scale_slot, i64 v_scale_head) {
    using Shape = Layout<Config>;
    using Element = typename Config::Element;
    using All = Sequences<Config::kRows, Config::kKeys>;
    constexpr i64 kItem = Shape::kWidened ? 1 : 2;
    constexpr bool kInCluster = Division(Config::kDivision) == Division::Cluster;
    constexpr u32 kWarps = Config::kWarps;
    extern __shared__ __align__(1024) u8 shared[];

    if constexpr (kInCluster) launch_dependents();
    griddepcontrol_wait();
    if constexpr (!kInCluster) launch_dependents();  // the second kernel reads lengths before it waits: they are there

    const All all{lengths, cu_seqlens, batch, tokens, each, group, capacity, left};
    Walk<All> walk(all, kv_heads);
    const u32 units = find_share<Config>(walk, all, kv_heads, most, blocks);
    if (!kInCluster && units == 0) return;

    const Cache cache{k, v, block_table, k_scale, v_scale, k_page * kItem, k_slot * kItem, k_head * kItem, v_page * kItem,
                      v_slot * kItem, v_head * kItem, table_row, k_scale_page, k_scale_slot, k_scale_head, v_scale_page,
                      v_scale_slot, v_scale_head, u32(page_size)};
    u8* const ring = shared + warp_index() * Shape::kStages * Shape::kStageBytes;
    UnitLoader<Config, All> loader(cache, walk, units, ring);
    for (u32 i = 0; i < Shape::kStages; ++i) loader.issue();

    const Output<Element> out{o, lse, partial, reinterpret_cast<float2*>(stats), sinks, kv_heads * group};
    Attend<Config> attend;
    u32 stage = 0, done = 0;
    do {
        // The part of a row tile that this block has
        const Sequence& s = walk.s;
        const u32 count = min(s.units - walk.unit, units - done);
        const Band band{group, walk.row_tile * int(Config::kRows), s.tokens * group, s.length, s.tokens, left, causal};
        const RowTile tile{s.first_token, group, walk.head * group, band.row_begin, band.rows};
        const int begin_of_all = band.begin(band.position(Config::kRows - 1)), end_of_all = band.end(band.position(0));
        Scores scores{scale * kLog2e, softcap * kLog2e};
        float value_factor = 1;
        if (Shape::kWidened && !Config::kTokenScales) {
            scores.scale *= k_scale[walk.head * k_scale_head];
            value_factor = v_scale[walk.head * v_scale_head];
        }
        attend.load_queries(q + s.first_token * q_token + tile.first_head * q_head, band, q_token, q_head);
        attend.clear();

        const u32 own = (warp_index() + kWarps - done % kWarps) % kWarps;  // this warp's first unit
        for (u32 i = own; i < count; i += kWarps) {
            const int first = int((s.first_unit + walk.unit + i) * Config::kKeys);
            const bool masked = first < begin_of_all || first + int(Config::kKeys) > end_of_all;
            cp_async_wait<Shape::kStages - 1>();
            __syncwarp();
            attend.add(ring + stage * Shape::kStageBytes, first, masked, band, scores);
            __syncwarp();
            loader.issue();
            stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
        }
        if (Config::kTokenScales) value_factor = attend.value_scale;

        const bool whole = walk.unit == 0 && count == s.units;
        const u32 slot = Division(Config::kDivision) == Division::Equal ? 2 * blockIdx.x + (done > 0) : blockIdx.x;
        merge_warps(shared, attend, own < count, value_factor, [&](u32 row, u32 column, float2 sum, float m, float l) {
            if constexpr (kInCluster) {
                *reinterpret_cast<float2*>(shared + Shape::kBlockOffset + (row * Config::kD + column) * 4) = sum;
                if (column == 0) *reinterpret_cast<float2*>(shared + Shape::kBlockStatsOffset + row * 8) = {m, l};
            } else if (whole) {
                store_finished(out, tile, row, column, Config::kD, sum, m, l);
            } else if (tile.has(row)) {
                const i64 at = i64(slot) * Config::kRows + row;
                *reinterpret_cast<float2*>(out.partial + at * Config::kD + column) = sum;
                if (column == 0) out.stats[at] = {m, l};
            }
        });
        if constexpr (kInCluster) merge_cluster<Config>(shared, out, tile);
        done += count;
        walk.advance(count);
    } while (done < units);
    cp_async_wait<0>();
}

}  // namespace tilewright
