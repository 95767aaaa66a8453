// The tile scheduler of the backward: which block takes which tile of keys, and in which order it visits query tiles.
//
// Work items.  One item is one tile of 128 keys of one kv head.  Blocks draw item numbers from a global counter.
//
// Order of dQ.  Several key tiles add to dQ of one query tile, always in the order of their item numbers, so that results
// repeat bit for bit.  A flag per query tile counts the additions; a block waits until the flag shows its rank.  This cannot
// deadlock: a block waits only for smaller numbers, and the blocks that drew those are resident.
//
// Order of items under a causal mask.  Key tile j meets query tiles i >= j, so small j is the most work.  Heads are divided
// into sections (whose Q, dO and dQ fit the L2), and sections alternate between two orders:
// - A: key tiles from last to first, query tiles ascending.  Tile j starts at i = j, so at step t it is at i = j + t.
// - B: key tiles from first to last, query tiles descending.
// Example: four blocks, a head in section A, then a head in section B; the numbers are the query tiles of each step.
//
//     step       0   1   2   3   4
//     block 0   [3] [3   2   1   0]     A: key tile 3, B: key tile 0
//     block 1   [2   3] [3   2   1]     A: key tile 2, B: key tile 1
//     block 2   [1   2   3] [3   2]     A: key tile 1, B: key tile 2
//     block 3   [0   1   2   3] [3]     A: key tile 0, B: key tile 3
//
// In each section every query tile is visited by one block after another, each a step after the one before (query tile 3:
// blocks 0, 1, 2, 3 at steps 0, 1, 2, 3, then again at 1, 2, 3, 4), so no block waits; and A and B together give all
// blocks the same work.
#pragma once

#include "shape.cuh"

namespace tilewright {

// The first of the numbers below `count` that does not satisfy a condition which holds up to there, as std::partition_point.
template <typename Condition> __device__ inline int partition_point(int count, Condition condition) {
    int low = 0;
    while (low < count) {
        const int middle = (low + count) / 2;
        if (condition(middle)) {
            low = middle + 1;
        } else {
            count = middle;
        }
    }
    return low;
}

// Query i has position i + s_k - s_q: the last query stands at the last key.
struct BackwardSizes {
    int s_q, s_k, heads, batches, heads_per_kv;
    int left, right;            // the band: -right <= position - key <= left; negative: no bound
    int section_heads;          // kv heads of a section
    bool alternate;             // the last section has order B, the one before it A, and so on; else all have order A
    // Packed: of each key the queries that see it, then of each query tile its key tiles, for one batch after another if each
    // has its own; else null
    const Interval* intervals;

    __device__ int position(int row) const { return row + s_k - s_q; }
    template <u32 kM> __device__ int query_tile_count() const { return (s_q + int(kM) - 1) / int(kM); }
};

template <bool kPacked, bool kByBatch> struct BackwardProblem;
template <typename Config> using BackwardProblemOf = BackwardProblem<Config::kPacked, Config::kByBatch>;

// A band: causal, a window, or no mask at all.
template <> struct BackwardProblem<false, false> : BackwardSizes {
    static constexpr bool kPacked = false;

    template <u32 kM> __device__ const Interval* intervals_of(int) const { return nullptr; }
    // Key tiles that add to dQ of query tile `m` of a batch: [first_key_tile, end_key_tile).
    template <u32 kM> __device__ int first_key_tile(int, int m) const {
        return left < 0 ? 0 : max(0, position(m * int(kM)) - left) / int(kBackwardKeys);
    }
    template <u32 kM> __device__ int end_key_tile(int, int m) const {
        const int last = position(min(m * int(kM) + int(kM), s_q) - 1);
        const int keys = right < 0 ? s_k : max(0, min(s_k, last + right + 1));
        return (keys + int(kBackwardKeys) - 1) / int(kBackwardKeys);
    }
    // Of `count` query tiles, those with a query that sees one of the 128 keys from `key` on.
    template <u32 kM> __device__ Interval query_tiles(int, int key, int count) const {
        const int shift = s_k - s_q;
        const int top = right < 0 ? 0 : max(0, key - right - shift);  // first and last row that see one
        const int bottom = left < 0 ? s_q - 1 : key + int(kBackwardKeys) - 1 + left - shift;
        return {top < s_q ? top / int(kM) : count, bottom < 0 ? 0 : min(count, bottom / int(kM) + 1)};
    }
};

// Packed sequences: an interval of queries sees a key, and neither of its ends decreases from key to key.  A key tile meets
// the query tiles from its first key's begin to its last key's end.  If no query sees a key tile, the empty
// range may lie inside a query tile; the key tile visits that one too, and adds zero.  So the key tiles that add to one query
// tile have consecutive numbers.
template <bool kByBatch> struct BackwardProblem<true, kByBatch> : BackwardSizes {
    static constexpr bool kPacked = true;

    template <u32 kM> __device__ const Interval* intervals_of(int batch) const {
        return kByBatch ? intervals + batch * (s_k + query_tile_count<kM>()) : intervals;
    }
    // Bypasses the L1 (ld.cg): the preprocess kernel may have cached this line before another block wrote it.
    template <u32 kM> __device__ int first_key_tile(int batch, int m) const {
        return __ldcg(&intervals_of<kM>(batch)[s_k + m].first);
    }
    template <u32 kM> __device__ int end_key_tile(int batch, int m) const {
        return __ldcg(&intervals_of<kM>(batch)[s_k + m].end);
    }
    template <u32 kM> __device__ Interval query_tiles(int batch, int key, int count) const {
        const Interval* const keys = intervals_of<kM>(batch);
        const int first = keys[key].first, end = last_query_end(keys, key / int(kBackwardKeys));
        return {first < s_q ? first / int(kM) : count, (end + int(kM) - 1) / int(kM)};
    }
    // End of the queries that see the last key of key tile `n`.
    __device__ int last_query_end(const Interval* keys, int n) const {
        return keys[min((n + 1) * int(kBackwardKeys), s_k) - 1].end;
    }
    // Key tiles that meet query tile `m`: their queries begin before its end, and end after its begin.
    template <u32 kM> __device__ Interval key_tiles(int batch, int m) const {
        const Interval* const keys = intervals_of<kM>(batch);
        const int begin = m * int(kM), end = min(begin + int(kM), s_q);
        const int count = (s_k + int(kBackwardKeys) - 1) / int(kBackwardKeys);
        return {partition_point(count, [&](int n) { return last_query_end(keys, n) <= begin; }),
                partition_point(count, [&](int n) { return keys[n * int(kBackwardKeys)].first < end; })};
    }
};

// One work item, in shared memory: the loading thread writes it, all other warps read it.
struct BackwardTile {
    int key;          // first of the 128 keys; negative: no more items
    bool order_a;     // key tiles from last to first, query tiles ascending; else the other way round
    int head, batch;  // of K and V
    int first, end;   // query tiles to visit
    int near_end;     // packed: query tiles before it are visited for all heads first, then the rest for all heads
    int heads;        // query heads to visit: 0 if no query sees these keys
    int dq_tile;      // number of query tile 0 of the first of these heads, counted over batch and heads

