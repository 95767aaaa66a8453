// Cross entropy of each row, and its gradient over the row: a cluster of blocks holds a row in registers between the two, so
// that it is read once and written once.
//
// A thread asks for all of its vectors at once and makes maximum and sum of exponentials of its own; warps, the block and the
// cluster combine them, and every block makes the gradient of its part.  Rows are whole vectors of 16 bytes.
//
// Config: kThreads, kVectors (of a thread), kBlocks (of a multiprocessor), Element, Index (of targets), kSmooth, kMean, kRows
// (the loss is one of each row), kGiven (dloss is).
#pragma once
#include <tilewright/cluster.cuh>
#include <tilewright/copies.cuh>

namespace tilewright {

constexpr u32 kMostRowBlocks = 16;
constexpr float kLog2e = 1.4426950408889634f, kLowest = -3.4028234663852886e38f;

template <typename Element> __device__ inline float exponential(float x) {
    if constexpr (Same<Element, float>::value) {
        return expf(x);
    } else {
        return exp2f(x * kLog2e);
    }
}

template <typename Element> __device__ inline float element(const Word4& w, u32 i) {
    if constexpr (Same<Element, float>::value) {
        return __uint_as_float(w.x[i]);
    } else {
        return to_float(Element{u16(w.x[i / 2] >> i % 2 * 16)});
    }
}

// Two elements of 16 bits, or one float.
template <typename Element> __device__ inline u32 minus_infinity_word() {
    if constexpr (Same<Element, float>::value) {
        return 0xff800000u;
    } else {
        return u32(minus_infinity<Element>().bits) * 0x10001u;
    }
}
template <typename Element> __device__ inline u32 larger(u32 a, u32 b) {
    if constexpr (Same<Element, float>::value) {
        return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    } else {
        return max_pair<Element>(a, b);
    }
}

// Hides the bits from the compiler, which would keep their conversions to float from one use to the next.
__device__ inline void hide(Word4& w) { asm volatile("" : "+r"(w.x[0]), "+r"(w.x[1]), "+r"(w.x[2]), "+r"(w.x[3])); }

// Of some logits: the largest, the sum of exponentials of their distances from it, and their sum.
struct Statistics {
    float largest = kLowest, sum = 0.0f, total = 0.0f;

    __device__ void join(float other_largest, float other_sum, float other_total) {
        const float both = fmaxf(largest, other_largest);
        sum = sum * expf(largest - both) + other_sum * expf(other_largest - both);
        largest = both;
        total += other_total;
    }
    // kLanes: a power of two; ends in the first of each so many lanes.
    template <u32 kLanes> __device__ void join_lanes() {
#pragma unroll
        for (u32 step = kLanes / 2; step > 0; step /= 2)
            join(__shfl_xor_sync(~0u, largest, step), __shfl_xor_sync(~0u, sum, step), __shfl_xor_sync(~0u, total, step));
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    cross_entropy_in_place(float* loss, float* lse, typename Config::Element* x, const typename Config::Index* target,
                           const float* totals, const float* dloss, i64 stride, i64 ignore_index, int n, int part_vectors,
                           float smoothing, float z_loss) {
    using Element = typename Config::Element;
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32, kVectors = Config::kVectors, kWidth = 16 / sizeof(Element);
    struct Memory {
        Barrier received;
        u64 of_blocks[kMostRowBlocks], totals_of_blocks[kMostRowBlocks];
        Statistics of_warps[kWarps], of_row;
    };
    Memory& shared = *reinterpret_cast<Memory*>(dynamic_shared());
    const u32 rank = cluster_rank(), blocks = cluster_blocks(), lane = threadIdx.x % 32;
    const i64 row = blockIdx.x / blocks;
    if (threadIdx.x == 0) {
        shared.received.init(1);
        fence_barrier_init();
        shared.received.arrive_and_expect_tx((Config::kSmooth ? 16 : 8) * blocks);
    }
    if (blocks > 1) cluster_arrive_relaxed();

    // Load: all vectors of a thread are on their way at once
    const i64 t = target[row];
    const bool is_row = t != ignore_index, is_class = is_row && t >= 0 && t < n;
    x += row * stride;
    Word4* const vectors = reinterpret_cast<Word4*>(x);
    const u32 all = u32(n) / kWidth, begin = min(rank * u32(part_vectors), all), end = min(begin + u32(part_vectors), all);
    const u32 nothing = minus_infinity_word<Element>();
    Word4 held[kVectors];
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
        const u32 v = begin + i * kThreads + threadIdx.x;
        held[i] = {{nothing, nothing, nothing, nothing}};
        if (v < end && is_row) held[i] = load_once(vectors + v);
    }
    // The block that has the target's logit makes the loss; the first one does where there is none
    const u32 vector_of_target = is_class ? u32(t) / kWidth : 0;
    const bool has_target = vector_of_target >= begin && vector_of_target < end;
    float x_t = __uint_as_float(0x7fc00000u);
    if (is_class && has_target && threadIdx.x == 0) x_t = to_float(x[t]);

    // Statistics of the thread, the warp, the block
    Statistics own;
    u32 largest = nothing;
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) largest = larger<Element>(largest, held[i].x[j]);
    const Word4 largest_of = {{largest, largest, largest, largest}};
    own.largest = fmaxf(fmaxf(element<Element>(largest_of, 0), element<Element>(largest_of, 1)), kLowest);
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
        hide(held[i]);
        const bool exists = begin + i * kThreads + threadIdx.x < end;
#pragma unroll
        for (u32 j = 0; j < kWidth; ++j) {
            const float value = element<Element>(held[i], j);
            own.sum += exponential<Element>(value - own.largest);
            if (Config::kSmooth && exists) own.total += value;
        }
    }
    own.template join_lanes<32>();
    if (lane == 0) shared.of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (blocks > 1) cluster_wait();  // every block has started

