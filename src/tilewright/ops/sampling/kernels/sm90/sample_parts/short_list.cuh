// A draw from a list of at most kList logits, by the definitions: pairs of them are compared, nothing is sorted or searched.
//
// A logit is kept by top-k if fewer than k are larger, and by top-p if the weights of these sum to less than its share.  A token
// is drawn if the weights of the kept tokens before it sum to u or less, and with its own to more.
#pragma once
#include "exchange.cuh"
#include "numbers.cuh"

namespace tilewright {

constexpr u32 kList = 512;

struct ListMemory {
    u64 entries[kList];  // key above, token below
    u64 chosen[kList];   // those that top-k keeps
    u64 weights[kList];  // of chosen ones
    u64 kept[kList];     // the same after all filters, or 0
};

// The parameters of one row.
struct Filters {
    float t, p, steep;
    int k;
    float cut;  // distances from here on have weights below `least`
    u64 least;
    Random random;

    __device__ bool greedy() const { return !(t > 0.0f); }
    __device__ bool restricts_k(int n) const { return t > 0.0f && k > 0 && k < n; }
    __device__ bool restricts_p() const { return t > 0.0f && p < 1.0f; }
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

// entries [0, count) are there; *chosen is 0.  n: of the row.  write(drawn) is called by one thread.
template <u32 kThreads, typename Write>
__device__ inline void draw_from_list(ListMemory& list, u32 count, int n, u32* chosen, const Filters& filters, float largest,
                                      u64* partial, Write write) {
    const auto key_of = [](u64 entry) { return int(entry >> 32); };
    u64 kept_by_k = 0;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u64 entry = list.entries[i];
        u32 larger = 0;
        if (filters.restricts_k(n)) {
#pragma unroll 8
            for (u32 j = 0; j < count; ++j) larger += key_of(list.entries[j]) > key_of(entry) ? 1 : 0;
            if (larger >= u32(filters.k)) continue;
        }
        const u32 at = atomicAdd(chosen, 1u);
        const u64 weight = weight_at(distance(value_of(key_of(entry)), largest, filters.steep));
        list.chosen[at] = entry, list.weights[at] = weight;
        kept_by_k += weight;
    }
    const u64 total_by_k = block_sum<kThreads>(kept_by_k, partial);  // also: all are chosen
    const u64 goal = share_of(total_by_k, filters.p);
    count = *chosen;

    u64 kept_by_all = 0;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const int key = key_of(list.chosen[i]);
        u64 above = 0, weight = list.weights[i];
        if (filters.restricts_p()) {
#pragma unroll 4
            for (u32 j = 0; j < count; ++j) above += key_of(list.chosen[j]) > key ? list.weights[j] : 0;
            if (above >= goal) weight = 0;
        }
        if (weight < filters.least) weight = 0;
        list.kept[i] = weight;
        kept_by_all += weight;
    }
    const u64 total = block_sum<kThreads>(kept_by_all, partial), u = random_below(filters.random, total);

    // Tokens before
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u64 weight = list.kept[i];
        if (weight == 0) continue;
        const u32 token = u32(list.chosen[i]);
        u64 before = 0;
#pragma unroll 4
        for (u32 j = 0; j < count; ++j) before += u32(list.chosen[j]) < token ? list.kept[j] : 0;
        if (before <= u && u < before + weight) write(Drawn{int(token), value_of(key_of(list.chosen[i])), weight, total});
    }
}

}  // namespace tilewright
