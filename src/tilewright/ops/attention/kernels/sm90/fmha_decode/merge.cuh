// Sums of keys come together: those of the warps of a block, of the blocks of a cluster, of the shares of a row tile.
// Each is (maximum, denominator, sum of P V), and all are added in the order of their keys.
#pragma once

#include <tilewright/cluster.cuh>

#include "unit.cuh"

namespace tilewright {

// Where results go.  partial: (slots, kRows, D), stats: (slots, kRows).
template <typename Element> struct Output {
    Element* o;
    float* lse;
    float* partial;
    float2* stats;
    const float* sinks;
    int heads;
};

// What a row's sum is multiplied by, and its lse; a sink joins the denominator.   most: in units of log2.
struct Finished {
    float factor, lse;
};
__device__ inline Finished finish(float most, float denominator, const float* sink) {
    float norm = 1;
    if (sink != nullptr) {
        const float of_sink = *sink * kLog2e, next = fmaxf(most, of_sink);
        const float base = next == minus_infinity() ? 0 : next;
        norm = exp2_fast(most - base);
        denominator = denominator * norm + exp2_fast(of_sink - base);
        most = base;
    }
    const bool empty = denominator == 0;
    return {empty ? 0 : norm / denominator, empty ? minus_infinity() : (most + log2f(denominator)) * kLn2};
}

// A row of a row tile: row = token * group + head of the group.
struct RowTile {
    int first_token, group, first_head, row_begin, rows;

    __device__ bool has(u32 row) const { return row_begin + int(row) < rows; }
    __device__ int head(u32 row) const { return first_head + (row_begin + int(row)) % group; }
    __device__ i64 out_row(u32 row, int heads) const {
        return i64(first_token + (row_begin + int(row)) / group) * heads + head(row);
    }
};

template <typename Element>
__device__ inline Finished finish_row(const Output<Element>& out, const RowTile& tile, u32 row, float most, float denominator) {
    return finish(most, denominator, out.sinks == nullptr ? nullptr : out.sinks + tile.head(row));
}

template <typename Element>
__device__ inline void store_finished(
    const Output<Element>& out, const RowTile& tile, u32 row, u32 column, u32 d, float2 sum, const Finished& end) {
    const i64 at = tile.out_row(row, out.heads);
    *reinterpret_cast<u32*>(out.o + at * d + column) = pack<Element>(sum.x * end.factor, sum.y * end.factor);
    if (column == 0) out.lse[at] = end.lse;
}

// A row tile that one warp has alone: from its registers to global memory, eight rows transposed to run along D.
template <typename Config, typename Element>
__device__ inline void store_warp(const Output<Element>& out, const RowTile& tile, Attend<Config>& attend, float value_factor) {
    constexpr u32 kD = Config::kD;
    const u32 g = lane_index() / 4, c = lane_index() % 4;
#pragma unroll
    for (u32 n = 0; n < Attend<Config>::kNs; ++n) {
        float factor[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            const u32 row = 8 * n + 2 * c + e;
            const float denominator = sum_over_keys(attend.l[n][e]);
            factor[e] = 0;
            if (!tile.has(row)) continue;
            const Finished end = finish_row(out, tile, row, attend.m[n][e], denominator);
            factor[e] = end.factor * value_factor;
            if (g == 0) out.lse[tile.out_row(row, out.heads)] = end.lse;
        }
        const u32 row = 8 * n + g;
        Element* const to = out.o + tile.out_row(row, out.heads) * kD;
#pragma unroll
        for (u32 k = 0; k < Attend<Config>::kKs; ++k) {
            const float(&a)[4] = attend.acc[n][k];
            const u32 low = transpose_8x8(pack<Element>(a[0] * factor[0], a[1] * factor[1]));
            const u32 high = transpose_8x8(pack<Element>(a[2] * factor[0], a[3] * factor[1]));
            if (!tile.has(row)) continue;
            if constexpr (Attend<Config>::kWidened) {  // even columns, odd ones
                *reinterpret_cast<uint2*>(to + 16 * k + 4 * c) = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
            } else {
                *reinterpret_cast<u32*>(to + 16 * k + 2 * c) = low;
                *reinterpret_cast<u32*>(to + 16 * k + 2 * c + 8) = high;
            }
        }
    }
}

// A part of a row tile that a warp leaves for the others.   begin: the tile's first unit, in the block's numbers.
struct Part {
    u32 begin, units;
    int first_token, row_begin, rows;
};
constexpr u32 kNoPart = ~0u;

// The parts of a block: of warp w, part 2 w is the row tile with which it begins, 2 w + 1 that with which it ends.
template <typename Config> struct Parts {
    using Shape = Layout<Config>;
    static constexpr u32 kCount = 2 * Shape::kWarps, kPairs = Shape::kD / 64;
    static_assert(kCount <= 32, "a lane for each part");

    u8* shared;

    __device__ Part& part(u32 i) const { return reinterpret_cast<Part*>(shared + Shape::kPartsOffset)[i]; }
    __device__ float* sums(u32 i) const {
        const u32 offset = i % 2 == 0 ? Shape::kFirstOffset + i / 2 * Shape::kSumBytes : i / 2 * Shape::kRingBytes;
        return reinterpret_cast<float*>(shared + offset);
    }
    __device__ float2* stats(u32 i) const { return reinterpret_cast<float2*>(sums(i) + Shape::kRows * Shape::kPitch); }

    // All lanes of a warp.
    __device__ void store(u32 i, const Part& p, const Attend<Config>& attend, float value_factor) const {
        const u32 c = lane_index() % 4;
        float* const to = sums(i);
#pragma unroll
        for (u32 n = 0; n < Attend<Config>::kNs; ++n) {
#pragma unroll
            for (u32 k = 0; k < Attend<Config>::kKs; ++k) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    const u32 row = 8 * n + 2 * c + j % 2, column = Attend<Config>::column(k, j / 2);
                    to[row * Shape::kPitch + column] = attend.acc[n][k][j] * value_factor;
                }
            }
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const float denominator = sum_over_keys(attend.l[n][e]);
                if (lane_index() < 4) stats(i)[8 * n + 2 * c + e] = {attend.m[n][e], denominator};
            }
        }
        if (lane_index() == 0) part(i) = p;
    }

    // Sums of the parts in the mask `members`, of one row; all lanes of a warp, which hold columns 64 p + 2 lane of it.
    __device__ void add(u32 members, u32 row, float2 (&sum)[kPairs], float& most, float& denominator) const {
        float2 stat = {minus_infinity(), 0};
        if (members >> lane_index() & 1) stat = stats(lane_index())[row];
        most = stat.x;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float weight = exp2_fast(stat.x - (most == minus_infinity() ? 0 : most));
        denominator = weight * stat.y;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) denominator += __shfl_xor_sync(~0u, denominator, step);
