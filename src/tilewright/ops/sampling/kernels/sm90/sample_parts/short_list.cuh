// A draw from a list of at most kList logits, by the definitions: pairs of them are compared, nothing is sorted or searched.
//
// A logit is kept by top-k if fewer than k are larger, and by top-p if the weights of the larger ones sum to less than its
// share.  A token is drawn if the weights of the kept tokens before it sum to u or less, and with its own to more.
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"

namespace tilewright {

constexpr u32 kList = 512;

struct ListMemory {
    u64 entries[kList];  // key above, token below
    u64 weights[kList];
    u64 kept[kList];     // weights after the filters, or 0; before that the sum of the larger ones' weights
};

// The parameters of one row.
struct Filters {
    bool greedy, restricts_k, restricts_p;
    int k;
    float t, p, steep;
    float cut;  // distances from here on have weights below `least`
    u64 least;
    Random random;
};

struct Drawn {
    int token;
    float logit;
    u64 weight, total;
    u64 model_mass = 0;  // of all tokens at temperature 1
};

// The sum over a block, in all threads.  partial: a number a warp.
template <u32 kThreads> __device__ inline u64 block_sum(u64 number, u64* partial) {
    number = warp_sum(number);
    __syncthreads();  // the numbers of the last sum have been read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = number;
    __syncthreads();
    u64 sum = 0;
    for (u32 w = 0; w < kThreads / 32; ++w) sum += partial[w];
    return sum;
}

// entries [0, count) are there.  write(drawn) is called by one thread.
template <u32 kThreads, typename Write>
__device__ inline void draw_from_list(ListMemory& list, u32 count, const Filters& filters, float largest, u64* partial,
                                      Write write) {
    const auto key_of = [](u64 entry) { return int(entry >> 32); };
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const float x = value_of(key_of(list.entries[i]));
        list.weights[i] = weight_at(distance(x, largest, filters.steep));
    }
    __syncthreads();

    // Larger ones: how many, and their weights
    constexpr u64 kDropped = ~0ull;
    u64 kept_by_k = 0;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const int key = key_of(list.entries[i]);
        u32 larger = 0;
        u64 above = 0;
#pragma unroll 4
        for (u32 j = 0; j < count; ++j) {
            const bool is_larger = key_of(list.entries[j]) > key;
            larger += is_larger ? 1 : 0;
            above += is_larger ? list.weights[j] : 0;
        }
        const bool kept = !filters.restricts_k || larger < u32(filters.k);
        list.kept[i] = kept ? above : kDropped;
        kept_by_k += kept ? list.weights[i] : 0;
    }
    const u64 goal = filters.restricts_p ? share_of(block_sum<kThreads>(kept_by_k, partial), filters.p) : kDropped;
    u64 kept_by_all = 0;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u64 weight = list.weights[i];
        const bool kept = list.kept[i] < goal && weight >= filters.least;
        list.kept[i] = kept ? weight : 0;
        kept_by_all += kept ? weight : 0;
    }
    const u64 total = block_sum<kThreads>(kept_by_all, partial), u = random_below(filters.random, total);

    // Tokens before
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u64 weight = list.kept[i];
        if (weight == 0) continue;
        const u32 token = u32(list.entries[i]);
        u64 before = 0;
#pragma unroll 4
        for (u32 j = 0; j < count; ++j) before += u32(list.entries[j]) < token ? list.kept[j] : 0;
        if (before <= u && u < before + weight) write(Drawn{int(token), value_of(key_of(list.entries[i])), weight, total});
    }
}

}  // namespace tilewright
