// The second kernel: adds the partial sums of a row tile that several blocks shared, in the order of the keys.
//
// Block (i, row, head): by_tile, i is the number of the row tile; else share i + 1 is the first that continues the row tile
// of the one before, if it does: whichever are fewer.  Threads have four columns each, and several of them divide the partial
// sums.
#pragma once

#include "division.cuh"
#include "merge.cuh"

namespace tilewright {

template <typename Config> struct Sum {
    float m = minus_infinity(), l = 0;
    float4 acc = {0, 0, 0, 0};

    __device__ void add(float m_i, float l_i, float4 a) {
        const float next = fmaxf(m, m_i), base = next == minus_infinity() ? 0 : next;
        const float old = exp2_fast(m - base), fresh = exp2_fast(m_i - base);
        l = l * old + l_i * fresh;
        acc.x = acc.x * old + a.x * fresh, acc.y = acc.y * old + a.y * fresh;
        acc.z = acc.z * old + a.z * fresh, acc.w = acc.w * old + a.w * fresh;
        m = next;
    }
};

// The partial sums of one row tile, as slots of all heads: `first`, then every `step` from `next` on.
struct Slots {
    u32 count, first, next, step;
    __device__ u32 operator[](u32 i) const { return i == 0 ? first : next + (i - 1) * step; }
};

template <typename Config, typename All>
__device__ inline Slots find_slots(Walk<All>& walk, const All& all, u32 most, u32 blocks, bool by_tile) {
    const auto row_tiles = [&](int b) { return u32(all[b].row_tiles); };
    u32 tile = 0;  // of its sequence
    if (by_tile) {
        const Place place = Line(all.count(), row_tiles).locate(blockIdx.x);
        if (place.index == all.count()) return {0, 0, 0, 0};
        tile = place.offset;
        walk.start(place.index, tile * all[place.index].units);
    }
    if constexpr (Division(Config::kDivision) == Division::Own) {
        const OwnShares own{Config::kLeast, most};
        const auto shares = [&](int b) {
            const Sequence s = all[b];
            return s.row_tiles * own.count(s.units);
        };
        const u32 count = own.count(walk.s.units);
        const u32 first = Line(all.count(), shares).sum(walk.b) + tile * count;
        return {count > 1 ? count : 0, first, first + 1, 1};
    } else {
        const auto units = [&](int b) { return all[b].all_units(); };
        const Line line(all.count(), units);
        const EqualShares<Config::kLeast> shares(line.total, blocks);
        u32 begin;
        if (by_tile) {
            begin = line.sum(walk.b) + tile * walk.s.units;
        } else {
            const u32 share = blockIdx.x + 1;
            if (share >= shares.shares) return {0, 0, 0, 0};
            const Place place = line.locate(shares.begin(share));
            walk.start(place.index, place.offset);
            if (walk.unit == 0) return {0, 0, 0, 0};  // nothing to continue
            begin = shares.begin(share) - walk.unit;
            if (shares.of_unit(begin) + 1 != share) return {0, 0, 0, 0};  // an earlier block adds them
        }
        const u32 first = shares.of_unit(begin), last = shares.of_unit(begin + walk.s.units - 1);
        if (first == last) return {0, 0, 0, 0};
        return {last - first + 1, 2 * first + (begin != shares.begin(first)), 2 * (first + 1), 2};
    }
}

template <typename Config>
__global__ void __launch_bounds__(256) sm90_decode_combine(
    const float* partial, const float* stats, typename Config::Element* o, float* lse, const int* lengths,
    const int* cu_seqlens, const float* sinks, int batch, int tokens, int each, int kv_heads, int group, int capacity,
    int left, int most, int blocks, bool by_tile) {
    using All = Sequences<Config::kRows, Config::kKeys>;
    using Element = typename Config::Element;
    constexpr u32 kD = Config::kD, kColumns = kD / 4, kParts = 256 / kColumns;
    __shared__ float4 sums[kParts][kColumns];
    __shared__ float2 of_part[kParts];

    launch_dependents();
    const All all{lengths, cu_seqlens, batch, tokens, each, group, capacity, left};
    Walk<All> walk(all);
    const Slots slots = find_slots<Config>(walk, all, most, blocks, by_tile);
    griddepcontrol_wait();
    const u32 row = blockIdx.y, head = blockIdx.z;
    const RowTile tile{walk.s.first_token, group, int(head) * group, walk.row_tile * int(Config::kRows), walk.s.tokens * group};
    if (slots.count == 0 || !tile.has(row)) return;

    const u32 column = threadIdx.x % kColumns, part = threadIdx.x / kColumns;
    Sum<Config> sum;
#pragma unroll 4
    for (u32 i = part; i < slots.count; i += kParts) {
        const i64 at = (i64(slots[i]) * kv_heads + head) * Config::kRows + row;
        const float2 stat = reinterpret_cast<const float2*>(stats)[at];
        sum.add(stat.x, stat.y, reinterpret_cast<const float4*>(partial)[at * kColumns + column]);
    }
    sums[part][column] = sum.acc;
    if (column == 0) of_part[part] = {sum.m, sum.l};
    __syncthreads();
    if (part != 0) return;
    Sum<Config> total;
#pragma unroll
    for (u32 i = 0; i < kParts; ++i) total.add(of_part[i].x, of_part[i].y, sums[i][column]);
    const Output<Element> out{o, lse, nullptr, nullptr, sinks, kv_heads * group};
    const Finished end = finish_row(out, tile, row, total.m, total.l);
    store_finished(out, tile, row, 4 * column, kD, {total.acc.x, total.acc.y}, end);
    store_finished(out, tile, row, 4 * column + 2, kD, {total.acc.z, total.acc.w}, end);
}

}  // namespace tilewright
