// A token drawn from each row of logits, in one launch: a cluster of blocks holds a row in shared memory, from its only read.
//
// 1. The largest logit, as the row arrives, and where top-k restricts a key that at least k reach (bound.cuh).
// 2. If few reach it, the first block gets these and draws (short_list.cuh): all the rest of the row is dropped anyway.
// 3. Otherwise thresholds of top-k and top-p by rounds of pivots (search.cuh), and a draw from what is left (draw.cuh).
// Sums are integers, so neither the number of blocks nor the order changes a bit.
//
// Config: kThreads, kRowOffset, Element.
#pragma once
#include "sample_parts/bound.cuh"
#include "sample_parts/draw.cuh"
#include "sample_parts/search.cuh"
#include "sample_parts/short_list.cuh"

namespace tilewright {

// At the start of a block's shared memory; its part of the row follows at kRowOffset.
template <u32 kThreads> struct SampleMemory {
    Barrier loaded[4];
    Barrier listed;
    Exchange<kMeasures>::Memory exchange;
    u64 partial[kThreads / 32];
    union {
        u64 found[kList];  // entries of this block, before any search
        SearchMemory<kThreads, float> search;
    };
    int groups[kMostGroups];
    Filters filters;
    u64 model_mass;  // of this block, where it is asked for
    int bound;
    u32 entries, chosen;
};

// Blocks of a multiprocessor, which bound the registers.
template <u32 kThreads> constexpr u32 kBlocksOf = kThreads <= 256 ? 3 : 1024 / kThreads;

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, kBlocksOf<Config::kThreads>)
    sample(i64* tokens, float* logprobs, const typename Config::Element* logits, const i64* seeds, const i64* positions,
           const float* temperatures, const int* top_ks, const float* top_ps, const float* min_ps, float temperature,
           int top_k, float top_p, float min_p, i64 stride, int n, int part_vectors, int mode) {
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32;
    using Element = typename Config::Element;
    using Memory = SampleMemory<kThreads>;
    static_assert(sizeof(Memory) <= Config::kRowOffset, "the row begins after it");
    Memory& shared = *reinterpret_cast<Memory*>(dynamic_shared());
    u8* const row_memory = dynamic_shared() + Config::kRowOffset;
    const u32 rank = cluster_rank(), blocks = cluster_blocks(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 b = blockIdx.x / blocks;

    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; ++i) shared.loaded[i].init(1);
        for (u32 i = 0; i < 2; ++i) shared.exchange.received[i].init(1);
        shared.listed.init(1);
        shared.entries = 0, shared.chosen = 0;
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();
    using Row = ResidentRow<Element, kThreads>;
    const Row row(reinterpret_cast<Element*>(row_memory), shared.loaded, logits + b * stride, n, rank, u32(part_vectors));

    // Parameters, in shared memory because registers are few: a warp for each, as every one takes a load and some arithmetic
    Filters& filters = shared.filters;
    if (threadIdx.x == 0) {
        filters.t = temperatures ? temperatures[b] : temperature;
        filters.steep = steepness(filters.t);
        shared.model_mass = 0;
    }
    if (threadIdx.x == 32) {
        filters.k = top_ks ? top_ks[b] : top_k;
        filters.p = top_ps ? top_ps[b] : top_p;
        filters.least = least_of(min_ps ? min_ps[b] : min_p);
        filters.cut = cut_of(filters.least);
    }
    if (threadIdx.x == kThreads - 32) filters.random = random_of(u64(seeds[b]), u64(positions[b]), 0);
    __syncthreads();  // also: vectors that are shared with other rows are written
    const u32 j = filters.restricts_k(n) ? (u32(filters.k) + blocks - 1) / blocks : 0;
    const bool bounded = j > 0 && j <= min(kMostOfBlock, kThreads / 2) && u32(n) > kList;

    // The largest logit, and the bound
    const int key = ordered(row.largest_on_arrival()), key_of_warp = __reduce_max_sync(~0u, key);
    if (lane == 0) shared.partial[warp] = u64(u32(key_of_warp));
    if (bounded) bound_of_block<kThreads>(key, j, shared.groups, &shared.bound);
    __syncthreads();
    cluster_wait();
    Exchange<kMeasures> rounds{shared.exchange, rank, blocks};
    rounds.begin(1);
    if (warp == 0) {
        const int largest = __reduce_max_sync(~0u, lane < kWarps ? int(shared.partial[lane]) : kNothing);
        rounds.post(0, u64(u32(largest)) << 32 | u32(bounded ? shared.bound : kNothing));
    }
    const u64* got = rounds.wait();
    const u64 of_block = got[min(lane, blocks - 1)];
    const int highest = __reduce_max_sync(~0u, int(of_block >> 32));
    const int bound = max(__reduce_min_sync(~0u, int(of_block)), kNothing + 1);
    if (highest <= kNothing) {
        if (rank == 0 && threadIdx.x == 0) {
            tokens[b] = -1;
            if (mode != 0) logprobs[b] = minus_infinity<float>();
        }
        return;
    }
    const float largest = value_of(highest);

    // The mass of the model's distribution
    if (mode == 2) {
        const Kept all{-kLargest, largest, steepness(1.0f), cut_of(0), 0};
        u64 sum = 0, weights[Row::kWidth];
        row.each_from(-kLargest, [&](const typename Row::Elements& vector, u32) { sum += weights_of(vector, all, weights); });
        const u64 mass = block_sum<kThreads>(sum, shared.partial);
        if (threadIdx.x == 0) shared.model_mass = mass;
    }
    const auto write = [&](const Drawn& drawn) {
        tokens[b] = drawn.token;
        if (mode == 1) {
            logprobs[b] = filters.greedy() ? 0.0f : logf(__fdiv_rn(__ull2float_rn(drawn.weight), __ull2float_rn(drawn.total)));
        } else if (mode == 2) {
            const float apart = __fsub_rn(largest, drawn.logit);
            logprobs[b] = __fsub_rn(-apart, logf(__ull2float_rn(drawn.model_mass) * 9.094947017729282e-13f));  // 2^-40
        }
    };

    // Few logits are left: a list in the first block
    if (!filters.greedy() && (bounded || u32(n) <= kList)) {
        const float lo = value_of(bound);
        row.each_from(lo, [&](const typename Row::Elements& vector, u32 v) {
#pragma unroll
            for (u32 i = 0; i < Row::kWidth; ++i) {
                if (!(vector.x[i] >= lo)) continue;
                const u32 at = atomicAdd(&shared.entries, 1u);
                if (at < kList) shared.found[at] = u64(u32(ordered(vector.x[i]))) << 32 | u32(row.token(v, i));
            }
        });
        __syncthreads();
        rounds.begin(2);
        if (warp == 0) rounds.post(0, shared.entries);
        if (warp == 1) rounds.post(1, shared.model_mass);
        got = rounds.wait();
        const u32 entries = lane < blocks ? u32(got[lane]) : 0;
        const u32 count = __reduce_add_sync(~0u, entries), before = __reduce_add_sync(~0u, lane < rank ? entries : 0);
        if (count <= kList) {
            ListMemory& list = *reinterpret_cast<ListMemory*>(row_memory);
            Delivery delivery{shared.listed, blocks};
            if (rank == 0 && threadIdx.x == 0) delivery.expect(count);
            for (u32 i = threadIdx.x; i < shared.entries; i += kThreads) delivery.send(&list.entries[before + i], shared.found[i]);
            if (rank != 0) return;
            delivery.wait();
            draw_from_list<kThreads>(list, count, n, &shared.chosen, filters, largest, shared.partial, [&](Drawn drawn) {
                for (u32 i = 0; i < blocks; ++i) drawn.model_mass += got[kMostBlocks + i];
                write(drawn);
            });
            return;
        }
    }

    // Thresholds
    int threshold = filters.greedy() ? highest : kNothing + 1;
    if (filters.restricts_k(n)) {
        threshold = search<u32>(row, shared.search, rounds, bound, highest, filters.steep, 1.0f, bounded,
                                [&](u64) { return u64(filters.k); });
    }
    if (filters.restricts_p()) {
        threshold = search<u64>(row, shared.search, rounds, threshold, highest, filters.steep, filters.t, false,
                                [&](u64 total) { return share_of(total, filters.p); });
    }

    // The draw: masses of warps, of blocks, of the row
    const Kept kept{value_of(threshold), largest, filters.steep, filters.cut, filters.least};
    const Part part(row.vectors, kWarps, warp);
    const u64 mass_of_warp = part_mass(row, part, kept);
    __syncthreads();
    if (lane == 0) shared.partial[warp] = mass_of_warp;
    __syncthreads();
    rounds.begin(2);
    if (warp == 0) rounds.post(0, warp_sum(lane < kWarps ? shared.partial[lane] : 0));
    if (warp == 1) rounds.post(1, shared.model_mass);
    got = rounds.wait();
    u64 total = 0, before = 0, model_mass = 0;
    for (u32 i = 0; i < blocks; ++i) {
        before += i < rank ? got[i] : 0;
        total += got[i], model_mass += got[kMostBlocks + i];
    }
    for (u32 w = 0; w < warp; ++w) before += shared.partial[w];
    const u64 u = filters.greedy() ? 0 : random_below(filters.random, total);
    if (before <= u && u < before + mass_of_warp) {
        draw_kept(row, part, kept, u - before, [&](int token, float logit, u64 weight) {
            write(Drawn{token, logit, weight, total, model_mass});
        });
    }
}

}  // namespace tilewright
