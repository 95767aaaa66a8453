// The k largest elements of each row, in order, in one launch: a cluster of blocks holds a row in shared memory.
//
// Few elements reach a key that at least k do, by maxima of groups (bound.cuh): these go to the first block, where the rank of
// each is counted.  For larger k the k-th key is searched by rounds of pivots (search.cuh); elements above it, and of those that
// equal it the first, go to the first block, which sorts them.
//
// Config: kThreads, kRowOffset, kBest (a power of two from k on), Element.
#pragma once
#include "sample_parts/bound.cuh"
#include "sample_parts/draw.cuh"
#include "sample_parts/search.cuh"

namespace tilewright {

// At the start of a block's shared memory; its part of the row follows at kRowOffset.
template <u32 kThreads, u32 kBest> struct TopKMemory {
    static constexpr u32 kEntries = kBest > kList ? kBest : kList;
    Barrier loaded[4];
    Barrier listed;
    Exchange<kMeasures>::Memory exchange;
    u64 partial[kThreads / 32];
    union {
        u64 found[kList];  // entries of this block, before any search
        SearchMemory<kThreads, int> search;
    };
    u64 entries[kEntries];  // of all blocks, in the first
    int groups[kMostGroups];
    int bound;
    u32 count;
};

// The key above, the complement of the index below: the larger entry comes first.
__device__ inline u64 entry_of(int key, int index) { return u64(u32(key) ^ 0x80000000u) << 32 | ~u32(index); }

// entries [0, kBest) in descending order.
template <u32 kThreads, u32 kBest> __device__ inline void sort_descending(u64* entries) {
    for (u32 size = 2; size <= kBest; size *= 2) {
        for (u32 step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < kBest / 2; pair += kThreads) {
                const u32 i = pair / step * step * 2 + pair % step, j = i + step;
                const u64 a = entries[i], b = entries[j];
                if ((a < b) == ((i & size) == 0)) entries[i] = b, entries[j] = a;
            }
        }
    }
    __syncthreads();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1024 / Config::kThreads)
    top_k(typename Config::Element* values, i64* indices, const typename Config::Element* x, i64 stride, int n, int k,
          int part_vectors) {
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32, kBest = Config::kBest;
    using Element = typename Config::Element;
    using Memory = TopKMemory<kThreads, kBest>;
    using Row = ResidentRow<Element, kThreads, int>;
    static_assert(sizeof(Memory) <= Config::kRowOffset, "the row begins after it");
    Memory& shared = *reinterpret_cast<Memory*>(dynamic_shared());
    const u32 rank = cluster_rank(), blocks = cluster_blocks(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 b = blockIdx.x / blocks;
    const Element* const elements = x + b * stride;

    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; ++i) shared.loaded[i].init(1);
        for (u32 i = 0; i < 2; ++i) shared.exchange.received[i].init(1);
        shared.listed.init(1);
        shared.count = 0;
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();
    const Row row(reinterpret_cast<Element*>(dynamic_shared() + Config::kRowOffset), shared.loaded, elements, n, rank,
                  u32(part_vectors));
    __syncthreads();  // vectors that are shared with other rows are written
    const auto is_index = [&](int index) { return index >= 0 && index < n; };
    const auto write = [&](u32 place, u64 entry) {
        const int index = int(~u32(entry));
        values[b * k + place] = elements[index];
        indices[b * k + place] = index;
    };

    // The largest key, and the bound
    const u32 j = (u32(k) + blocks - 1) / blocks;
    const bool bounded = j <= min(kMostOfBlock, kThreads / 2) && u32(n) > kList;
    const int key = row.largest_on_arrival();
    const int key_of_warp = __reduce_max_sync(~0u, key);
    if (lane == 0) shared.partial[warp] = u64(u32(key_of_warp));
    if (bounded) bound_of_block<kThreads>(key, j, shared.groups, &shared.bound);
    __syncthreads();
    cluster_wait();
    Exchange<kMeasures> rounds{shared.exchange, rank, blocks};
    Delivery delivery{shared.listed, blocks};
    rounds.begin(1);
    if (warp == 0) {
        const int largest = __reduce_max_sync(~0u, lane < kWarps ? int(shared.partial[lane]) : kNothing);
        rounds.post(0, u64(u32(largest)) << 32 | u32(bounded ? shared.bound : kNothing));
    }
    const u64* got = rounds.wait();
    const u64 of_block = got[min(lane, blocks - 1)];
    const int highest = __reduce_max_sync(~0u, int(of_block >> 32)), bound = __reduce_min_sync(~0u, int(of_block));

    // Few reach the bound: their ranks are counted
    if (bounded || u32(n) <= kList) {
        row.each_from(bound, [&](const typename Row::Elements& vector, u32 v) {
#pragma unroll
            for (u32 i = 0; i < Row::kWidth; ++i) {
                if (vector.x[i] < bound || !is_index(row.token(v, i))) continue;
                const u32 at = atomicAdd(&shared.count, 1u);
                if (at < kList) shared.found[at] = entry_of(vector.x[i], row.token(v, i));
            }
        });
        __syncthreads();
        rounds.begin(1);
        if (warp == 0) rounds.post(0, shared.count);
        got = rounds.wait();
        const u32 own = lane < blocks ? u32(got[lane]) : 0;
        const u32 count = __reduce_add_sync(~0u, own), before = __reduce_add_sync(~0u, lane < rank ? own : 0);
        if (count <= kList) {
            if (rank == 0 && threadIdx.x == 0) delivery.expect(count);
            for (u32 i = threadIdx.x; i < shared.count; i += kThreads) delivery.send(&shared.entries[before + i], shared.found[i]);
            if (rank != 0) return;
            delivery.wait();
            for (u32 i = threadIdx.x; i < count; i += kThreads) {
                const u64 entry = shared.entries[i];
                u32 place = 0;
#pragma unroll 4
                for (u32 other = 0; other < count; ++other) place += shared.entries[other] > entry ? 1 : 0;
                if (place < u32(k)) write(place, entry);
            }
            return;
        }
    }

    // The k-th key; how many are above it and at it, by warps in the order of the row, by blocks, in all
    const int kth = search<u32>(row, shared.search, rounds, bound, highest, 0.0f, 1.0f, bounded, [&](u64) { return u64(k); });
    const Part part(row.vectors, kWarps, warp);
    u32 above = 0, at = 0;
    for (u32 v = part.begin + lane; v < part.end; v += 32) {
        const auto vector = row.at(v);
#pragma unroll
        for (u32 i = 0; i < Row::kWidth; ++i) {
            above += vector.x[i] > kth ? 1 : 0;
            at += vector.x[i] == kth && is_index(row.token(v, i)) ? 1 : 0;
        }
    }
    above = __reduce_add_sync(~0u, above), at = __reduce_add_sync(~0u, at);
    __syncthreads();
    if (lane == 0) shared.partial[warp] = u64(above) << 32 | at;
    __syncthreads();
    rounds.begin(1);
    if (warp == 0) rounds.post(0, warp_sum(lane < kWarps ? shared.partial[lane] : 0));
    got = rounds.wait();
    u64 all = 0, before = 0;
    for (u32 i = 0; i < blocks; ++i) all += got[i], before += i < rank ? got[i] : 0;
    for (u32 w = 0; w < warp; ++w) before += shared.partial[w];
    const u32 all_above = u32(all >> 32);
    u32 next_above = u32(before >> 32), next_at = all_above + u32(before);

    // Elements take their places in the first block: above the k-th key in any order, at it in the order of the row
    if (rank == 0) {
        for (u32 i = u32(k) + threadIdx.x; i < kBest; i += kThreads) shared.entries[i] = 0;
        if (threadIdx.x == 0) delivery.expect(u32(k));
    }
    for (u32 first = part.begin; first < part.end; first += 32) {
        const u32 v = first + lane;
        typename Row::Elements vector = {};
        u32 own = 0;  // above in the high half
        if (v < part.end) {
            vector = row.at(v);
#pragma unroll
            for (u32 i = 0; i < Row::kWidth; ++i) {
                own += vector.x[i] > kth ? 1u << 16 : vector.x[i] == kth && is_index(row.token(v, i)) ? 1 : 0;
            }
        }
        if (__ballot_sync(~0u, own != 0) == 0) continue;
        u32 running = own;
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, running, step);
            running += lane >= step ? other : 0;
        }
        const u32 sum = __shfl_sync(~0u, running, 31);
        u32 place_above = next_above + (running - own >> 16), place_at = next_at + ((running - own) & 0xffff);
        next_above += sum >> 16, next_at += sum & 0xffff;
        if (own == 0) continue;
#pragma unroll
        for (u32 i = 0; i < Row::kWidth; ++i) {
            const int index = row.token(v, i);
            const bool is_above = vector.x[i] > kth, is_at = vector.x[i] == kth && is_index(index);
            if (!is_above && !is_at) continue;
            const u32 place = is_above ? place_above++ : place_at++;
            if (place >= u32(k)) continue;
            delivery.send(&shared.entries[place], entry_of(vector.x[i], index));
        }
    }
    if (rank != 0) return;
    delivery.wait();
    sort_descending<kThreads, kBest>(shared.entries);
    for (u32 i = threadIdx.x; i < u32(k); i += kThreads) write(i, shared.entries[i]);
}

}  // namespace tilewright
