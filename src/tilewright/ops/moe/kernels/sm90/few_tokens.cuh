// The steps of few tokens around the products of their experts: order and rows, the gate with its cast, the weighted sum.
//
// A block takes 1024 columns of a row, eight a thread.  Each step starts while the one before it ends (griddepcontrol): of one token
// the products take 6 us, and five launches one behind the other nearly as long.
//
// Config: kCast (rows, or gated rows, become e4m3 with a scale for 128 neighbours); kSlots (room for slots, 64); Element (of x, y),
// Id, Weight (of topk_ids, topk_weights).
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/ptx.cuh>

namespace tilewright {

constexpr u32 kFewThreads = 128, kFewColumns = 8 * kFewThreads;

struct alignas(16) Eight { u32 words[4]; };  // 16-bit elements

template <typename Element> __device__ inline void unpack(const Eight& packed, float (&f)[8]) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) f[i] = to_float(Element{u16(packed.words[i / 2] >> (i % 2 * 16))});
}

template <typename Element> __device__ inline Eight rounded(const float (&f)[8]) {
    return {{pack<Element>(f[0], f[1]), pack<Element>(f[2], f[3]), pack<Element>(f[4], f[5]), pack<Element>(f[6], f[7])}};
}

// Casts this thread's eight of the 128 neighbours that sixteen threads hold, as tilewright.ops.quant does; the scale is returned.
__device__ inline float cast_eight(const float (&f)[8], u32 (&q)[2]) {
    float amax = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) amax = max_nan(amax, fabsf(f[i]));
#pragma unroll
    for (u32 lanes = 8; lanes > 0; lanes /= 2) amax = max_nan(amax, __shfl_xor_sync(~0u, amax, lanes));
    constexpr float kMinAmax = 1e-4f, kInverseMax = 9586981.0f / 4294967296.0f;  // fl(1 / 448)
    const float scale = max_nan(amax, kMinAmax) * kInverseMax, inverse = 1.0f / scale;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        q[i] = pack_e4m3(f[4 * i] * inverse, f[4 * i + 1] * inverse, f[4 * i + 2] * inverse, f[4 * i + 3] * inverse);
    }
    return scale;
}

// rows (slots, columns) in the order of experts, with their scales (columns / 128, pitch), and what moe_align writes: the block of
// the first columns of each token counts, among all slots, those before its own.  Grid: blocks of columns, tokens.
template <typename Config>
__global__ void __launch_bounds__(kFewThreads) few_rows_in_order(
    u8* rows, float* scales, int* slots, int* positions, int* starts, int* ends, const typename Config::Element* x,
    const typename Config::Id* ids, const int* expert_map, int total, int experts, int map_length, int top_k, int columns, i64 x_pitch,
    int pitch) {
    using Element = typename Config::Element;
    static_assert(Config::kSlots <= 64, "a warp counts with two ballots");
    __shared__ int expert_of[Config::kSlots];
    griddepcontrol_wait();
    launch_dependents();

    // Experts of all slots; `experts` for dropped ones
    const u32 token = blockIdx.y, column = blockIdx.x * kFewColumns + threadIdx.x * 8;
    const bool inside = column < u32(columns);
    Eight values{};
    if (inside) values = *reinterpret_cast<const Eight*>(x + token * x_pitch + column);
    if (threadIdx.x < Config::kSlots) {
        i64 expert = threadIdx.x < u32(total) ? i64(ids[threadIdx.x]) : -1;
        if (expert_map != nullptr && expert >= 0) expert = expert < map_length ? expert_map[expert] : -1;
        expert_of[threadIdx.x] = expert >= 0 && expert < experts ? int(expert) : experts;
    }
    __syncthreads();

    // The order, by the first block
    if (blockIdx.x == 0 && token == 0) {
        if (threadIdx.x < u32(total)) {
            const int own = expert_of[threadIdx.x];
            int row = 0;
            for (u32 s = 0; s < u32(total); ++s) row += expert_of[s] < own || (expert_of[s] == own && s < threadIdx.x);
            slots[row] = threadIdx.x;
            positions[threadIdx.x] = own < experts ? row : -1;
        }
        for (int e = threadIdx.x; e < experts; e += kFewThreads) {
            int before = 0, own = 0;
            for (u32 s = 0; s < u32(total); ++s) before += expert_of[s] < e, own += expert_of[s] == e;
            starts[e] = before;
            ends[e] = before + own;
        }
    }

    // The rows of this token
    float scale = 0;
    u32 q[2];
    if constexpr (Config::kCast) {
        float f[8];
        unpack<Element>(values, f);
        scale = cast_eight(f, q);
    }
    const u32 lane = lane_index();
    for (u32 own = token * top_k; own < (token + 1) * top_k; ++own) {
        const int mine = expert_of[own];
        u32 row = 0;
#pragma unroll
        for (u32 half = 0; half < Config::kSlots; half += 32) {
            const u32 s = half + lane;
            const bool is_before = s < u32(total) && (expert_of[s] < mine || (expert_of[s] == mine && s < own));
            row += __popc(__ballot_sync(~0u, is_before));
        }
        if (mine >= experts || !inside) continue;
        if constexpr (Config::kCast) {
            struct alignas(8) Pair { u32 words[2]; };
            *reinterpret_cast<Pair*>(rows + i64(row) * columns + column) = {{q[0], q[1]}};
            if (threadIdx.x % 16 == 0) scales[i64(column / 128) * pitch + row] = scale;
        } else {
            *reinterpret_cast<Eight*>(reinterpret_cast<Element*>(rows) + i64(row) * columns + column) = values;
        }
    }
}

