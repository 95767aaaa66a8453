// Attention of a few query rows of each sequence over a KV cache: every key and value is read once, at memory speed.
//
// The tensor cores are mostly idle: at 4.4 TB/s a multiprocessor of 132 takes 8 KB of keys and values in 430 cycles, and
// multiplies them with 8 query rows in 16 matrix instructions.  What counts is bytes in flight, and that no latency stops
// them.  So each warp has a ring of its own and loads for itself (fmha_decode/ring.cuh), a range of units of its own, and
// ends the row tiles in it on its own; warps meet once, when the block ends.
//
// Keys are divided among blocks and warps on the device (fmha_decode/division.cuh).  A row tile that one warp has alone is
// written from its registers, one that one block has from shared memory.  Of the others each block leaves a partial sum, and
// a second kernel, launched before this one ends, adds them; or, with few sequences, the blocks of a cluster read each
// other's shared memory.
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

// Units of a block, and of one of its warps; in numbers of the line, or of the row tile if there is one.
struct Share {
    u32 begin, end, own_begin, own_end;
    bool empty;

    __device__ Share() : begin(0), end(0), own_begin(0), own_end(0), empty(true) {}
    template <u32 kWarps> __device__ void divide(u32 begin_, u32 end_) {
        begin = begin_, end = end_, empty = false;
        own_begin = begin + (end - begin) * warp_index() / kWarps;
        own_end = begin + (end - begin) * (warp_index() + 1) / kWarps;
    }
};

// The share of a block, and where this warp begins.
template <typename Config, typename All>
__device__ inline Share find_share(Walk<All>& walk, const All& all, u32 kv_heads, u32 most, u32 blocks) {
    constexpr u32 kWarps = Config::kWarps;
    const u32 number = blockIdx.x / kv_heads;
    Share share;
    if constexpr (Division(Config::kDivision) == Division::Cluster) {
        const u32 tile = blockIdx.x / Config::kCluster / kv_heads, rank = cluster_rank();
        const u32 row_tiles = (all.each * all.group + Config::kRows - 1) / Config::kRows;
        walk.start(tile / row_tiles, 0);
        walk.row_tile = tile % row_tiles;
        const u32 units = walk.s.units;
        share.template divide<kWarps>(units * rank / Config::kCluster, units * (rank + 1) / Config::kCluster);
        walk.unit = share.own_begin;
    } else if constexpr (Division(Config::kDivision) == Division::Own) {
        const OwnShares own{Config::kLeast, most};
        const auto weight = [&](int b) {
            const Sequence s = all[b];
            return s.row_tiles * own.count(s.units);
        };
        const Place place = Line(all.count(), weight).locate(number);
        if (place.index == all.count()) return share;
        const u32 units = all[place.index].units, count = own.count(units), tile = place.offset / count;
        const u32 begin = place.offset % count * own.units(units);
        share.template divide<kWarps>(begin, min(begin + own.units(units), units));
        walk.start(place.index, tile * units + share.own_begin);
    } else {
        const auto weight = [&](int b) { return all[b].all_units(); };
        const Line line(all.count(), weight);
        const EqualShares<Config::kLeast> shares(line.total, blocks);
        if (number >= shares.shares) return share;
        share.template divide<kWarps>(shares.begin(number), shares.begin(number + 1));
        if (share.own_begin == share.own_end) return share;
        const Place place = line.locate(share.own_begin);
        walk.start(place.index, place.offset);
    }
    return share;
}

