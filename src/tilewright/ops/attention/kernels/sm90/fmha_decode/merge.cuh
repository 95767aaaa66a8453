// Sums of keys come together: those of the warps of a block, of the blocks of a cluster, of the shares of a row tile.
// Each is (maximum, denominator, sum of P V), and all are added in the order of their numbers.
#pragma once

#include <tilewright/cluster.cuh>

#include "unit.cuh"

namespace tilewright {

// Where results go.  partial: (slots, kRows, D), stats: (slots, kRows, 2).
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
__device__ inline void store_finished(
    const Output<Element>& out, const RowTile& tile, u32 row, u32 column, u32 d, float2 sum, float most, float denominator) {
    if (!tile.has(row)) return;
    const Finished end = finish(most, denominator, out.sinks == nullptr ? nullptr : out.sinks + tile.head(row));
    const i64 at = tile.out_row(row, out.heads);
    *reinterpret_cast<u32*>(out.o + at * d + column) = pack<Element>(sum.x * end.factor, sum.y * end.factor);
    if (column == 0) out.lse[at] = end.lse;
}

// Adds the warps' sums; all threads.  store(row, column, sum of two columns, maximum, denominator).
// has_keys: this warp had a unit.   value_factor: what its sums are multiplied by.
template <typename Config, typename Store>
__device__ inline void merge_warps(
    u8* shared, Attend<Config>& attend, bool has_keys, float value_factor, const Store& store) {
    using Shape = Layout<Config>;
    constexpr u32 kColumns = Shape::kColumns, kThreads = Shape::kWarps * 32;
    float* const sums = reinterpret_cast<float*>(shared + Shape::kMergeOffset);       // (kWarps, 8, kPitch)
    float2* const stats = reinterpret_cast<float2*>(shared + Shape::kStatsOffset);    // (kWarps, kRows)
    const u32 warp = warp_index(), c = lane_index() % 4;
#pragma unroll
    for (u32 n = 0; n < Attend<Config>::kNs; ++n) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            const float denominator = sum_over_keys(attend.l[n][e]);
            if (lane_index() < 4) stats[warp * Shape::kRows + 8 * n + 2 * c + e] = {attend.m[n][e], denominator};
        }
    }
#pragma unroll
    for (u32 n = 0; n < Attend<Config>::kNs; ++n) {
#pragma unroll
        for (u32 part = 0; part < Shape::kD / kColumns; ++part) {
            if (has_keys) {
#pragma unroll
                for (u32 k = 0; k < kColumns / 16; ++k) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u32 row = 2 * c + i % 2, column = Attend<Config>::column(k, i / 2);
                        sums[(warp * 8 + row) * Shape::kPitch + column] =
                            attend.acc[n][part * (kColumns / 16) + k][i] * value_factor;
                    }
                }
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < 8 * kColumns / 2; i += kThreads) {
                const u32 row = i / (kColumns / 2), column = i % (kColumns / 2) * 2;
                float2 of_warp[Shape::kWarps];
                float most = minus_infinity(), denominator = 0;
                float2 sum = {0, 0};
#pragma unroll
                for (u32 w = 0; w < Shape::kWarps; ++w) {
                    of_warp[w] = stats[w * Shape::kRows + 8 * n + row];
                    most = fmaxf(most, of_warp[w].x);
                }
                const float base = most == minus_infinity() ? 0 : most;
#pragma unroll
                for (u32 w = 0; w < Shape::kWarps; ++w) {
                    if (of_warp[w].x == minus_infinity() && of_warp[w].y == 0) continue;  // not written; NaN is
                    const float weight = exp2_fast(of_warp[w].x - base);
                    const float2 x = *reinterpret_cast<const float2*>(&sums[(w * 8 + row) * Shape::kPitch + column]);
                    denominator += weight * of_warp[w].y;
                    sum.x += weight * x.x, sum.y += weight * x.y;
                }
                store(8 * n + row, part * kColumns + column, sum, most, denominator);
            }
            __syncthreads();
        }
    }
}

// Adds the sums of the blocks of a cluster, which lie in their shared memory, and writes o; all threads of all blocks.
// Lanes read one block each, of two columns of one row.
template <typename Config, typename Element>
__device__ inline void merge_cluster(u8* shared, const Output<Element>& out, const RowTile& tile) {
    using Shape = Layout<Config>;
    constexpr u32 kBlocks = Config::kCluster, kThreads = Shape::kWarps * 32;
    constexpr u32 kPairs = Shape::kRows * Shape::kD / 2;
    const u32 sums = shared_address(shared + Shape::kBlockOffset), stats = shared_address(shared + Shape::kBlockStatsOffset);
    const u32 rank = lane_index() % kBlocks;
    const u32 remote_sums = map_shared_rank(sums, rank), remote_stats = map_shared_rank(stats, rank);
    cluster_sync();
    // Whole warps: every lane takes part in the shuffles
    constexpr u32 kPairsPerBlock = kPairs / kBlocks, kPairsAtOnce = kThreads / kBlocks;
    static_assert(kPairs % kBlocks == 0 && 32 % kBlocks == 0, "clusters of 2, 4, 8 or 16 blocks");
    for (u32 first = 0; first < kPairsPerBlock; first += kPairsAtOnce) {
        const u32 own = first + threadIdx.x / kBlocks;
        const u32 pair = min(cluster_rank() * kPairsPerBlock + own, kPairs - 1);
        const u32 row = pair / (Shape::kD / 2);
        float2 stat = load_shared_remote(remote_stats + row * 8);
        float2 sum = load_shared_remote(remote_sums + pair * 8);
        float most = stat.x;
#pragma unroll
        for (u32 step = 1; step < kBlocks; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float weight = exp2_fast(stat.x - (most == minus_infinity() ? 0 : most));
        stat.y *= weight, sum.x *= weight, sum.y *= weight;
#pragma unroll
        for (u32 step = 1; step < kBlocks; step *= 2) {
            stat.y += __shfl_xor_sync(~0u, stat.y, step);
            sum.x += __shfl_xor_sync(~0u, sum.x, step);
            sum.y += __shfl_xor_sync(~0u, sum.y, step);
        }
        if (rank == 0 && own < kPairsPerBlock) {
            store_finished(out, tile, row, pair % (Shape::kD / 2) * 2, Shape::kD, sum, most, stat.y);
        }
    }
    cluster_sync();  // no block exits while another reads its memory
}

}  // namespace tilewright
