// Which tile of keys comes as which, and which queries see it.
//
// Blocks draw numbers from a counter.  Those that add to one dQ do so in the order of their numbers, so whom a block waits for
// has drawn before it, and works: no number of blocks that fit the machine can lock up.
//
// The order costs time only where two want to add to the same tile at once.  Under a causal mask tile j of keys meets
// queries from j on.  If all tiles of a head begin together and walk forwards, query i meets j = i, i - 1, ... one step after
// another: nobody waits, but the tiles end one after another, the shortest first.  Whoever ends then draws of the next
// heads, the longest first, and walks backwards: tile j, begun j steps later, meets query i one step after tile j - 1.  So
// both the work and the order come out even when sections of heads alternate.
#pragma once

#include "shape.cuh"

namespace tilewright {

// How many of the numbers below `count` satisfy a condition which the first ones do and the others do not.
template <typename Condition> __device__ inline int count_first(int count, Condition condition) {
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

// Query i stands at i + s_k - s_q, the last one at the last key.
struct BackwardSizes {
    int s_q, s_k, heads, batches, sharing;  // sharing: query heads of a kv head
    int left, right;                        // of a band, negative: no bound
    int together;  // kv heads that are walked at a time, so that their queries stay in the L2
    bool alternating;  // sections of heads begin with their last keys, the last section and every second before it with
                       // the first; else all with the last
    const Interval* spans;  // of each key, then of each tile of queries; of a band, null

    __device__ int position(int row) const { return row + s_k - s_q; }
    template <u32 kM> __device__ int tiles() const { return (s_q + int(kM) - 1) / int(kM); }  // of queries
};

template <bool kSpans> struct BackwardProblem;

// Allowed keys are those with -right <= position - key <= left.
template <> struct BackwardProblem<false> : BackwardSizes {
    static constexpr bool kSpans = false;

    // Tiles of keys that add to dQ of tile `m`: [first_keys, end_keys).
    template <u32 kM> __device__ int first_keys(int m) const {
        return left < 0 ? 0 : max(0, position(m * int(kM)) - left) / int(kBackwardKeys);
    }
    template <u32 kM> __device__ int end_keys(int m) const {
        const int last = position(min(m * int(kM) + int(kM), s_q) - 1);
        const int keys = right < 0 ? s_k : max(0, min(s_k, last + right + 1));
        return (keys + int(kBackwardKeys) - 1) / int(kBackwardKeys);
    }
    // Of `tiles` of queries, those that see one of a block's keys from `key` on.
    template <u32 kM> __device__ Interval seeing(int key, int tiles) const {
        const int away = s_k - s_q;
        const int top = right < 0 ? 0 : max(0, key - right - away);  // first and last row that see it
        const int bottom = left < 0 ? s_q - 1 : key + int(kBackwardKeys) - 1 + left - away;
        return {top < s_q ? top / int(kM) : tiles, bottom < 0 ? 0 : min(tiles, bottom / int(kM) + 1)};
    }
};

// Every key is seen by an interval of queries that is in memory, and neither of its ends ever decreases from key to key.  A
// tile of keys meets the tiles of queries between its first and its last end; also one tile in whose middle both ends are,
// for nothing: else the tiles of keys that add to a tile of queries would not be consecutive.
template <> struct BackwardProblem<true> : BackwardSizes {
    static constexpr bool kSpans = true;

    // Not from the L1: the kernel before may have brought this line there before another block wrote it.
    template <u32 kM> __device__ int first_keys(int m) const { return __ldcg(&spans[s_k + m].first); }
    template <u32 kM> __device__ int end_keys(int m) const { return __ldcg(&spans[s_k + m].end); }
    template <u32 kM> __device__ Interval seeing(int key, int tiles) const {
        const int first = spans[key].first, end = end_of(key / int(kBackwardKeys));
        return {first < s_q ? first / int(kM) : tiles, (end + int(kM) - 1) / int(kM)};
    }
    // Of tile `n` of keys.
    __device__ int end_of(int n) const { return spans[min((n + 1) * int(kBackwardKeys), s_k) - 1].end; }
    // Tiles of keys that meet tile `m` of queries: a begin before its end, and an end behind its begin.
    template <u32 kM> __device__ Interval meeting(int m) const {
        const int begin = m * int(kM), end = min(begin + int(kM), s_q);
        const int of_keys = (s_k + int(kBackwardKeys) - 1) / int(kBackwardKeys);
        return {count_first(of_keys, [&](int n) { return end_of(n) <= begin; }),
                count_first(of_keys, [&](int n) { return spans[n * int(kBackwardKeys)].first < end; })};
    }
};

// In shared memory: whoever draws a tile writes it, all others read.
struct BackwardTile {
    int key;          // first of the keys; negative: there is no more
    bool last_first;  // keys of this head come from the last, queries from the first; else the other way about
    int head, batch;  // the kv head
    int first, end;   // tiles of queries that see them
    int cut;          // of packed sequences: those before it are visited for all heads, then the others
    int heads;        // query heads to meet: 0 if nothing sees them
    int place;        // number of the first of these heads' first tile of queries, over batch and heads

    template <u32 kM, typename Problem> __device__ void find(const Problem& problem, int number) {
        const int of_keys = (problem.s_k + int(kBackwardKeys) - 1) / int(kBackwardKeys);
        const int kv_heads = problem.heads / problem.sharing, all = kv_heads * problem.batches;
        key = -1;
        if (number >= of_keys * all) return;
        const int of_section = of_keys * problem.together, section = number / of_section;
        const int within = number - section * of_section, begin = section * problem.together;
        const int width = min(problem.together, all - begin), turn = within / width, which = begin + within - turn * width;
        last_first = !problem.alternating || (all - 1) / problem.together % 2 != section % 2;
        key = (last_first ? of_keys - 1 - turn : turn) * int(kBackwardKeys);
        batch = which / kv_heads;
        head = which - batch * kv_heads;
        const int tiles = problem.template tiles<kM>();
        const Interval rows = problem.template seeing<kM>(key, tiles);
        first = rows.first;
        end = rows.end;
        if constexpr (Problem::kSpans) cut = min(first + int(kBackwardKeys / kM), end);
        heads = first < end ? problem.sharing : 0;
        place = (batch * problem.heads + head * problem.sharing) * tiles;
    }
    // How many add to dQ of tile `m` before this one.
    template <u32 kM, typename Problem> __device__ int rank(const Problem& problem, int m) const {
        const int n = key / int(kBackwardKeys);
        return last_first ? problem.template end_keys<kM>(m) - 1 - n : n - problem.template first_keys<kM>(m);
    }
};

// Walks over the query heads of a tile of keys, and for each over its tiles of queries; all roles in the same order.  Of
// packed sequences first over the tiles of its own positions for all heads, then over the others.  The last tile of a
// sequence meets few queries, and adds to some of them after the first tile of the next sequence, which may meet
// many; head by head it would wait for all of those (a quarter of the time for 16 or 64 sequences of random lengths).
template <bool kSpans> struct BackwardVisit {
    int head, at;

    __device__ explicit BackwardVisit(const BackwardTile& tile) : head(0), at(tile.first) {}
    __device__ bool more(const BackwardTile& tile) const { return kSpans ? at < tile.end : head < tile.heads; }
    __device__ void next(const BackwardTile& tile) {
        ++at;
        if constexpr (kSpans) {
            const bool own = at <= tile.cut;
            if (at < (own ? tile.cut : tile.end)) return;
            if (++head < tile.heads) {
                at = own ? tile.first : tile.cut;
            } else {
                head = 0;
            }
        } else if (at == tile.end) {
            at = tile.first, ++head;
        }
    }
    __device__ int m(const BackwardTile& tile) const { return tile.last_first ? at : tile.first + tile.end - 1 - at; }
};

}  // namespace tilewright