// Strides are in elements of their tensor.  each, left: as in Sequences.   most: shares of a row tile (Own).   blocks: as
// many as there can be shares of a head (Equal).
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

    if constexpr (kInCluster) launch_dependents(), cluster_arrive_relaxed();
    // What every block reads first, while the kernel before ends: the lengths, and the queries of one sequence
    const u32 head = kInCluster ? blockIdx.x / Config::kCluster % kv_heads : blockIdx.x % kv_heads;
    if (warp_index() == 0) {
        constexpr int kInts = 32, kElements = 64;  // of a line of 128 bytes
        if (int(lane_index()) * kInts < batch) prefetch_l2(lengths + lane_index() * kInts);
        const int row = lane_index() / (Config::kD / kElements), column = lane_index() % (Config::kD / kElements) * kElements;
        if (batch == 1 && row < group) prefetch_l2(q + i64(head * group + row) * q_head + column);
    }
    griddepcontrol_wait();
    if constexpr (!kInCluster) launch_dependents();  // the second kernel reads lengths before it waits: they are there

    const All all{lengths, cu_seqlens, batch, tokens, each, group, capacity, left};
    Walk<All> walk(all);
    const Share share = find_share<Config>(walk, all, kv_heads, most, blocks);
    if (share.empty) return;

    const float* const ks = k_scale == nullptr ? nullptr : k_scale + head * k_scale_head;
    const float* const vs = v_scale == nullptr ? nullptr : v_scale + head * v_scale_head;
    const Cache cache{k + head * k_head * kItem, v + head * v_head * kItem, block_table, ks, vs, k_page * kItem,
                      k_slot * kItem, v_page * kItem, v_slot * kItem, table_row, k_scale_page, k_scale_slot, v_scale_page,
                      v_scale_slot, u32(page_size)};
    const u32 warp = warp_index();
    u8* const ring = shared + warp * Shape::kRingBytes;
    UnitLoader<Config, All> loader(cache, walk, share.own_end - share.own_begin, ring);
    for (u32 i = 0; i < Shape::kStages; ++i) loader.issue();

    const Output<Element> out{o, lse, partial, reinterpret_cast<float2*>(stats), sinks, kv_heads * group};
    const Parts<Config> parts{shared};
    if (lane_index() < 2) parts.part(2 * warp + lane_index()).begin = kNoPart;
    __syncwarp();
    Scores scores{scale * kLog2e, softcap * kLog2e};
    float value_factor = 1;
    if (Shape::kWidened && !Config::kTokenScales) scores.scale *= *ks, value_factor = *vs;

    u32 stage = 0;
    const auto part_of = [&](const Walk<All>& w, u32 at) {
        return Part{at - w.unit, w.s.units, w.s.first_token, w.row_tile * int(Config::kRows), w.s.tokens * group};
    };
    const Part of_cluster = part_of(walk, walk.unit);  // its one row tile
    const auto tile_of = [&](const Part& part) {
        return RowTile{part.first_token, group, int(head) * group, part.row_begin, part.rows};
    };
    for (u32 at = share.own_begin; at < share.own_end;) {
        // The part of a row tile that this warp has
        const Sequence& s = walk.s;
        const u32 count = min(s.units - walk.unit, share.own_end - at);
        const Part part = part_of(walk, at);
        const Band band{group, part.row_begin, part.rows, s.length, s.tokens, left, causal};
        const int begin_of_all = band.begin(band.position(Config::kRows - 1)), end_of_all = band.end(band.position(0));
        Attend<Config> attend;
        attend.load_queries(q + s.first_token * q_token + i64(head) * group * q_head, band, q_token, q_head);
        attend.clear();
        for (u32 i = 0; i < count; ++i) {
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
        at += count;
        if (!kInCluster && count == s.units) {
            store_warp(out, tile_of(part), attend, value_factor);
        } else {
            parts.store(2 * warp + (at == share.own_end), part, attend, value_factor);
        }
        if (at < share.own_end) walk.advance(count);
    }
    __syncthreads();

    // Add the parts of the warps.  A warp has whole rows.
    float2 sum[parts.kPairs];
    float m, l;
    const u32 begin = lane_index() < parts.kCount ? parts.part(lane_index()).begin : kNoPart;
    const u32 used = __ballot_sync(~0u, begin != kNoPart);
    if constexpr (kInCluster) {
        const ClusterSum<Config, Element> cluster{shared};
        const RowTile tile = tile_of(of_cluster);
        cluster_wait();  // every block has started
        for (u32 row = warp; row < Config::kRows && tile.has(row); row += kWarps) {
            parts.add(used, row, sum, m, l);
            cluster.send(row, sum, m, l);
        }
        cluster_sync();
        cluster.finish(out, tile);
    } else {
        // The first part of each row tile: the one used before it is of another
        const u32 earlier = used & ((1u << lane_index()) - 1);
        const u32 begin_before = __shfl_sync(~0u, begin, earlier == 0 ? 0 : 31 - __clz(earlier));
        u32 tiles = __ballot_sync(~0u, begin != kNoPart && (earlier == 0 || begin_before != begin));
        for (; tiles != 0; tiles &= tiles - 1) {
            const Part part = parts.part(__ffs(tiles) - 1);
            const u32 members = __ballot_sync(~0u, begin == part.begin);
            const RowTile tile = tile_of(part);
            const bool whole = part.begin >= share.begin && part.begin + part.units <= share.end;
            const u32 slot = Division(Config::kDivision) == Division::Own
                                 ? blockIdx.x
                                 : blockIdx.x / kv_heads * 2 * kv_heads + (part.begin > share.begin) * kv_heads + head;
            for (u32 row = warp; row < Config::kRows && tile.has(row); row += kWarps) {
                parts.add(members, row, sum, m, l);
                const i64 to = i64(slot) * Config::kRows + row;
                if (!whole && lane_index() == 0) out.stats[to] = {m, l};
                const Finished end = finish_row(out, tile, row, m, l);
#pragma unroll
                for (u32 p = 0; p < parts.kPairs; ++p) {
                    const u32 column = 64 * p + 2 * lane_index();
                    if (whole) {
                        store_finished(out, tile, row, column, Config::kD, sum[p], end);
                    } else {
                        *reinterpret_cast<float2*>(out.partial + to * Config::kD + column) = sum[p];
                    }
                }
            }
        }
    }
}

}  // namespace tilewright