#pragma unroll
        for (u32 p = 0; p < kPairs; ++p) sum[p] = {0, 0};
        for (; members != 0; members &= members - 1) {
            const u32 i = __ffs(members) - 1;
            const float w = __shfl_sync(~0u, weight, i);
            const float* const from = sums(i) + row * Shape::kPitch + 2 * lane_index();
#pragma unroll
            for (u32 p = 0; p < kPairs; ++p) {
                const float2 x = *reinterpret_cast<const float2*>(from + 64 * p);
                sum[p].x += w * x.x, sum[p].y += w * x.y;
            }
        }
    }
};

// Adds the sums of the blocks of a cluster; all threads of all blocks.  Each has some pairs of columns of the rows.
// send: one row of this block, by one warp, to the blocks that add its columns.
template <typename Config, typename Element> struct ClusterSum {
    using Shape = Layout<Config>;
    static constexpr u32 kBlocks = Config::kCluster, kD = Shape::kD, kPairs = Shape::kRows * kD / 2 / kBlocks;

    u8* shared;

    __device__ void send(u32 row, const float2 (&sum)[kD / 64], float most, float denominator) const {
        const u32 to = shared_address(shared + Shape::kExchangeOffset), lane = lane_index();
#pragma unroll
        for (u32 p = 0; p < kD / 64; ++p) {
            const u32 pair = row * (kD / 2) + 32 * p + lane;
            const u32 at = to + (cluster_rank() * kPairs + pair % kPairs) * 8;
            store_shared_remote(map_shared_rank(at, pair / kPairs), sum[p]);
        }
        const u32 stats = shared_address(shared + Shape::kExchangeStatsOffset) + (cluster_rank() * Shape::kRows + row) * 8;
        if (lane < kBlocks) store_shared_remote(map_shared_rank(stats, lane), {most, denominator});
    }

    // After a barrier of the cluster.
    __device__ void finish(const Output<Element>& out, const RowTile& tile) const {
        const float2* const sums = reinterpret_cast<const float2*>(shared + Shape::kExchangeOffset);
        const float2* const stats = reinterpret_cast<const float2*>(shared + Shape::kExchangeStatsOffset);
        for (u32 i = threadIdx.x; i < kPairs; i += Shape::kWarps * 32) {
            const u32 pair = cluster_rank() * kPairs + i, row = pair / (kD / 2);
            if (!tile.has(row)) continue;
            float2 stat[kBlocks], sum = {0, 0};
            float most = minus_infinity(), denominator = 0;
#pragma unroll
            for (u32 r = 0; r < kBlocks; ++r) {
                stat[r] = stats[r * Shape::kRows + row];
                most = fmaxf(most, stat[r].x);
            }
            const float base = most == minus_infinity() ? 0 : most;
#pragma unroll
            for (u32 r = 0; r < kBlocks; ++r) {
                const float weight = exp2_fast(stat[r].x - base);
                const float2 x = sums[r * kPairs + i];
                denominator += weight * stat[r].y;
                sum.x += weight * x.x, sum.y += weight * x.y;
            }
            store_finished(out, tile, row, pair % (kD / 2) * 2, kD, sum, finish_row(out, tile, row, most, denominator));
        }
    }
};

}  // namespace tilewright