// q, scales = the cast of silu(gate) * up, of rows that have both halves.  Grid: blocks of columns, rows.
template <typename Config>
__global__ void __launch_bounds__(kFewThreads) few_gated_rows(u8* q, float* scales, const typename Config::Element* both,
                                                              int columns, int pitch) {
    using Element = typename Config::Element;
    griddepcontrol_wait();
    launch_dependents();
    const u32 row = blockIdx.y, column = blockIdx.x * kFewColumns + threadIdx.x * 8;
    const bool inside = column < u32(columns);
    Eight gates{}, ups{};
    if (inside) {
        const Element* const from = both + i64(row) * 2 * columns + column;
        gates = *reinterpret_cast<const Eight*>(from);
        ups = *reinterpret_cast<const Eight*>(from + columns);
    }
    float g[8], u[8];
    unpack<Element>(gates, g);
    unpack<Element>(ups, u);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) g[i] = activate<Activation::Silu>(g[i]);
    unpack<Element>(rounded<Element>(g), g);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) g[i] *= u[i];
    unpack<Element>(rounded<Element>(g), g);
    u32 packed[2];
    const float scale = cast_eight(g, packed);
    if (!inside) return;
    struct alignas(8) Pair { u32 words[2]; };
    *reinterpret_cast<Pair*>(q + i64(row) * columns + column) = {{packed[0], packed[1]}};
    if (threadIdx.x % 16 == 0) scales[i64(column / 128) * pitch + row] = scale;
}

// out[t] = the weighted sum of the rows of token t, its first expert's first.  Grid: blocks of columns, tokens.
template <typename Config>
__global__ void __launch_bounds__(kFewThreads) few_weighted_rows(
    typename Config::Element* out, const typename Config::Element* y, const typename Config::Weight* weights,
    const int* positions, int top_k, int columns) {
    using Element = typename Config::Element;
    griddepcontrol_wait();
    launch_dependents();
    const u32 token = blockIdx.y, column = blockIdx.x * kFewColumns + threadIdx.x * 8;
    if (column >= u32(columns)) return;
    float sum[8] = {};
    constexpr u32 kBatch = 8;  // loads in flight
    for (int first = 0; first < top_k; first += kBatch) {
        Eight values[kBatch];
        float weight[kBatch];
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
            const int slot = token * top_k + first + j;
            const int row = first + int(j) < top_k ? positions[slot] : -1;
            values[j] = {};
            weight[j] = 0;
            if (row >= 0) {
                values[j] = *reinterpret_cast<const Eight*>(y + i64(row) * columns + column);
                weight[j] = to_float(weights[slot]);
            }
        }
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
            float f[8];
            unpack<Element>(values[j], f);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) sum[i] += weight[j] * f[i];
        }
    }
    *reinterpret_cast<Eight*>(out + i64(token) * columns + column) = rounded<Element>(sum);
}

}  // namespace tilewright
