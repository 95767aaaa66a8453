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
    float4* partial;
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
    const Output<Element>& out, const RowTile& tile, u32 row, u32 column, u32 d, float4 sum, float most, float denominator) {
    if (!tile.has(row)) return;
    const Finished end = finish_row(out, tile, row, most, denominator);
    const i64 at = tile.out_row(row, out.heads);
    const uint2 packed = {pack<Element>(sum.x * end.factor, sum.y * end.factor),
                          pack<Element>(sum.z * end.factor, sum.w * end.factor)};
    *reinterpret_cast<uint2*>(out.o + at * d + column) = packed;
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
    static constexpr u32 kCount = 2 * Shape::kWarps;

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

    // The sum of all parts of the row tile that begins at `begin`: of four columns of a row.
    __device__ float4 add(u32 begin, u32 row, u32 column, float& most, float& denominator) const {
        float2 stat[kCount];
        most = minus_infinity(), denominator = 0;
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            stat[i] = {minus_infinity(), 0};
            if (part(i).begin == begin) stat[i] = stats(i)[row];
            most = fmaxf(most, stat[i].x);
        }
        const float base = most == minus_infinity() ? 0 : most;
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            if (part(i).begin != begin) continue;
            const float weight = exp2_fast(stat[i].x - base);
            const float4 x = *reinterpret_cast<const float4*>(sums(i) + row * Shape::kPitch + column);
            denominator += weight * stat[i].y;
            sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
        }
        return sum;
    }
};

// Adds the sums of the blocks of a cluster, which lie in their shared memory at kBlockOffset, and writes o; all threads of all
// blocks.  Each block has some pairs of columns of the rows; several threads divide the blocks.
template <typename Config, typename Element>
__device__ inline void merge_cluster(u8* shared, const Output<Element>& out, const RowTile& tile) {
    using Shape = Layout<Config>;
    constexpr u32 kBlocks = Config::kCluster, kThreads = Shape::kWarps * 32, kD = Shape::kD;
    constexpr u32 kPairs = Shape::kRows * kD / 2 / kBlocks;  // of a block
    constexpr u32 kAtOnce = kPairs < kThreads ? kPairs : kThreads, kGroups = kThreads / kAtOnce;
    static_assert(kPairs % 32 == 0 && kPairs % kAtOnce == 0 && kThreads % kAtOnce == 0 && kD / 2 % 32 == 0,
                  "the pairs of a warp are of one row");
    const u32 sums = shared_address(shared + Shape::kBlockOffset), stats = sums + Shape::kRows * Shape::kPitch * 4;
    float2* const groups = reinterpret_cast<float2*>(shared);  // (kGroups, kAtOnce): the rings are empty
    const u32 lane = lane_index(), group = threadIdx.x / kAtOnce, own = threadIdx.x % kAtOnce;
    cluster_sync();
#pragma unroll
    for (u32 first = 0; first < kPairs; first += kAtOnce) {
        const u32 pair = cluster_rank() * kPairs + first + own, row = pair / (kD / 2), column = pair % (kD / 2) * 2;
        // Weights of the blocks: lane r has that of block r
        const float2 stat = load_shared_remote(map_shared_rank(stats, lane % kBlocks) + row * 8);
        float most = stat.x;
#pragma unroll
        for (u32 step = 1; step < kBlocks; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float weight = exp2_fast(stat.x - (most == minus_infinity() ? 0 : most));
        float denominator = weight * stat.y;
#pragma unroll
        for (u32 step = 1; step < kBlocks; step *= 2) denominator += __shfl_xor_sync(~0u, denominator, step);
        float2 sum = {0, 0};
#pragma unroll
        for (u32 r = 0; r < kBlocks; r += kGroups) {
            if (r + group >= kBlocks) break;
            const u32 at = map_shared_rank(sums, r + group) + (row * Shape::kPitch + column) * 4;
            const float2 x = load_shared_remote(at);
            const float w = __shfl_sync(~0u, weight, r + group);
            sum.x += w * x.x, sum.y += w * x.y;
        }
        if constexpr (kGroups > 1) {
            if (group > 0) groups[group * kAtOnce + own] = sum;
            __syncthreads();
#pragma unroll
            for (u32 i = 1; i < kGroups; ++i) {
                const float2 x = groups[i * kAtOnce + own];
                if (group == 0) sum.x += x.x, sum.y += x.y;
            }
        }
        if (group == 0 && tile.has(row)) {
            const Finished end = finish_row(out, tile, row, most, denominator);
            const i64 at = tile.out_row(row, out.heads);
            *reinterpret_cast<u32*>(out.o + at * kD + column) = pack<Element>(sum.x * end.factor, sum.y * end.factor);
            if (column == 0) out.lse[at] = end.lse;
        }
    }
    cluster_sync();  // no block exits while another reads its memory
}

}  // namespace tilewright
