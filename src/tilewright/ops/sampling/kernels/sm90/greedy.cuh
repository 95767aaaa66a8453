// The likeliest token of each row: a cluster of blocks shares a row, which is read once, 16 bytes a thread and load.
//
// A thread keeps the first of its vectors that has its largest logit, and looks for the token in it at the end: that takes
// little more than one instruction an element, so that 16-bit logits are read at the memory's rate too.  Ties go to the lower
// token in the thread, the block and the cluster.
//
// Config: kThreads, Element.
#pragma once
#include <tilewright/cluster.cuh>
#include <tilewright/copies.cuh>

#include "sample_parts/vector.cuh"

namespace tilewright {

// The best vector of a thread so far, and its first element's token.
struct Best {
    float logit = minus_infinity<float>();
    int token = 0;
    Word4 vector = {};

    template <typename Element> __device__ void take(const Word4& w, int first_token) {
        const float largest = Largest<Element>(w).scalar();
        const bool better = largest > logit;
        logit = better ? largest : logit;
        token = better ? first_token : token;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) vector.x[i] = better ? w.x[i] : vector.x[i];
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    greedy(i64* tokens, const typename Config::Element* logits, i64 stride, int n, int part_vectors) {
    using Element = typename Config::Element;
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32, kWidth = 16 / sizeof(Element), kLoads = 8;
    struct Memory {
        Barrier arrived;
        u64 of_warps[kWarps], of_blocks[16];
    };
    Memory& shared = *reinterpret_cast<Memory*>(dynamic_shared());
    const u32 rank = cluster_rank(), blocks = cluster_blocks(), lane = threadIdx.x % 32;
    const i64 b = blockIdx.x / blocks;
    if (threadIdx.x == 0) {
        shared.arrived.init(1);
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    griddepcontrol_wait();
    launch_dependents();

    // The row is divided at 16 bytes of memory; its first and its last vector may belong to its neighbours too
    const Element* row = logits + b * stride;
    const u32 before = u32(reinterpret_cast<u64>(row) % 16) / sizeof(Element);
    const u32 all = (before + u32(n) + kWidth - 1) / kWidth;
    const u32 begin = min(rank * u32(part_vectors), all), end = min(begin + u32(part_vectors), all);
    const u32 whole_begin = begin == 0 && before > 0 ? 1 : begin;
    const u32 whole_end = end == all && end > begin && (before + u32(n)) % kWidth != 0 ? end - 1 : end;
    const auto token_of = [&](u32 v) { return int(v * kWidth) - int(before); };
    const Word4* const vectors = reinterpret_cast<const Word4*>(row - before);
    const auto take_edge = [&](Best& best, u32 v) {
        for (u32 i = 0; i < kWidth; ++i) {
            const int token = token_of(v) + int(i);
            if (token < 0 || token >= n) continue;
            const float x = min_nan(to_float(row[token]), kLargest);
            if (x > best.logit) best.logit = x, best.token = token;
        }
    };

    Best best;
    const u32 bits = Largest<Element>().bits;  // -inf
    const Word4 nothing = {{bits, bits, bits, bits}};
#pragma unroll 1
    for (u32 v = whole_begin + threadIdx.x; v < whole_end; v += kLoads * kThreads) {
        Word4 loaded[kLoads];
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) {
            loaded[i] = nothing;
            if (v + i * kThreads < whole_end) loaded[i] = load_once(vectors + v + i * kThreads);
        }
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) best.take<Element>(loaded[i], token_of(v + i * kThreads));
    }
    if (best.logit > minus_infinity<float>()) {
        u32 first = 0;
#pragma unroll
        for (u32 i = kWidth; i > 0; --i) first = scalar_of<float>(element_of<Element>(best.vector, i - 1)) == best.logit ? i - 1 : first;
        best.token += int(first);
    }
    // The edges are the first and the last tokens of the row: the one wins ties, the other loses them
    if (threadIdx.x == 0 && whole_begin != begin) {
        Best edge;
        take_edge(edge, begin);
        if (edge.logit >= best.logit) best.logit = edge.logit, best.token = edge.token;
    }
    if (threadIdx.x == 0 && whole_end != end && whole_end >= whole_begin) take_edge(best, whole_end);

    // A candidate: the key above, the complement of the token below; the largest wins
    const int key = ordered(best.logit), key_of_warp = __reduce_max_sync(~0u, key);
    const u32 token_of_warp = __reduce_min_sync(~0u, key == key_of_warp ? u32(best.token) : ~0u);
    if (lane == 0) shared.of_warps[threadIdx.x / 32] = u64(u32(key_of_warp) ^ 0x80000000u) << 32 | ~token_of_warp;
    __syncthreads();
    cluster_wait();
    if (threadIdx.x == 0) {
        u64 winner = 0;
        for (u32 w = 0; w < kWarps; ++w) winner = max(winner, shared.of_warps[w]);
        if (rank != 0) {
            store_shared_remote(map_shared_rank(shared_address(&shared.of_blocks[rank]), 0),
                                map_shared_rank(shared.arrived.address(), 0), winner);
        } else {
            shared.arrived.arrive_and_expect_tx(8 * (blocks - 1));
            wait_acquire_cluster(shared.arrived, 0);
            for (u32 i = 1; i < blocks; ++i) winner = max(winner, shared.of_blocks[i]);
            const int highest = int(u32(winner >> 32) ^ 0x80000000u);
            tokens[b] = highest > kNothing ? i64(~u32(winner)) : -1;
        }
    }
}

}  // namespace tilewright