    template <u32 kM, typename Problem> __device__ void assign(const Problem& problem, int number) {
        // Item number -> section, key tile within the section (slow), kv head within the section (fast)
        const int key_tile_count = (problem.s_k + int(kBackwardKeys) - 1) / int(kBackwardKeys);
        const int kv_heads = problem.heads / problem.heads_per_kv, all = kv_heads * problem.batches;
        key = -1;
        if (number >= key_tile_count * all) return;
        const int section_size = key_tile_count * problem.section_heads, section = number / section_size;
        const int item = number - section * section_size, first_head = section * problem.section_heads;
        const int section_heads = min(problem.section_heads, all - first_head);
        const int n = item / section_heads, kv_head = first_head + item - n * section_heads;
        order_a = !problem.alternate || (all - 1) / problem.section_heads % 2 != section % 2;
        key = (order_a ? key_tile_count - 1 - n : n) * int(kBackwardKeys);
        batch = kv_head / kv_heads;
        head = kv_head - batch * kv_heads;

        // The query tiles that see these keys
        const int query_tile_count = problem.template query_tile_count<kM>();
        const Interval visible = problem.template query_tiles<kM>(batch, key, query_tile_count);
        first = visible.first;
        end = visible.end;
        if constexpr (Problem::kPacked) near_end = min(first + int(kBackwardKeys / kM), end);
        heads = first < end ? problem.heads_per_kv : 0;
        dq_tile = (batch * problem.heads + head * problem.heads_per_kv) * query_tile_count;
    }
    // How many key tiles add to dQ of query tile `m` before this one.
    template <u32 kM, typename Problem> __device__ int rank(const Problem& problem, int m) const {
        const int n = key / int(kBackwardKeys);
        return order_a ? problem.template end_key_tile<kM>(batch, m) - 1 - n
                       : n - problem.template first_key_tile<kM>(batch, m);
    }
};

// Iterates over the query heads of a key tile, and over the query tiles of each head; all warps in the same order.
// Packed: over the query tiles at the key tile's own positions for all heads, then over the rest for all heads.  The last key
// tile of a sequence meets few queries, and adds to some of them after the first key tile of the next sequence, which
// may meet many; head by head it would wait for all of those (a quarter of the time for 16 or 64 sequences of random lengths).
template <bool kPacked> struct QueryTileIterator {
    int head, index;

    __device__ explicit QueryTileIterator(const BackwardTile& tile) : head(0), index(tile.first) {}
    __device__ bool more(const BackwardTile& tile) const { return kPacked ? index < tile.end : head < tile.heads; }
    __device__ void next(const BackwardTile& tile) {
        ++index;
        if constexpr (kPacked) {
            const bool near = index <= tile.near_end;
            if (index < (near ? tile.near_end : tile.end)) return;
            if (++head < tile.heads) {
                index = near ? tile.first : tile.near_end;
            } else {
                head = 0;
            }
        } else if (index == tile.end) {
            index = tile.first, ++head;
        }
    }
    __device__ int m(const BackwardTile& tile) const { return tile.order_a ? index : tile.first + tile.end - 1 - index; }
};

}  // namespace tilewright