    // Of the row: each block sends its own to all
    if (threadIdx.x < 32) {
        Statistics joined;
        if (lane < kWarps) joined = shared.of_warps[lane];
        joined.template join_lanes<32>();
        if (blocks > 1) {
            const u64 number = u64(__float_as_uint(joined.largest)) << 32 | __float_as_uint(joined.sum);
            const u32 barrier = shared.received.address();
            if (lane < blocks) {
                store_shared_remote(map_shared_rank(shared_address(&shared.of_blocks[rank]), lane),
                                    map_shared_rank(barrier, lane), number);
                if (Config::kSmooth)
                    store_shared_remote(map_shared_rank(shared_address(&shared.totals_of_blocks[rank]), lane),
                                        map_shared_rank(barrier, lane), u64(__float_as_uint(joined.total)));
            }
            wait_acquire_cluster(shared.received, 0);
            joined = Statistics();
            if (lane < blocks) {
                const u64 received = shared.of_blocks[lane];
                joined.largest = __uint_as_float(u32(received >> 32));
                joined.sum = __uint_as_float(u32(received));
                if (Config::kSmooth) joined.total = __uint_as_float(u32(shared.totals_of_blocks[lane]));
            }
            joined.template join_lanes<16>();
        }
        if (lane == 0) shared.of_row = joined;
    }
    __syncthreads();
    const Statistics of_row = shared.of_row;

    // The loss
    const float log_sum = logf(of_row.sum), lse_of_row = is_row ? of_row.largest + log_sum : 0.0f;
    if (threadIdx.x == 0 && (is_class ? has_target : rank == 0)) {
        float value = of_row.largest - x_t + log_sum;
        if (Config::kSmooth)
            value = (1.0f - smoothing) * value + smoothing / float(n) * (float(n) * lse_of_row - of_row.total);
        if (Config::kRows && z_loss != 0.0f) value += z_loss * lse_of_row * lse_of_row;
        loss[row] = is_row ? value : 0.0f;
        lse[row] = lse_of_row;
    }

    // The gradient: of_p * p - (is target) * of_target - of_weight
    float g = Config::kGiven ? dloss[Config::kRows ? row : 0] : 1.0f, g_z = g;
    if (Config::kMean) g_z = g / totals[1], g = g / totals[0];
    if (!is_class) g = __uint_as_float(0x7fc00000u);
    const float of_weight = Config::kSmooth ? g * smoothing / float(n) : 0.0f;
    const float of_target = Config::kSmooth ? g * (1.0f - smoothing) : g;
    float of_p = g;
    if (z_loss != 0.0f) of_p += g_z * 2.0f * z_loss * lse_of_row;
    of_p /= of_row.sum;
    const u32 element_of_target = is_class ? u32(t) % kWidth : kWidth;
#pragma unroll
    for (u32 i = 0; i < kVectors; ++i) {
        const u32 v = begin + i * kThreads + threadIdx.x;
        if (v >= end) continue;
        hide(held[i]);
        float dx[kWidth];
#pragma unroll
        for (u32 j = 0; j < kWidth; ++j) {
            dx[j] = exponential<Element>(element<Element>(held[i], j) - of_row.largest) * of_p;
            if (Config::kSmooth) dx[j] -= of_weight;
        }
        if (v == vector_of_target) {
#pragma unroll
            for (u32 j = 0; j < kWidth; ++j) dx[j] = j == element_of_target ? dx[j] - of_target : dx[j];
        }
        Word4 made;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if constexpr (Same<Element, float>::value) {
                made.x[j] = __float_as_uint(dx[j]);
            } else {
                made.x[j] = pack<Element>(dx[2 * j], dx[2 * j + 1]);
            }
            if (!is_row) made.x[j] = 0;
        }
        vectors[v] = made;
    }
}

}  // namespace tilewright
